//! Classifies failures: faults of the emulated host (docs/guide/lab.md), timeouts, and faults of this
//! project.

use crate::lane::End;

/// The class of a failure. Only the first two are retried, and only where hosts are emulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The lab host died or fell silent, or the console shows a known fault of the emulation.
    Lab,
    /// A time limit passed. A slow machine causes this too, so a second timeout fails the run.
    Late,
    /// Anything else: a wrong value, a wrong message, a crash.
    Ours,
}

/// Console lines that known faults of the emulation leave, in hosts and in guests.
const LAB_MARKS: &[&str] = &[
    "watchdog: BUG: soft lockup",
    "rcu: INFO: rcu_",
    "hard LOCKUP",
    "the guest's processor met a triple fault",
    "triple fault",
    "THE LAB",
    // A host that hung at its start twice. After a first time the lab starts again, with other words.
    "was not up after 60s; its console",
];
/// Words of the tests' own waits after their limit has passed.
const LATE_MARKS: &[&str] = &[
    ": not within ",
    " within ",
    "killed at its limit",
    "no agent answers",
];

/// Classifies the failure of a program in which no test failed.
pub fn of_program(end: &End) -> Kind {
    match end {
        End::LabLost(_) => Kind::Lab,
        End::OverLimit(_) => Kind::Late,
        End::Exited(_) => Kind::Ours,
    }
}

/// Classifies a test's failure by the test's output.
pub fn of_test(text: &str) -> Kind {
    let has = |marks: &[&str]| marks.iter().any(|mark| text.contains(mark));
    // The panic message comes first, then the VM's logs and console.
    let reason = text.split("--- ").next().unwrap_or(text);
    if has(LAB_MARKS) {
        Kind::Lab
    } else if LATE_MARKS.iter().any(|mark| reason.contains(mark)) {
        Kind::Late
    } else {
        Kind::Ours
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_dead_host_is_the_labs_fault_and_a_wrong_value_is_ours() {
        assert_eq!(of_program(&End::LabLost("silent".into())), Kind::Lab);
        assert_eq!(of_program(&End::OverLimit(Duration::from_secs(1))), Kind::Late);
        assert_eq!(of_program(&End::Exited(134)), Kind::Ours);
        assert_eq!(
            of_test("assertion `left == right` failed\n  left: 1\n right: 2"),
            Kind::Ours
        );
        assert_eq!(
            of_test("the agent of t-boot-7: not within 120s\n--- t-boot-7: output of inspect"),
            Kind::Late
        );
        let console =
            "assertion failed\n--- t-boot-7: logs\nwatchdog: BUG: soft lockup - CPU#1 stuck for 82s!";
        assert_eq!(of_test(console), Kind::Lab);
    }

    #[test]
    fn a_limit_that_only_the_vms_log_speaks_of_is_no_late_test() {
        assert_eq!(
            of_test("assertion failed: wrong\n--- t-x: logs\nno answer within 5 s"),
            Kind::Ours
        );
    }
}
