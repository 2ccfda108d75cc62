//! The end of a VM, as its shard reports it.

use serde::{Deserialize, Serialize};

/// End of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "how")]
pub enum Ending {
    /// The guest powered off (ACPI S5).
    PowerOff,
    /// The guest requested a reset. The monitor starts the VM again.
    Reboot,
    /// The guest's kernel panicked (reported by pvpanic).
    Panic,
    /// A vCPU took a triple fault.
    TripleFault,
    /// KVM could not continue to run a vCPU.
    KvmInternalError {
        /// Description of the error, with KVM's suberror if there is one.
        detail: String,
    },
    /// The monitor ended the VM.
    Quit,
    /// The guest rebooted too often, each time as soon as it ran. The monitor does not start it again. No
    /// shard reports this.
    RebootLoop,
    /// Another shard is gone, with its memory. That shard's own ending has the cause.
    PeerLost {
        /// The lost shard, and how the loss was noticed.
        detail: String,
    },
    /// The shard itself failed.
    ShardFailed {
        /// The failure, in one line.
        detail: String,
    },
}

impl Ending {
    /// Exit status of a shard with this ending, and of `mirrorball run`, except for a reboot
    /// (`docs/reference/cli.md`). A parent that reads no reports decides by this status.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::PowerOff => 0,
            Self::Reboot => 32,
            Self::Panic => 70,
            Self::TripleFault => 71,
            Self::KvmInternalError { .. } => 72,
            Self::PeerLost { .. } | Self::ShardFailed { .. } => 73,
            Self::Quit => 74,
            Self::RebootLoop => 75,
        }
    }

    /// Returns the ending of a shard that exited with `status` and without a last report; `None` if no ending
    /// has the status. `detail` is for the endings that have one.
    pub fn of_exit_status(status: i32, detail: &str) -> Option<Self> {
        let detail = detail.to_owned();
        let all = [
            Self::PowerOff,
            Self::Reboot,
            Self::Panic,
            Self::TripleFault,
            Self::KvmInternalError {
                detail: detail.clone(),
            },
            Self::ShardFailed { detail },
            Self::Quit,
        ];
        all.into_iter()
            .find(|ending| i32::from(ending.exit_status()) == status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_ending_of_a_shard_has_an_exit_status_that_names_it() {
        let detail = "why".to_owned();
        let of_status = |status| Ending::of_exit_status(status, "why");
        for (ending, status) in [
            (Ending::PowerOff, 0),
            (Ending::Reboot, 32),
            (Ending::Panic, 70),
            (Ending::TripleFault, 71),
            (
                Ending::KvmInternalError {
                    detail: detail.clone(),
                },
                72,
            ),
            (
                Ending::ShardFailed {
                    detail: detail.clone(),
                },
                73,
            ),
            (Ending::Quit, 74),
        ] {
            assert_eq!(ending.exit_status(), status);
            assert_eq!(of_status(status.into()), Some(ending));
        }
        assert_eq!(Ending::PeerLost { detail }.exit_status(), 73);
        // No shard reports a loop of reboots. 101 is the status of a panic of the program, and 127 that of a
        // program that is not executed.
        for status in [-1, 1, 2, 33, 75, 101, 126, 127, 256 + 32] {
            assert_eq!(of_status(status), None, "{status}");
        }
    }
}
