//! Whether and when a VM starts again.
//!
//! Each boot is a process, with its sandbox and its networks: a guest that reboots as soon as it runs keeps
//! the host busy. Reboots within seconds of their boot are delayed longer and longer, and finally end the VM.
//! The same holds for starts after a failure.

use std::time::Duration;

use config::vm::RestartSpec;
use shard_api::launch::Ending;

/// A boot that ends by a reboot within this time counts as quick.
pub const QUICK: Duration = Duration::from_secs(5);
/// Quick boots in a row that end the VM.
pub const QUICK_MAX: u32 = 64;
/// Quick boots in a row without a pause: tests of a guest, and its installers, reboot at once too.
const FREE: u32 = 8;
/// The first pause; each further one is twice as long.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Whether a VM with this ending starts again. `Quit` is an order to end.
pub fn starts_again(restart: RestartSpec, ending: &Ending) -> bool {
    match ending {
        Ending::Reboot => true,
        Ending::PowerOff => restart == RestartSpec::Always,
        Ending::Panic
        | Ending::TripleFault
        | Ending::KvmInternalError { .. }
        | Ending::ShardFailed { .. }
        | Ending::PeerLost { .. } => restart != RestartSpec::No,
        Ending::Quit | Ending::RebootLoop => false,
    }
}

/// The step after a reboot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another boot, after a pause.
    Boot(Duration),
    /// The end of the VM.
    End,
}

/// Counts the quick boots of a VM.
#[derive(Debug, Default)]
pub struct Reboots {
    quick: u32,
}

impl Reboots {
    /// Notes that the guest has rebooted after a boot that took `ran`.
    pub fn note(&mut self, ran: Duration) -> Next {
        if ran >= QUICK {
            self.quick = 0;
            return Next::Boot(Duration::ZERO);
        }
        self.quick += 1;
        if self.quick >= QUICK_MAX {
            return Next::End;
        }
        Next::Boot(match self.quick.checked_sub(FREE + 1) {
            None => Duration::ZERO,
            Some(doublings) => (PAUSE_FIRST * (1 << doublings.min(16))).min(PAUSE_MAX),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_starts_again_after_the_endings_that_its_restart_names() {
        let detail = || "gone".to_owned();
        let failures = [
            Ending::Panic,
            Ending::TripleFault,
            Ending::KvmInternalError { detail: detail() },
            Ending::ShardFailed { detail: detail() },
            Ending::PeerLost { detail: detail() },
        ];
        for restart in [RestartSpec::No, RestartSpec::OnFailure, RestartSpec::Always] {
            assert!(starts_again(restart, &Ending::Reboot));
            assert!(!starts_again(restart, &Ending::Quit));
            assert!(!starts_again(restart, &Ending::RebootLoop));
            let is_always = restart == RestartSpec::Always;
            assert_eq!(starts_again(restart, &Ending::PowerOff), is_always);
            for failure in &failures {
                assert_eq!(
                    starts_again(restart, failure),
                    restart != RestartSpec::No,
                    "{failure:?}"
                );
            }
        }
    }

    #[test]
    fn quick_reboots_are_put_off_longer_and_longer_and_end_the_vm() {
        let mut reboots = Reboots::default();
        let mut pauses = Vec::new();
        let last = loop {
            match reboots.note(Duration::from_millis(300)) {
                Next::Boot(pause) => pauses.push(pause),
                Next::End => break pauses.len() + 1,
            }
        };
        assert_eq!(last, 64);
        assert!(pauses[..8].iter().all(Duration::is_zero));
        assert_eq!(pauses[8], Duration::from_millis(50));
        assert!(pauses.is_sorted());
        assert_eq!(*pauses.last().unwrap(), Duration::from_secs(2));
        assert!(pauses.iter().sum::<Duration>() > Duration::from_secs(90));
    }

    #[test]
    fn a_boot_that_lasts_forgives_the_quick_ones_before() {
        let mut reboots = Reboots::default();
        for _ in 0..10 {
            for _ in 1..QUICK_MAX {
                assert_ne!(reboots.note(Duration::ZERO), Next::End);
            }
            assert_eq!(reboots.note(QUICK), Next::Boot(Duration::ZERO));
        }
    }
}
