//! Orders of a person to move a vCPU to a CPU of its cell, and their outcomes.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use policy::cpu::message::Refusal;

/// Time limit for the drivers to carry out an order.
const ORDER_LIMIT: Duration = Duration::from_secs(2);

/// Outcome of an order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Outcome {
    /// The vCPU is in the queue of the CPU.
    Moved,
    /// No driver has the VM.
    NotDriven,
    /// The cell has no such CPU.
    NoCpu,
    /// A driver refuses.
    Refused(Refusal),
}

impl Outcome {
    /// The result for the client that orders vCPU `vcpu` to `cpu`; none if no driver has the VM.
    fn result(self, vcpu: u8, cpu: usize) -> Option<Result<(), String>> {
        let why = match self {
            Self::Moved => return Some(Ok(())),
            Self::NotDriven => return None,
            Self::NoCpu => format!("CPU {cpu} is none of the cell's"),
            Self::Refused(refusal) => reason(refusal, vcpu, cpu),
        };
        Some(Err(why))
    }
}

/// A driver's reason, for people.
fn reason(refusal: Refusal, vcpu: u8, cpu: usize) -> String {
    match refusal {
        Refusal::SameVm => format!(
            "CPU {cpu} has another vCPU of the VM, and no two of a VM share one; help: move that one first, \
             or name another CPU"
        ),
        Refusal::NotAllowed => format!(
            "vCPU {vcpu} is pinned to other CPUs than {cpu}; help: `mirrorball update VM --pin {vcpu}=all` \
             ends the pin"
        ),
        Refusal::NoRoom => {
            format!("CPU {cpu} has gone, or has as many vCPUs as it can; help: name another CPU")
        }
        Refusal::NotHere | Refusal::Running | Refusal::TooSoon | Refusal::Balanced | Refusal::Reserved => {
            format!("vCPU {vcpu} changes its CPU just now; help: try again")
        }
    }
}

/// Sends an order by `send`, and waits for its outcome. None if no driver has the VM.
pub(super) fn order(vcpu: u8, cpu: usize, send: impl FnOnce(Sender<Outcome>)) -> Option<Result<(), String>> {
    let (tell, told) = mpsc::channel();
    send(tell);
    await_outcome(&told, vcpu, cpu, ORDER_LIMIT)
}

fn await_outcome(
    told: &Receiver<Outcome>,
    vcpu: u8,
    cpu: usize,
    limit: Duration,
) -> Option<Result<(), String>> {
    match told.recv_timeout(limit) {
        Ok(outcome) => outcome.result(vcpu, cpu),
        Err(mpsc::RecvTimeoutError::Timeout) => Some(Err(format!(
            "the driver of CPU {cpu} does not answer; `mirrorball inspect` shows where vCPU {vcpu} is"
        ))),
        // The VM was taken from the drivers meanwhile.
        Err(mpsc::RecvTimeoutError::Disconnected) => Some(Err(
            "the VM ended, rebooted or changed its pins meanwhile; help: try again".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_a_line_with_a_help_and_name_vcpu_and_cpu() {
        let refused = |refusal| Outcome::Refused(refusal).result(1, 5).unwrap().unwrap_err();
        for (refusal, words) in [
            (Refusal::SameVm, "CPU 5 has another vCPU of the VM"),
            (Refusal::NotAllowed, "update VM --pin 1=all"),
            (Refusal::NoRoom, "CPU 5 has gone"),
            (Refusal::NotHere, "vCPU 1 changes its CPU just now"),
            (Refusal::Running, "vCPU 1 changes its CPU just now"),
        ] {
            let why = refused(refusal);
            assert!(why.contains(words) && why.contains("help: "), "{why}");
            assert!(!why.contains('\n'), "{why}");
        }
        assert_eq!(Outcome::Moved.result(1, 5), Some(Ok(())));
        assert_eq!(Outcome::NotDriven.result(1, 5), None);
        let why = Outcome::NoCpu.result(1, 5).unwrap().unwrap_err();
        assert_eq!(why, "CPU 5 is none of the cell's");
    }

    #[test]
    fn order_without_an_outcome_ends_with_the_reason() {
        let (tell, told) = mpsc::channel();
        let outcome = |told| {
            await_outcome(told, 1, 5, Duration::from_millis(1))
                .unwrap()
                .unwrap_err()
        };
        assert!(outcome(&told).starts_with("the driver of CPU 5 does not answer"));
        drop(tell);
        assert!(outcome(&told).contains("meanwhile"));
    }
}
