//! Whether a vCPU has work, by the host kernel's counters of its thread, and how often they are read. Pure.
//!
//! A shard can't make these figures up. A thread that sleeps uses no CPU, whether its guest has halted or
//! its shard pretends so: then the shard lowers the share of its own VM alone.

use policy::cpu::halt_rate::Sample;
use policy::cpu::{MICROSECOND, MILLISECOND, Nanos};

/// Interval at which the vCPU that runs is read while another one waits for its CPU. Ours: a halt is noticed
/// within a millisecond, at the cost of about 5 us of each.
pub(super) const CHOSEN_INTERVAL: Nanos = MILLISECOND;
/// Longest interval for a vCPU that runs without a break. Ours: below the drivers' tick.
const STEADY_INTERVAL_MAX: Nanos = 8 * MILLISECOND;
/// Part of the time without a break after which a vCPU is read again. Ours: an eighth, so that a halt
/// leaves that part of the CPU unused at most.
const STEADY_PARTS: u64 = 8;
/// Interval at which the other vCPUs are read while VMs compete: the drivers' tick.
pub(super) const OTHERS_INTERVAL: Nanos = 10 * MILLISECOND;
/// Interval on a CPU with several vCPUs of which at most one has work. Ours.
pub(super) const QUIET_INTERVAL: Nanos = 50 * MILLISECOND;
/// Slack by which a thread that woke a little early counts as in time.
const SLACK: Nanos = 100 * MICROSECOND;
/// Longest time between two readings that are compared.
const COMPARED_MAX: Nanos = 200 * MILLISECOND;

/// Parts of the time between two readings of which a vCPU with work is ready for one.
pub(super) const BUSY_PARTS: u64 = 2;
/// The same for a vCPU that halts often. Ours: the eighth of an eighth that counts as little use.
pub(super) const BUSY_PARTS_HALTING: u64 = 64;

/// Time by which a vCPU may be late after its order to go on. Ours: its shard may wait for a CPU itself.
pub(super) const START_LIMIT: Nanos = 20 * MILLISECOND;
/// The same when a window opens. Ours: less, as each window of an idle vCPU lasts that long.
pub(super) const WINDOW_START_LIMIT: Nanos = 3 * MILLISECOND;

/// Reading of a thread.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct ThreadTimes {
    /// Whether it runs or is ready to run.
    pub(super) is_ready: bool,
    /// Time that it has run, and that it has waited for a CPU, nanoseconds.
    pub(super) ready_ns: u64,
    /// Time that it has run, nanoseconds.
    pub(super) ran_ns: u64,
    /// Halts of its vCPU, if KVM counts them.
    pub(super) halts: Option<u64>,
}

/// Last reading of a vCPU's thread.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Activity {
    last: Option<(Nanos, ThreadTimes)>,
    /// Time by which it has to have run since its order to go on, and its reading then.
    begun: Option<(Nanos, u64)>,
    /// Its activity since the last sample was taken.
    sample: Sample,
    /// Time for which it has run without a break, as far as it was read.
    steady: Nanos,
}

impl Activity {
    /// Whether it is time for a reading.
    pub(super) fn is_due(&self, now: Nanos, interval: Nanos) -> bool {
        self.last
            .is_none_or(|(at, _)| now.saturating_sub(at) + SLACK >= interval)
    }

    /// Readings of a vCPU that is ordered to go on, from its reading at that time. It counts as one with work
    /// for `limit` at least.
    pub(super) fn begin(now: Nanos, times: ThreadTimes, limit: Nanos) -> Self {
        Self {
            last: Some((now, times)),
            begun: Some((now.saturating_add(limit), times.ready_ns)),
            sample: Sample::default(),
            steady: 0,
        }
    }

    /// The same for a vCPU that was read before its stop.
    pub(super) fn resume(&mut self, now: Nanos, times: ThreadTimes, limit: Nanos) {
        *self = Self {
            steady: self.steady,
            ..Self::begin(now, times, limit)
        };
    }

    /// Ends the readings for a stop, in which the thread shows nothing of the guest.
    pub(super) fn pause(&mut self) {
        *self = Self {
            steady: self.steady,
            ..Self::default()
        };
    }

    /// Interval at which the vCPU is read while it is the chosen one.
    pub(super) fn chosen_interval(&self) -> Nanos {
        (self.steady / STEADY_PARTS).clamp(CHOSEN_INTERVAL, STEADY_INTERVAL_MAX)
    }

    /// Takes a reading; returns whether the vCPU has work: its thread is ready, or was for one in `parts`
    /// parts of the time since the last reading. A guest that halts for some microseconds has work.
    pub(super) fn note(&mut self, now: Nanos, times: ThreadTimes, parts: u64) -> bool {
        let has_begun = |(until, ready_ns): &(Nanos, u64)| times.ready_ns != *ready_ns || now >= *until;
        self.begun.take_if(|begun| has_begun(begun));
        let former = self.last.replace((now, times));
        let sample = former.and_then(|(at, former)| sample(now.saturating_sub(at), &former, &times));
        if let Some(sample) = &sample {
            self.sample.add(sample);
            // A read between two ticks of the host's clock may miss a little.
            let is_steady = times.is_ready && sample.ready >= sample.length / 10 * 9;
            self.steady = if is_steady {
                self.steady.saturating_add(sample.length)
            } else {
                0
            };
        }
        let was_busy = sample.is_some_and(|sample| sample.ready >= sample.length.div_ceil(parts));
        times.is_ready || was_busy || self.begun.is_some()
    }

    /// Takes the sample of the time since the last one, once that is as long as the drivers' tick.
    pub(super) fn take_sample(&mut self) -> Option<Sample> {
        let is_long = self.sample.length + SLACK >= OTHERS_INTERVAL;
        is_long.then(|| std::mem::take(&mut self.sample))
    }
}

/// Sample of the time between two readings; none if they are too far apart.
fn sample(length: Nanos, former: &ThreadTimes, times: &ThreadTimes) -> Option<Sample> {
    let halts = former.halts.zip(times.halts);
    (1..=COMPARED_MAX).contains(&length).then(|| Sample {
        length,
        ran: times.ran_ns.saturating_sub(former.ran_ns),
        ready: times.ready_ns.saturating_sub(former.ready_ns),
        halts: halts.map_or(0, |(before, after)| after.saturating_sub(before)),
    })
}

/// Interval at which the vCPUs of a CPU are read: `None` if no other vCPU can compete for it.
pub(super) fn interval(queued: usize, is_contended: bool, waits_here: bool) -> Option<Nanos> {
    match (is_contended, waits_here, queued) {
        (_, _, 0) | (false, _, 1) => None,
        (true, true, _) => Some(CHOSEN_INTERVAL),
        (true, false, _) => Some(OTHERS_INTERVAL),
        (false, _, _) => Some(QUIET_INTERVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(is_ready: bool, ready_us: u64) -> ThreadTimes {
        ThreadTimes {
            is_ready,
            ready_ns: ready_us * MICROSECOND,
            ran_ns: ready_us * MICROSECOND / 2,
            halts: Some(ready_us / 100),
        }
    }

    #[test]
    fn vcpu_has_work_if_it_is_ready_or_was_for_half_of_the_time() {
        let mut activity = Activity::default();
        assert!(
            !activity.note(0, times(false, 900_000), BUSY_PARTS),
            "nothing to compare with"
        );
        assert!(activity.note(MILLISECOND, times(true, 900_000), BUSY_PARTS));
        assert!(activity.note(2 * MILLISECOND, times(false, 900_500), BUSY_PARTS));
        assert!(!activity.note(3 * MILLISECOND, times(false, 900_999), BUSY_PARTS));
        assert!(
            !activity.note(900 * MILLISECOND, times(false, 1_900_000), BUSY_PARTS),
            "too long ago"
        );
        // A clock that stands still, or figures that go back, show nothing.
        assert!(!activity.note(900 * MILLISECOND, times(false, 2_900_000), BUSY_PARTS));
        assert!(!activity.note(901 * MILLISECOND, times(false, 0), BUSY_PARTS));
    }

    #[test]
    fn vcpu_that_goes_on_late_is_not_taken_for_halted() {
        let mut activity = Activity::begin(0, times(false, 7), START_LIMIT);
        assert!(activity.note(MILLISECOND, times(false, 7), BUSY_PARTS));
        // It has run for a moment, and halts.
        assert!(!activity.note(2 * MILLISECOND, times(false, 8), BUSY_PARTS));
        assert!(!activity.note(3 * MILLISECOND, times(false, 8), BUSY_PARTS));
        let mut activity = Activity::begin(0, times(false, 7), START_LIMIT);
        assert!(activity.note(19 * MILLISECOND, times(false, 7), BUSY_PARTS));
        assert!(
            !activity.note(20 * MILLISECOND, times(false, 7), BUSY_PARTS),
            "it never runs"
        );
        let mut activity = Activity::begin(0, times(false, 7), WINDOW_START_LIMIT);
        assert!(activity.note(2 * MILLISECOND, times(false, 7), BUSY_PARTS));
        assert!(
            !activity.note(3 * MILLISECOND, times(false, 7), BUSY_PARTS),
            "its window goes to others"
        );
    }

    #[test]
    fn idle_cpus_are_not_read_and_contended_ones_are_read_while_a_vcpu_waits() {
        assert_eq!(interval(0, true, false), None);
        assert_eq!(interval(1, false, false), None);
        assert_eq!(interval(2, false, false), Some(QUIET_INTERVAL));
        assert_eq!(interval(1, true, false), Some(OTHERS_INTERVAL));
        assert_eq!(interval(2, true, true), Some(CHOSEN_INTERVAL));
    }

    #[test]
    fn reading_is_due_after_its_interval() {
        let mut activity = Activity::default();
        assert!(activity.is_due(5, MILLISECOND));
        activity.note(5, times(true, 0), BUSY_PARTS);
        assert!(!activity.is_due(MILLISECOND / 2, MILLISECOND));
        assert!(activity.is_due(MILLISECOND, MILLISECOND));
    }

    #[test]
    fn sample_has_the_differences_of_readings_and_is_taken_each_tick() {
        let mut activity = Activity::default();
        for ms in 0..=10 {
            assert_eq!(activity.take_sample(), None);
            activity.note(ms * MILLISECOND, times(true, ms * 600), BUSY_PARTS);
        }
        let expected = Sample {
            length: 10 * MILLISECOND,
            ran: 3 * MILLISECOND,
            ready: 6 * MILLISECOND,
            halts: 60,
        };
        assert_eq!(activity.take_sample(), Some(expected));
        assert_eq!(activity.take_sample(), None);
        // KVM counts no halts; then the readings are too far apart.
        let uncounted = ThreadTimes {
            halts: None,
            ..times(true, 12_000)
        };
        activity.note(20 * MILLISECOND, uncounted, BUSY_PARTS);
        assert_eq!(activity.take_sample().map(|sample| sample.halts), Some(0));
        activity.note(300 * MILLISECOND, uncounted, BUSY_PARTS);
        assert_eq!(activity.take_sample(), None);
    }

    #[test]
    fn vcpu_is_read_after_an_eighth_of_its_time_without_a_break_and_each_millisecond_after_a_halt() {
        let mut activity = Activity::default();
        let (mut now, mut ready_us) = (0, 0);
        let mut read = |activity: &mut Activity, ms: u64, is_ready| {
            now += ms * MILLISECOND;
            ready_us += if is_ready { ms * 1_000 } else { ms * 500 };
            activity.note(now, times(is_ready, ready_us), BUSY_PARTS);
            activity.chosen_interval() / MILLISECOND
        };
        assert_eq!(read(&mut activity, 1, true), 1);
        assert_eq!(read(&mut activity, 16, true), 2);
        activity.pause();
        assert!(activity.is_due(0, CHOSEN_INTERVAL));
        activity.resume(20 * MILLISECOND, times(true, 17_000), START_LIMIT);
        assert_eq!(activity.chosen_interval(), 2 * MILLISECOND, "as before its stop");
        let mut activity = Activity::default();
        read(&mut activity, 1, true);
        assert_eq!(read(&mut activity, 100, true), 8);
        assert_eq!(read(&mut activity, 8, false), 1);
    }

    #[test]
    fn vcpu_that_halts_often_has_work_if_it_was_ready_for_a_little() {
        let mut activity = Activity::default();
        activity.note(0, times(false, 0), BUSY_PARTS_HALTING);
        assert!(activity.note(10 * MILLISECOND, times(false, 200), BUSY_PARTS_HALTING));
        assert!(!activity.note(20 * MILLISECOND, times(false, 300), BUSY_PARTS_HALTING));
    }
}
