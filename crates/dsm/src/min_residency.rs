//! Minimum residency of a page that has arrived (vNUMA, USENIX '09, section 4.1). Decisions only.
//!
//! A page that leaves before the thread that waited for it could use it would bounce without end. vNUMA
//! counts retired instructions. This module uses the thread's CPU time, which does not advance while the
//! thread waits. Once it has grown by more than the cost of a fault, the thread has completed the
//! instruction.
//!
//! The thread may also wait for another page by then: it has gone on, as its time may show, or one
//! instruction needs both pages. The two cases can't be distinguished otherwise, and two such threads of
//! different nodes could wait for each other. So the page leaves after a random time, as the paper proposes
//! for x86. No page stays longer than [`BOUND_NS`], even if its thread gets no CPU.

/// Longest residency for a thread that does not run, nanoseconds.
pub const BOUND_NS: u64 = 10_000_000;
/// Range of the random residency while the thread waits for another page, nanoseconds where [`FAST_NS`] of
/// CPU time show progress, and proportionally longer where more is needed.
const ELSEWHERE_NS: std::ops::Range<u64> = 10_000..100_000;
const FAST_NS: u64 = 10_000;
/// Earliest next check of a thread that has not run enough, nanoseconds. A shorter timer can starve the
/// thread: a timer of 5 us ends on a virtual machine before its sleep has begun, so that a page server at
/// real-time priority would never yield its CPU to the thread that it waits for.
const RECHECK_MIN_NS: u64 = 5_000;

/// Residency of a page that has arrived.
#[derive(Clone, Copy, Debug)]
pub struct MinResidency {
    /// Page number.
    pub page: u32,
    /// Thread that waited for the page, if known.
    pub thread: Option<libc::pid_t>,
    /// CPU time of the thread when it began to wait, nanoseconds.
    pub ran_ns: u64,
    /// Time at which the thread was woken, nanoseconds.
    pub since_ns: u64,
    /// Whether another node waits for the page.
    pub wanted: bool,
    /// Residency while the thread waits for another page, nanoseconds.
    pub elsewhere_ns: u64,
}

/// State of the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// The thread runs; its CPU time, nanoseconds.
    Ran(u64),
    /// The thread waits for another page; its CPU time, nanoseconds.
    Elsewhere(u64),
    /// The thread is gone or unknown.
    Unknown,
}

/// Result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The page has been used, or has stayed long enough.
    Release,
    /// The page stays. Evaluate again after that many nanoseconds.
    Keep(u64),
}

impl MinResidency {
    /// Creates the residency of a page that arrived at `since_ns` for a thread with `ran_ns` of CPU time.
    pub fn new(
        page: u32,
        thread: Option<libc::pid_t>,
        ran_ns: u64,
        since_ns: u64,
        random: &mut fastrand::Rng,
    ) -> Self {
        Self {
            page,
            thread,
            ran_ns,
            since_ns,
            wanted: false,
            elsewhere_ns: random.u64(ELSEWHERE_NS),
        }
    }

    /// Evaluates the residency at `now_ns`. `enough_ns` is the CPU time after which the thread has used the
    /// page.
    pub fn evaluate(&self, now_ns: u64, thread: Thread, enough_ns: u64) -> Verdict {
        let stayed_ns = now_ns.saturating_sub(self.since_ns);
        let until = |end_ns: u64| match end_ns.checked_sub(stayed_ns) {
            None | Some(0) => Verdict::Release,
            Some(rest) => Verdict::Keep(rest),
        };
        let missing_ns = |ran_ns: u64| enough_ns.saturating_sub(ran_ns.saturating_sub(self.ran_ns));
        match thread {
            Thread::Elsewhere(ran_ns) if missing_ns(ran_ns) == 0 => Verdict::Release,
            Thread::Ran(ran_ns) => {
                let missing_ns = missing_ns(ran_ns);
                match until(BOUND_NS) {
                    // A check takes the CPU from the thread. So the next one comes when the thread can have
                    // run enough, and later the longer the thread has got no CPU.
                    Verdict::Keep(rest) if missing_ns > 0 => {
                        Verdict::Keep(rest.min(missing_ns.max(RECHECK_MIN_NS).max(stayed_ns)))
                    }
                    _ => Verdict::Release,
                }
            }
            Thread::Elsewhere(_) => until(self.elsewhere_ns.max(self.elsewhere_ns * enough_ns / FAST_NS)),
            Thread::Unknown => until(enough_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENOUGH_NS: u64 = 3_000;

    fn hold() -> MinResidency {
        MinResidency::new(
            7,
            Some(1),
            1_000_000,
            50_000_000,
            &mut fastrand::Rng::with_seed(1),
        )
    }

    #[test]
    fn page_stays_until_its_thread_has_run() {
        let hold = hold();
        let later = hold.since_ns + RECHECK_MIN_NS;
        assert_eq!(
            hold.evaluate(later, Thread::Ran(hold.ran_ns), ENOUGH_NS),
            Verdict::Keep(RECHECK_MIN_NS)
        );
        let ran = Thread::Ran(hold.ran_ns + ENOUGH_NS - 1);
        assert_eq!(
            hold.evaluate(later, ran, ENOUGH_NS),
            Verdict::Keep(RECHECK_MIN_NS)
        );
        let ran = Thread::Ran(hold.ran_ns + ENOUGH_NS);
        assert_eq!(hold.evaluate(later, ran, ENOUGH_NS), Verdict::Release);
    }

    #[test]
    fn thread_that_needs_long_is_not_checked_often() {
        let hold = hold();
        let ran = Thread::Ran(hold.ran_ns + 20_000);
        assert_eq!(hold.evaluate(hold.since_ns, ran, 100_000), Verdict::Keep(80_000));
    }

    #[test]
    fn thread_without_a_cpu_is_checked_ever_less_often() {
        let hold = hold();
        let (mut now, mut looks) = (hold.since_ns, 0);
        while let Verdict::Keep(ns) = hold.evaluate(now, Thread::Ran(hold.ran_ns), ENOUGH_NS) {
            now += ns;
            looks += 1;
        }
        assert_eq!(now, hold.since_ns + BOUND_NS);
        assert!(looks <= 12, "{looks} looks");
    }

    #[test]
    fn residency_is_bounded() {
        let hold = hold();
        let end = hold.since_ns + BOUND_NS;
        assert_eq!(
            hold.evaluate(end - 1, Thread::Ran(hold.ran_ns), ENOUGH_NS),
            Verdict::Keep(1)
        );
        assert_eq!(
            hold.evaluate(end, Thread::Ran(hold.ran_ns), ENOUGH_NS),
            Verdict::Release
        );
        assert_eq!(
            hold.evaluate(hold.since_ns + ENOUGH_NS, Thread::Unknown, ENOUGH_NS),
            Verdict::Release
        );
    }

    #[test]
    fn thread_that_faults_on_another_page_has_used_this_one() {
        let hold = hold();
        let waits = |ran_ns| Thread::Elsewhere(hold.ran_ns + ran_ns);
        assert_eq!(
            hold.evaluate(hold.since_ns, waits(ENOUGH_NS), ENOUGH_NS),
            Verdict::Release
        );
        let stays = hold.evaluate(hold.since_ns, waits(ENOUGH_NS - 1), ENOUGH_NS);
        assert_eq!(stays, Verdict::Keep(hold.elsewhere_ns));
    }

    #[test]
    fn threads_that_wait_for_each_others_pages_get_different_residencies() {
        let mut random = fastrand::Rng::with_seed(2);
        let times: Vec<u64> = (0..64)
            .map(|_| MinResidency::new(1, None, 0, 0, &mut random))
            .map(|hold| match hold.evaluate(0, Thread::Elsewhere(0), ENOUGH_NS) {
                Verdict::Keep(rest) => rest,
                Verdict::Release => panic!("it went at once"),
            })
            .collect();
        assert!(times.iter().all(|time| ELSEWHERE_NS.contains(time)), "{times:?}");
        let (low, high) = (times.iter().min().unwrap(), times.iter().max().unwrap());
        assert!(high - low > 50_000, "{times:?}");
    }
}
