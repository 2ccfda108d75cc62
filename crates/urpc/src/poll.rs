//! The time to poll before blocking, as a pure decision.
//!
//! Polling costs its duration; blocking costs a constant: the system call, the wake-up by the other side, and
//! the return. Spin-then-block is competitive: a side that polls for a fixed multiple of that constant, and
//! then blocks, pays at most a fixed multiple of the optimum (Karlin et al., SOSP '91, on spinning for locks;
//! the Multikernel paper, section 4.6, proposes the same for messages). The multiple here is two, for a ratio
//! of three. A side whose peer was blocked first waits for the peer's wake-up; with a smaller multiple both
//! would always block before the reply arrives. The constant must not be measured too low: below two thirds
//! of the real cost the same cycle occurs. A side whose recent waits were mostly longer polls only a
//! sixteenth of that time, and pays little more than the blocking.

/// Full polling time, in costs of blocking.
const BLOCKS: u64 = 2;
/// Number of recent waits in the history.
const WAITS: u32 = 8;
/// Short waits in the history for which the full polling time pays off.
const WORTH: u32 = 2;
/// Divisor of the full polling time when it does not pay off. The rest detects when it does again.
const GLANCE: u64 = 16;

/// Polling time of one reader.
#[derive(Clone, Copy, Debug)]
pub struct PollTime {
    whole_ns: u64,
    /// One bit per recent wait, the latest lowest: set if it ended within `whole_ns`.
    short: u32,
}

impl PollTime {
    /// Creates the state for a host on which blocking and being woken costs `block_ns` nanoseconds.
    pub fn new(block_ns: u64) -> Self {
        Self {
            whole_ns: BLOCKS * block_ns,
            short: (1 << WAITS) - 1,
        }
    }

    /// Returns the time to poll before blocking, in nanoseconds.
    pub fn poll_ns(&self) -> u64 {
        if self.short.count_ones() >= WORTH {
            self.whole_ns
        } else {
            self.whole_ns / GLANCE
        }
    }

    /// Records a wait of `waited_ns`, polling and blocking together. If the waiter `blocked`, its own wake-up
    /// does not count as time that polling would have taken.
    pub fn waited(&mut self, waited_ns: u64, blocked: bool) {
        let wake_ns = if blocked { self.whole_ns / BLOCKS } else { 0 };
        let short = u32::from(waited_ns.saturating_sub(wake_ns) <= self.whole_ns);
        self.short = (self.short << 1 | short) & ((1 << WAITS) - 1);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCK_NS: u64 = 4000;

    /// Returns the reader's cost of a wait of `wait_ns`, and the optimal offline cost.
    fn costs(poll: &mut PollTime, wait_ns: u64) -> (u64, u64) {
        let polled = poll.poll_ns();
        let blocked = wait_ns > polled;
        poll.waited(wait_ns + if blocked { BLOCK_NS } else { 0 }, blocked);
        let paid = if wait_ns <= polled {
            wait_ns
        } else {
            polled + BLOCK_NS
        };
        (paid, wait_ns.min(BLOCK_NS))
    }

    proptest! {
        #[test]
        fn polling_is_3_competitive_after_the_first_short_waits(
            waits in prop::collection::vec(0..20_000u64, 1..400)
        ) {
            let mut poll = PollTime::new(BLOCK_NS);
            let (mut paid, mut best, mut surprises) = (0, 0, 0);
            for wait in waits {
                let glanced = poll.poll_ns() < BLOCKS * BLOCK_NS;
                let (one, other) = costs(&mut poll, wait);
                if glanced && wait <= BLOCKS * BLOCK_NS {
                    surprises += 1;
                }
                paid += one;
                best += other;
            }
            prop_assert!(paid <= (1 + BLOCKS) * best + surprises * 2 * BLOCK_NS);
        }
    }

    #[test]
    fn long_waits_cost_at_most_15_percent_more_than_blocking() {
        let mut poll = PollTime::new(BLOCK_NS);
        let paid: u64 = (0..1000).map(|_| costs(&mut poll, 1_000_000).0).sum();
        assert!(paid < 1000 * BLOCK_NS * 115 / 100, "{paid}");
    }

    #[test]
    fn polling_resumes_after_short_waits() {
        let mut poll = PollTime::new(BLOCK_NS);
        (0..100).for_each(|_| poll.waited(1_000_000, true));
        assert_eq!(poll.poll_ns(), BLOCKS * BLOCK_NS / GLANCE);
        (0..2).for_each(|_| poll.waited(500, false));
        assert_eq!(poll.poll_ns(), BLOCKS * BLOCK_NS);
    }

    /// Returns whether two peers that reply to each other at once, both blocked at first, poll in the end.
    /// Each wait includes the other's wake-up until neither blocks.
    fn stop_blocking(real_block_ns: u64) -> bool {
        let mut sides = [PollTime::new(BLOCK_NS), PollTime::new(BLOCK_NS)];
        for side in &mut sides {
            (0..100).for_each(|_| side.waited(1_000_000, true));
        }
        let mut blocked = [true, true];
        for turn in 0..20 {
            let (mine, other) = (turn % 2, 1 - turn % 2);
            // The other side wakes, if it must, and replies.
            let wait = if blocked[other] { real_block_ns } else { 0 } + 300;
            blocked[other] = false;
            blocked[mine] = wait > sides[mine].poll_ns();
            let wake = if blocked[mine] { real_block_ns } else { 0 };
            sides[mine].waited(wait + wake, blocked[mine]);
        }
        blocked == [false, false]
    }

    /// Promise CELL-04.
    #[test]
    fn peers_that_reply_at_once_stop_blocking() {
        assert!(stop_blocking(BLOCK_NS));
        assert!(stop_blocking(BLOCK_NS / 20));
        assert!(stop_blocking(BLOCK_NS * 14 / 10));
        // This is why the measured cost must be that of waking another CPU.
        assert!(!stop_blocking(BLOCK_NS * 20));
    }
}
