//! Rate limit on the timer interrupts of a vCPU whose memory is kept coherent by software. Pure decisions.
//!
//! A tick uses pages that every CPU's tick writes, so it has to fetch some of them each time. If a fetch
//! takes a millisecond, a guest that ticks 250 times a second would do nothing else. So the interval between
//! two timer interrupts is proportional to the latency of a fetch. To the guest this is a host without CPU
//! time for it: the guest counts the time that has passed, not its ticks.

/// Interval between two timer interrupts of a running vCPU, in fetches. A tick needs ten, and keeps other
/// vCPUs from pages that they use. So ticks take less than a tenth of the time.
const FETCHES_RUNNING: u64 = 128;
/// Interval for a halted vCPU, in fetches: a wake-up that the guest waits for should not be late.
const FETCHES_HALTED: u64 = 16;
/// Longest interval, nanoseconds: guests treat CPUs without a tick for seconds as broken.
const DELAY_NS_MAX: u64 = 250_000_000;

/// Timer throttle of one vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimerThrottle {
    last_interrupt_ns: u64,
}

impl TimerThrottle {
    /// Records a timer interrupt at `now_ns`.
    pub fn record_interrupt(&mut self, now_ns: u64) {
        self.last_interrupt_ns = now_ns;
    }

    /// Returns the time until the next timer interrupt is allowed, nanoseconds. `fetch_ns` is the latency of
    /// fetching a page.
    pub fn delay_ns(self, now_ns: u64, fetch_ns: u64, is_halted: bool) -> u64 {
        let fetches = if is_halted {
            FETCHES_HALTED
        } else {
            FETCHES_RUNNING
        };
        let interval_ns = fetch_ns.saturating_mul(fetches).min(DELAY_NS_MAX);
        (self.last_interrupt_ns + interval_ns).saturating_sub(now_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timer_interval_is_proportional_to_fetch_latency_up_to_a_limit() {
        let mut throttle = TimerThrottle::default();
        throttle.record_interrupt(1_000_000_000);
        assert_eq!(throttle.delay_ns(1_000_000_000, 0, false), 0);
        // A fast network does not delay ticks.
        assert_eq!(throttle.delay_ns(1_004_000_000, 15_000, false), 0);
        assert_eq!(throttle.delay_ns(1_004_000_000, 1_000_000, false), 124_000_000);
        assert_eq!(throttle.delay_ns(1_004_000_000, 1_000_000, true), 12_000_000);
        assert_eq!(throttle.delay_ns(1_000_000_000, u64::MAX, false), DELAY_NS_MAX);
        assert_eq!(
            throttle.delay_ns(1_000_000_000 + DELAY_NS_MAX, u64::MAX, false),
            0
        );
    }
}
