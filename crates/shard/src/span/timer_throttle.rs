//! How often its timer may interrupt a vCPU whose memory is kept coherent by software, as plain decisions.
//!
//! A tick uses pages that every CPU's tick writes, so some of them have to be fetched each time. Where a fetch takes a millisecond
//! a guest that ticks 250 times a second would do nothing else. So two interrupts of a timer are apart in proportion to what a
//! fetch takes. To the guest that is a host that has had no time for it: it counts the time that has passed, not its ticks.

/// Fetches that there is time for between two interrupts of a vCPU that runs. A tick needs ten, and keeps other vCPUs from pages
/// that they use: so ticks take less than a tenth of the time.
const FETCHES_RUNNING: u64 = 128;
/// Of one that is halted: what its guest waits for should not be late.
const FETCHES_HALTED: u64 = 16;
/// The longest that one is put off, nanoseconds: guests take CPUs that don't tick for seconds for broken.
const DELAY_NS_MAX: u64 = 250_000_000;

/// One vCPU's.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimerThrottle {
    last_interrupt_ns: u64,
}

impl TimerThrottle {
    /// The timer interrupts now.
    pub fn record_interrupt(&mut self, now_ns: u64) {
        self.last_interrupt_ns = now_ns;
    }

    /// In how many nanoseconds it may again, when a page takes so long.
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
        // A quick network leaves ticks as they are.
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
