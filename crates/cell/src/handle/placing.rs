//! Moves of a vCPU to a CPU by order of a person.
//!
//! On a CPU of its VM's cell, the driver of the CPU takes the vCPU, or refuses; where Linux has the VM, the
//! order is a pin. A CPU of another cell of the host is borrowed ([`super::borrowed_cpus`]).

use std::io;

use config::cluster::CellPlan;
use config::cpulist;
use registry::cluster::files::Files;
use registry::cluster::interface::BorrowedCpu;
use registry::control::{PlacedBy, Placement};
use registry::update::{Pin, Update};
use registry::vms::Record;

use super::{VmChange, VmHandle};
use crate::link::not_running;

/// Cell of the CPU to which a vCPU is ordered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Target {
    /// The VM's own cell, or the VM is in none, or spans several.
    Own,
    /// Another cell of the host.
    Other(u16),
}

impl VmHandle {
    /// Has a vCPU run on a CPU of the host.
    ///
    /// # Errors
    /// If the VM does not run, has no such vCPU, or may not use the CPU, or the CPU's driver or its cell
    /// refuses.
    pub fn place_vcpu(&self, vcpu: u8, cpu: usize) -> io::Result<Placement> {
        let _updating = self.begin_update();
        let record = self.record()?;
        check_vcpu(&record, vcpu)?;
        match target(&record, cpu)? {
            Target::Other(cell) => {
                let borrowed = BorrowedCpu {
                    vcpu,
                    cell,
                    cpu,
                    is_automatic: false,
                };
                self.borrow_cpu(&record, borrowed)
            }
            Target::Own => {
                let ended = self.return_cpu(&record, vcpu)?;
                let placement = self.place_at_home(vcpu, cpu)?;
                Ok(Placement { ended, ..placement })
            }
        }
    }

    /// The record of a VM that runs.
    pub(super) fn record(&self) -> io::Result<Record> {
        let record = self.recorder().read(Record::clone);
        record.ok_or_else(not_running)
    }

    /// Has a vCPU run on a CPU that its VM may use anyway.
    fn place_at_home(&self, vcpu: u8, cpu: usize) -> io::Result<Placement> {
        if let Some(ordered) = self.0.observer.get().and_then(|drivers| drivers.order(vcpu, cpu)) {
            ordered.map_err(io::Error::other)?;
            return Ok(Placement {
                by: PlacedBy::Driver,
                ..Placement::default()
            });
        }
        let pin = Pin {
            vcpu,
            cpus: vec![cpu],
        };
        let update = Update {
            pins: vec![pin.clone()],
            ..Update::default()
        };
        self.check_pins(&self.record()?, &update)?;
        self.pin(&pin)?;
        self.report_change(VmChange::Updated);
        Ok(Placement::default())
    }
}

fn check_vcpu(record: &Record, vcpu: u8) -> io::Result<()> {
    let vcpus = record.spec.cpus;
    if vcpu < vcpus {
        return Ok(());
    }
    let known = match vcpus {
        1 => "0".to_owned(),
        _ => format!("0-{}", vcpus - 1),
    };
    Err(io::Error::other(format!(
        "the VM has no vCPU {vcpu}; help: name one of {known}"
    )))
}

fn target(record: &Record, cpu: usize) -> io::Result<Target> {
    match record.cell {
        Some(own) if record.span.is_empty() => target_in(&Files::open()?.plan()?, own, cpu),
        // A pin's refusal names the CPUs that the vCPU may use.
        _ => Ok(Target::Own),
    }
}

/// The cell of a CPU among those of the host, for a VM of the cell `own`.
fn target_in(plan: &[CellPlan], own: u16, cpu: usize) -> io::Result<Target> {
    let has = |cell: &&CellPlan| cell.cpus.contains(&cpu);
    // Cells may name the same CPUs, for tests.
    if plan.iter().filter(has).any(|cell| cell.number == own) {
        return Ok(Target::Own);
    }
    if let Some(cell) = plan.iter().find(has) {
        return Ok(Target::Other(cell.number));
    }
    let known = plan
        .iter()
        .map(|cell| format!("{} (cell {})", cpulist::write(&cell.cpus), cell.number));
    let known: Vec<String> = known.collect();
    Err(io::Error::other(format!(
        "no cell of this host has CPU {cpu}; help: name one of {}",
        known.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_is_of_the_vms_cell_of_another_one_or_refused_with_those_there_are() {
        let cell = |number: u16, cpus: &[usize]| CellPlan {
            number,
            host: None,
            cpus: cpus.to_vec(),
            nodes: vec![0],
            memory_bytes: 1 << 30,
        };
        let plan = [cell(0, &[0, 1]), cell(1, &[1, 2, 3])];
        let target = |own, cpu| target_in(&plan, own, cpu).map_err(|error| error.to_string());
        assert_eq!(target(0, 0), Ok(Target::Own));
        assert_eq!(target(1, 1), Ok(Target::Own), "both have it");
        assert_eq!(target(0, 3), Ok(Target::Other(1)));
        assert_eq!(target(1, 0), Ok(Target::Other(0)));
        let why = "no cell of this host has CPU 9; help: name one of 0-1 (cell 0), 1-3 (cell 1)";
        assert_eq!(target(0, 9), Err(why.to_owned()));
    }

    #[test]
    fn vcpu_that_the_vm_does_not_have_is_refused_with_those_that_it_has() {
        let with = |cpus: u8| {
            let spec = config::parse("vm.toml", &format!("image = \"x\"\ncpus = {cpus}\n")).unwrap();
            Record::new("one".to_owned(), spec, 3)
        };
        let check = |cpus, vcpu| check_vcpu(&with(cpus), vcpu).map_err(|error| error.to_string());
        assert_eq!(check(2, 1), Ok(()));
        let why = |known: &str| Err(format!("the VM has no vCPU 2; help: name one of {known}"));
        assert_eq!(check(2, 2), why("0-1"));
        assert_eq!(check(1, 2), why("0"));
    }
}
