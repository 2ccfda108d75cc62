//! Word that each CPU publishes: its present VM with the priority of that, and its load.

use super::{MILLISECOND, Nanos, VmId};
use crate::cpu::entitlement::Class;

/// How a CPU runs its present vCPU.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Mode {
    /// The CPU is not there: unplugged, or taken from the cell.
    Offline,
    /// It runs no vCPU.
    #[default]
    Idle,
    /// It runs a vCPU in a hole of the schedule, without the rest of its VM. Any gang displaces it.
    Filler,
    /// It runs a vCPU by the VM's rank: with its gang, or of a VM without one.
    Entitled,
}

/// Published by the CPU's driver alone. Two words of 64 bits, which a reader may find torn or stale: each
/// decision that relies on them is repeated when the driver's message arrives.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Word {
    /// Number of the publication, which wraps.
    pub version: u16,
    /// Time of the publication in milliseconds, which wraps after 65 s.
    pub beat_ms: u16,
    /// VM that it runs, if `mode` has one.
    pub vm: VmId,
    /// How it runs that.
    pub mode: Mode,
    /// Class of that VM when it was published.
    pub class: Class,
    /// Virtual time of that VM when it was published. It only grows afterwards.
    pub vtime: Nanos,
    /// vCPUs that are not idle, running and waiting; at most [`LOAD_MAX`].
    pub load: u8,
    /// vCPUs of its queue, idle ones too; at most [`LOAD_MAX`].
    pub queued: u8,
}

/// Greatest number of vCPUs of one queue.
pub const LOAD_MAX: u8 = 63;

impl Word {
    /// The word in two integers: version, beat, VM, load (6 bits), queued (6), class (2), mode (2); virtual
    /// time.
    pub fn pack(&self) -> [u64; 2] {
        let mode = match self.mode {
            Mode::Offline => 0,
            Mode::Idle => 1,
            Mode::Filler => 2,
            Mode::Entitled => 3,
        };
        let class = match self.class {
            Class::Reserved => 0,
            Class::Shared => 1,
            Class::Windowed => 2,
        };
        let head = u64::from(self.version) << 48
            | u64::from(self.beat_ms) << 32
            | u64::from(self.vm.0) << 16
            | u64::from(self.load.min(LOAD_MAX)) << 10
            | u64::from(self.queued.min(LOAD_MAX)) << 4
            | class << 2
            | mode;
        [head, self.vtime]
    }

    /// The word of two integers. Any two are one.
    pub fn unpack([head, vtime]: [u64; 2]) -> Self {
        Self {
            version: (head >> 48) as u16,
            beat_ms: (head >> 32) as u16,
            vm: VmId((head >> 16) as u16),
            load: (head >> 10) as u8 & LOAD_MAX,
            queued: (head >> 4) as u8 & LOAD_MAX,
            class: match head >> 2 & 3 {
                0 => Class::Reserved,
                2 => Class::Windowed,
                _ => Class::Shared,
            },
            mode: match head & 3 {
                0 => Mode::Offline,
                1 => Mode::Idle,
                2 => Mode::Filler,
                _ => Mode::Entitled,
            },
            vtime,
        }
    }

    /// Whether the CPU runs that VM, in whichever mode.
    pub fn runs(&self, vm: VmId) -> bool {
        self.vm == vm && matches!(self.mode, Mode::Filler | Mode::Entitled)
    }

    /// Age of the word, milliseconds; 0 for one of the future, as after a jump of the clock.
    pub fn age_ms(&self, now: Nanos) -> u64 {
        let age_ms = beat_ms(now).wrapping_sub(self.beat_ms);
        if age_ms < 1 << 15 { u64::from(age_ms) } else { 0 }
    }

    /// Whether the CPU has published nothing for `timeout`: its driver does not run.
    pub fn is_stalled(&self, now: Nanos, timeout: Nanos) -> bool {
        self.age_ms(now) * MILLISECOND >= timeout
    }

    /// Whether this word was published after `other`, by the same CPU.
    pub fn is_newer_than(&self, other: &Self) -> bool {
        let steps = self.version.wrapping_sub(other.version);
        steps != 0 && steps < 1 << 15
    }
}

/// Time in the unit of [`Word::beat_ms`].
pub fn beat_ms(now: Nanos) -> u16 {
    (now / MILLISECOND) as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn word_is_newer_and_stalled_across_the_wrap_of_its_counters() {
        let old = Word {
            version: u16::MAX,
            beat_ms: u16::MAX,
            ..Word::default()
        };
        let new = Word { version: 0, ..old };
        assert!(new.is_newer_than(&old) && !old.is_newer_than(&new) && !new.is_newer_than(&new));
        let at = |ms: u64| old.is_stalled(ms * MILLISECOND, 50 * MILLISECOND);
        assert!(!at(65_535) && !at(65_535 + 49) && at(65_535 + 50) && !at(65_534));
    }

    proptest! {
        #[test]
        fn packed_word_is_read_back(halves in any::<[u64; 2]>()) {
            let word = Word::unpack(halves);
            prop_assert_eq!(Word::unpack(word.pack()), word);
        }
    }
}
