//! How long to poll before blocking, as a pure decision.
//!
//! Polling costs what it lasts, blocking costs a constant: the way into the kernel, a wake-up by the other side, and back.
//! Who polls for a fixed part of that constant, and then blocks, never pays more than a fixed multiple of what was necessary
//! (Karlin et al., SOSP '91, on spinning for locks; section 4.6 of the Multikernel paper asks for the same here). The part
//! is two: whose partner was blocked waits for its wake-up first, and would with less always block before the answer comes,
//! as would the partner, for ever. It must not be measured too low: who takes less than two thirds of the real cost for it
//! is caught in that all the same. So nobody pays more than three times what was necessary. Who has seen most of the recent
//! waits last longer than that polls only a little, and pays little more than the blocking.

/// What is polled, in costs of blocking.
const BLOCKS: u64 = 2;
/// Recent waits that are remembered.
const WAITS: u32 = 8;
/// Of these, how many must have ended within that time for polling to be worth its whole time.
const WORTH: u32 = 2;
/// The part of the whole time that is polled when it is not worth it: to notice that it is again.
const GLANCE: u64 = 16;

/// Decides for one reader.
#[derive(Clone, Copy, Debug)]
pub struct PollTime {
    whole_ns: u64,
    /// A bit for each recent wait, the latest lowest: it ended within `whole_ns`.
    short: u32,
}

impl PollTime {
    /// For a host on which blocking and being woken costs `block_ns` nanoseconds.
    pub fn new(block_ns: u64) -> Self {
        Self {
            whole_ns: BLOCKS * block_ns,
            short: (1 << WAITS) - 1,
        }
    }

    /// How long to poll now, in nanoseconds, before blocking.
    pub fn poll_ns(&self) -> u64 {
        if self.short.count_ones() >= WORTH {
            self.whole_ns
        } else {
            self.whole_ns / GLANCE
        }
    }

    /// A wait is over that took `waited_ns`, polling and blocking together. The waiter's own wake-up, if it `blocked`, is
    /// no part of what it would have had to poll.
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

    /// What the reader pays for a wait of `wait_ns`, and what it would have paid had it known.
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
        fn polling_is_3_competitive_after_the_first_short_waits(waits in prop::collection::vec(0..20_000u64, 1..400)) {
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

    /// Whether two that answer one another at once, both blocked at first, poll in the end. Each wait includes the other's
    /// wake-up until neither blocks any more.
    fn stop_blocking(real_block_ns: u64) -> bool {
        let mut sides = [PollTime::new(BLOCK_NS), PollTime::new(BLOCK_NS)];
        for side in &mut sides {
            (0..100).for_each(|_| side.waited(1_000_000, true));
        }
        let mut blocked = [true, true];
        for turn in 0..20 {
            let (mine, other) = (turn % 2, 1 - turn % 2);
            // The other side wakes, if it must, and answers.
            let wait = if blocked[other] { real_block_ns } else { 0 } + 300;
            blocked[other] = false;
            blocked[mine] = wait > sides[mine].poll_ns();
            let wake = if blocked[mine] { real_block_ns } else { 0 };
            sides[mine].waited(wait + wake, blocked[mine]);
        }
        blocked == [false, false]
    }

    #[test]
    fn peers_that_reply_at_once_stop_blocking() {
        assert!(stop_blocking(BLOCK_NS));
        assert!(stop_blocking(BLOCK_NS / 20));
        assert!(stop_blocking(BLOCK_NS * 14 / 10));
        // Why the measured cost must be that of waking another CPU.
        assert!(!stop_blocking(BLOCK_NS * 20));
    }
}
