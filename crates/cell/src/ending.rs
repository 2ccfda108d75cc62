//! The ending of a VM, as an exit status and a line of text; and the shard whose end was the reason.

use shard_api::launch::Ending;

use crate::reboot::{QUICK, QUICK_MAX};

/// The exit status of `mirrorball run` for an ending (`docs/reference/cli.md`).
pub fn status(ending: &Ending) -> u8 {
    match ending {
        // No VM ends with it.
        Ending::Reboot => 0,
        other => other.exit_status(),
    }
}

/// One line for a person; `None` for a clean ending.
pub fn reason(ending: &Ending) -> Option<String> {
    Some(match ending {
        Ending::PowerOff | Ending::Reboot => return None,
        Ending::Panic => "the guest's kernel panicked".to_owned(),
        Ending::TripleFault => "the guest ended in a triple fault".to_owned(),
        Ending::KvmInternalError { detail } => format!("KVM could not go on: {detail}"),
        Ending::ShardFailed { detail } | Ending::PeerLost { detail } => format!("the shard failed: {detail}"),
        Ending::Quit => "killed".to_owned(),
        Ending::RebootLoop => format!(
            "the guest reboots too fast: {QUICK_MAX} times in a row within {} s of its start; see its \
             console",
            QUICK.as_secs()
        ),
    })
}

/// The reason for the end of a VM that depended on a cell that has failed.
pub(crate) fn of_failed_cell(cell: u16) -> String {
    format!("cell {cell}, of which the VM used CPUs or memory, has failed")
}

/// The ending of a shard without a last report: `gone` describes its end, and `is_out_of_memory` says whether
/// the kernel has killed processes of its VM's control group for memory.
fn of_gone(gone: String, is_out_of_memory: bool) -> Ending {
    let detail = if is_out_of_memory {
        format!(
            "{gone}; the VM used more of the host's memory than its memory_limit; help: raise memory_limit, \
             or have the guest use less: its temporary overlays count if they lie in memory"
        )
    } else {
        gone
    };
    Ending::ShardFailed { detail }
}

/// The ending of a VM whose shard reported none. Only a kill is a cause of it: while a stop waits for the
/// guest, the cause is the shard's own end.
pub(crate) fn of_silent(gone: String, was_killed: bool, is_out_of_memory: bool) -> Ending {
    match was_killed {
        true => Ending::Quit,
        false => of_gone(gone, is_out_of_memory),
    }
}

/// The ending of a VM of several shards, if a shard beside its home caused it. `home` is the last report of
/// the home, if it sent one; `part` is the ending of the first other shard that ended without an order.
/// `was_told` says whether the VM was to end.
pub(crate) fn of_part(home: Option<&Ending>, part: Option<Ending>, was_told: bool) -> Option<Ending> {
    let home_has_none = match home {
        Some(Ending::PeerLost { .. }) => true,
        Some(Ending::Quit) => !was_told,
        // A home without a last report was killed, and the status of its process names the signal.
        _ => false,
    };
    part.filter(|part| !is_witness(part) || home_has_none)
}

/// Whether an ending only reports the end of another shard, whose own ending is the reason.
pub(crate) fn is_witness(ending: &Ending) -> bool {
    matches!(ending, Ending::PeerLost { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed() -> Ending {
        Ending::ShardFailed {
            detail: "its process was ended by SIGKILL".to_owned(),
        }
    }

    fn witness() -> Ending {
        Ending::PeerLost {
            detail: "the shard in cell 0 is gone".to_owned(),
        }
    }

    #[test]
    fn a_guest_that_reboots_too_fast_has_an_exit_status_and_a_reason_of_its_own() {
        assert_eq!(status(&Ending::RebootLoop), 75);
        let reason = reason(&Ending::RebootLoop).unwrap();
        assert!(
            reason.starts_with("the guest reboots too fast: 64 times"),
            "{reason}"
        );
    }

    /// Promise CELL-12.
    #[test]
    fn a_vm_that_the_kernel_killed_for_memory_ends_with_the_name_of_its_limit() {
        let gone = "its process was ended by SIGKILL";
        let plain = of_gone(gone.to_owned(), false);
        assert_eq!(plain, failed());
        let killed = of_gone(gone.to_owned(), true);
        assert_eq!(status(&killed), 73);
        let reason = reason(&killed).unwrap();
        let begin = format!(
            "the shard failed: {gone}; the VM used more of the host's memory than its memory_limit; help: \
             raise memory_limit"
        );
        assert!(reason.starts_with(&begin), "{reason}");
        assert!(!reason.contains('\n'));
    }

    #[test]
    fn shard_that_dies_while_a_stop_waits_is_the_cause_unless_the_vm_is_killed() {
        let gone = "its process was ended by SIGKILL";
        assert_eq!(of_silent(gone.to_owned(), false, false), failed());
        assert_eq!(of_silent(gone.to_owned(), true, false), Ending::Quit);
    }

    #[test]
    fn killed_home_is_reported_by_its_process_and_not_by_a_witness() {
        for was_told in [false, true] {
            assert_eq!(of_part(None, Some(witness()), was_told), None);
            assert_eq!(of_part(None, None, was_told), None);
            assert_eq!(of_part(Some(&Ending::PowerOff), Some(witness()), was_told), None);
        }
    }

    #[test]
    fn failed_part_is_the_reason_whatever_the_home_reports() {
        for home in [None, Some(Ending::Quit), Some(witness()), Some(failed())] {
            assert_eq!(of_part(home.as_ref(), Some(failed()), false), Some(failed()));
        }
    }

    #[test]
    fn report_of_a_witness_counts_where_no_other_is_known() {
        assert_eq!(of_part(Some(&witness()), Some(witness()), true), Some(witness()));
        assert_eq!(
            of_part(Some(&Ending::Quit), Some(witness()), false),
            Some(witness())
        );
        // Shards that were ordered to end see each other go.
        assert_eq!(of_part(Some(&Ending::Quit), Some(witness()), true), None);
    }
}
