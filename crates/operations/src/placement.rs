//! Orders about the CPUs of a running VM of this host: moves and pins of vCPUs, and the limit of CPUs.

use std::io::ErrorKind;
use std::time::Duration;

use config::cpulist;
use registry::control::{Answer, PlacedBy, Placement, Request, ask};
use registry::update::{Pin, Update};
use registry::vms::{Registry, RegistryError};

use crate::failure::{Failure, Kind};

/// Time limit for a VM to carry an order out.
const ORDER_LIMIT: Duration = Duration::from_secs(10);

/// A vCPU that has moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Pause of the vCPU, in nanoseconds.
    pub still_ns: u64,
    /// CPUs that it was pinned to, if the move has removed its pin.
    pub dropped_pin: Option<Vec<usize>>,
}

/// Moves a vCPU of a VM that spans cells to another of them.
///
/// # Errors
/// If no such VM runs here, it refuses, or it does not answer within 10 s.
pub fn move_vcpu(vm: &str, vcpu: u8, cell: u16) -> Result<Moved, Failure> {
    match order(vm, &Request::Move { vcpu, cell })? {
        Answer::Moved {
            still_ns,
            dropped_pin,
        } => Ok(Moved {
            still_ns,
            dropped_pin,
        }),
        _ => Err(ended(vm)),
    }
}

/// Has a vCPU run on a CPU of the host. The driver of the CPU takes it, if drivers have the VM; else it is
/// pinned.
///
/// # Errors
/// As [`move_vcpu`].
pub fn place_vcpu(vm: &str, vcpu: u8, cpu: usize) -> Result<Placement, Failure> {
    match order(vm, &Request::Place { vcpu, cpu })? {
        Answer::Placed(placement) => Ok(placement),
        _ => Err(ended(vm)),
    }
}

/// Formats what has become of a vCPU that was moved to a CPU.
pub fn placed_line(vm: &str, vcpu: u8, cpu: usize, placement: &Placement) -> String {
    let why = match placement.by {
        PlacedBy::Pin => "it is pinned there",
        PlacedBy::Driver => "drivers may move it again",
        PlacedBy::Loan => "another cell lends it",
    };
    let of_cell = placement.cell.map(|cell| format!(" of cell {cell}"));
    let mut line = format!(
        "vCPU {vcpu} of {vm} runs on CPU {cpu}{}; {why}",
        of_cell.unwrap_or_default()
    );
    if let Some(cell) = placement.began {
        line += &format!("; {vm} ends with cell {cell} from now on");
    }
    if let Some(cell) = placement.ended {
        line += &format!("; {vm} does not depend on cell {cell} any more");
    }
    if let Some(cpus) = &placement.dropped_pin {
        line += &format!("; its pin to CPUs {} is dropped", cpulist::write(cpus));
    }
    line
}

/// Pins a vCPU to CPUs of the host; an empty list ends its pin.
///
/// # Errors
/// As [`move_vcpu`].
pub fn pin_vcpu(vm: &str, vcpu: u8, cpus: Vec<usize>) -> Result<(), Failure> {
    let pins = vec![Pin { vcpu, cpus }];
    let update = Update {
        pins,
        ..Update::default()
    };
    order(vm, &Request::Update(update)).map(drop)
}

/// Sets the number of host CPUs that a VM uses at most; none for no limit.
///
/// # Errors
/// As [`move_vcpu`].
pub fn set_cpu_limit(vm: &str, limit: Option<f64>) -> Result<(), Failure> {
    let update = Update {
        cpu_limit: Some(limit),
        ..Update::default()
    };
    order(vm, &Request::Update(update)).map(drop)
}

fn order(vm: &str, request: &Request) -> Result<Answer, Failure> {
    let registry = Registry::open().map_err(Failure::host)?;
    let folder = registry.find(vm).map_err(|error| match error {
        RegistryError::Unknown { .. } => {
            Failure::new(Kind::Unknown, error.to_string()).help("`mirrorball ps` lists them")
        }
        error => Failure::host(error),
    })?;
    let answer = ask(&folder, request, Some(ORDER_LIMIT)).map_err(|error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Failure::new(
            Kind::Late,
            format!("{vm}: no answer for {} s", ORDER_LIMIT.as_secs()),
        )
        .help("the order may still be carried out; see `mirrorball inspect`"),
        _ => Failure::host(format!(
            "{vm}: the process that serves it can't be asked: {error}"
        )),
    })?;
    match answer {
        Answer::Refused { why } => Err(Failure::new(Kind::Refused, format!("{vm}: {why}"))),
        Answer::Ended { .. } => Err(ended(vm)),
        answer => Ok(answer),
    }
}

fn ended(vm: &str) -> Failure {
    Failure::new(Kind::Refused, format!("{vm}: the VM has ended"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_about_a_placed_vcpu_has_what_keeps_it_there_and_what_the_vm_depends_on() {
        let line = |placement: &Placement| placed_line("web", 1, 3, placement);
        let of = |by| Placement {
            by,
            ..Placement::default()
        };
        assert_eq!(
            line(&of(PlacedBy::Pin)),
            "vCPU 1 of web runs on CPU 3; it is pinned there"
        );
        assert_eq!(
            line(&of(PlacedBy::Driver)),
            "vCPU 1 of web runs on CPU 3; drivers may move it again"
        );
        let lent = Placement {
            cell: Some(1),
            began: Some(1),
            ended: Some(2),
            dropped_pin: Some(vec![0, 1]),
            ..of(PlacedBy::Loan)
        };
        assert_eq!(
            line(&lent),
            "vCPU 1 of web runs on CPU 3 of cell 1; another cell lends it; web ends with cell 1 from now on; \
             web does not depend on cell 2 any more; its pin to CPUs 0-1 is dropped"
        );
    }
}
