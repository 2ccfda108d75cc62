//! Rate at which a vCPU halts: whether its gang loses more by waiting for it than it gains.
//!
//! A gang keeps the CPU of a vCPU that halts for less than the hysteresis or the time between two readings of
//! its thread. A vCPU with many such halts sleeps until another one wakes it, and does not spin for it. It
//! leaves the gang: where no gang wants the CPU, no driver stops it, and Linux divides the CPU.

use super::Nanos;
use super::tunables::Tunables;

/// Nanoseconds of a second.
const SECOND: u128 = 1_000_000_000;

/// Part of a CPU that a gang may leave unused, one of so many. The least gain of a gang that was measured is
/// as large: 1.25 (`docs/results/tables/gangs.md`, threads that spin, Linux).
const UNUSED_PARTS: u64 = 4;

/// Activity of a vCPU for a time in which no driver stopped it. All figures are the host kernel's and KVM's:
/// a shard can't make them up.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Sample {
    /// Length of that time.
    pub length: Nanos,
    /// Part of it for which its thread ran.
    pub ran: Nanos,
    /// Part of it for which its thread ran or waited for a CPU.
    pub ready: Nanos,
    /// Number of halts in it. 0 where KVM does not count them.
    pub halts: u64,
}

impl Sample {
    /// Adds the sample that follows this one.
    pub fn add(&mut self, next: &Self) {
        self.length = self.length.saturating_add(next.length);
        self.ran = self.ran.saturating_add(next.ran);
        self.ready = self.ready.saturating_add(next.ready);
        self.halts = self.halts.saturating_add(next.halts);
    }

    /// Halts in each second of its length.
    fn halts_per_s(&self) -> u64 {
        let rate = u128::from(self.halts) * SECOND / u128::from(self.length.max(1));
        u64::try_from(rate).unwrap_or(u64::MAX)
    }
}

/// Decision about one vCPU, and the window that goes on.
///
/// A decision stands for a window of the time in which the vCPU is not stopped, so it changes at most as
/// often as there are windows in that time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct HaltRate {
    window: Sample,
    is_high: bool,
    is_light: bool,
}

impl HaltRate {
    /// A decision that was taken elsewhere, with a new window.
    pub fn new(is_high: bool) -> Self {
        Self {
            window: Sample::default(),
            is_high,
            is_light: false,
        }
    }

    /// Whether the vCPU halts so often that it is better off without its gang.
    pub fn is_high(&self) -> bool {
        self.is_high
    }

    /// Whether it used so little of the last window that a gang hardly feels it.
    pub fn is_light(&self) -> bool {
        self.is_light
    }

    /// Takes a sample, and decides if it ends the window.
    ///
    /// The rate is high from [`Tunables::halts_high_per_s`] on, if the halts take a quarter of the window:
    /// the gang leaves up to that part of the CPU unused. It is high until the vCPU is ready for half of a
    /// window with a rate below [`Tunables::halts_low_per_s`]: it computes or spins.
    pub fn note(&mut self, sample: &Sample, tunables: &Tunables) {
        self.window.add(sample);
        if self.window.length < tunables.halt_window_ns {
            return;
        }
        let window = std::mem::take(&mut self.window);
        let rate = window.halts_per_s();
        let share = u128::from(window.ran) * 1_000 / u128::from(window.length.max(1));
        self.is_light = share <= u128::from(tunables.light_permille);
        self.is_high = if self.is_high {
            let is_busy = window.ready >= window.length.div_ceil(2);
            !is_busy || rate >= tunables.halts_low_per_s
        } else {
            let halted = window.length.saturating_sub(window.ready);
            rate >= tunables.halts_high_per_s && halted >= window.length.div_ceil(UNUSED_PARTS)
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::MILLISECOND;
    use super::*;

    fn sample(ms: u64, ready_ms: u64, halts: u64) -> Sample {
        Sample {
            length: ms * MILLISECOND,
            ran: 0,
            ready: ready_ms * MILLISECOND,
            halts,
        }
    }

    /// Decisions after samples of a whole window each.
    fn decisions(samples: &[(u64, u64)]) -> Vec<bool> {
        let mut rate = HaltRate::default();
        let decide = |(ready_ms, halts): &(u64, u64)| {
            rate.note(&sample(100, *ready_ms, *halts), &Tunables::default());
            rate.is_high()
        };
        samples.iter().map(decide).collect()
    }

    #[test]
    fn rate_is_high_from_250_halts_a_second_on_until_a_busy_window_has_less_than_50() {
        assert_eq!(decisions(&[(75, 24), (75, 25)]), [false, true]);
        assert_eq!(decisions(&[(75, 25), (90, 5), (90, 4)]), [true, true, false]);
        // One that is idle is not seen to spin.
        assert_eq!(decisions(&[(75, 25), (49, 0), (50, 0)]), [true, true, false]);
        assert_eq!(decisions(&[(90, 0), (0, 30)]), [false, true]);
    }

    #[test]
    fn short_halts_do_not_count_however_many_they_are() {
        assert_eq!(decisions(&[(76, 1_000), (75, 1_000)]), [false, true]);
    }

    #[test]
    fn decision_is_taken_at_the_end_of_a_window_only() {
        let mut rate = HaltRate::default();
        rate.note(&sample(99, 50, 1_000), &Tunables::default());
        assert!(!rate.is_high());
        rate.note(&sample(1, 1, 0), &Tunables::default());
        assert!(rate.is_high());
        rate.note(&sample(99, 99, 0), &Tunables::default());
        assert!(rate.is_high());
    }

    proptest! {
        #[test]
        fn decision_changes_once_in_a_window_at_most(
            samples in prop::collection::vec((0..30_u64, 0..30_u64, 0..40_u64), 0..400)
        ) {
            let (mut rate, mut changes, mut length) = (HaltRate::default(), 0, 0);
            for (ms, ready_ms, halts) in samples {
                let former = rate.is_high();
                rate.note(&sample(ms, ready_ms.min(ms), halts), &Tunables::default());
                changes += u64::from(rate.is_high() != former);
                length += ms;
            }
            prop_assert!(changes <= length / 100, "{} in {} ms", changes, length);
        }

        /// A vCPU that spins is in its gang after two windows, for all that it did before.
        #[test]
        fn vcpu_that_spins_is_in_its_gang_after_two_windows(
            before in prop::collection::vec((0..30_u64, 0..30_u64, any::<u64>()), 0..100),
            step in 1..30_u64
        ) {
            let mut rate = HaltRate::default();
            for (ms, ready_ms, halts) in before {
                rate.note(&sample(ms, ready_ms, halts), &Tunables::default());
            }
            let mut spun = 0;
            while spun < 200 + step {
                rate.note(&sample(step, step, 0), &Tunables::default());
                spun += step;
            }
            prop_assert!(!rate.is_high());
        }

        /// A vCPU that sleeps often leaves its gang after two windows, and stays away.
        #[test]
        fn vcpu_that_sleeps_often_stays_out_of_its_gang(halts in 3..1_000_u64, ready in 0..=7_u64) {
            let mut rate = HaltRate::default();
            for tick in 0..100 {
                rate.note(&sample(10, ready, halts), &Tunables::default());
                prop_assert!(tick < 10 || rate.is_high());
            }
        }
    }
}
