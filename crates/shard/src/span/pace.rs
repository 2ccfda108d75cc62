//! How often its timer may interrupt a vCPU whose memory is kept coherent by software, as plain decisions.
//!
//! A tick uses pages that every CPU's tick writes, so some of them have to be fetched each time. Where a fetch takes a millisecond
//! a guest that ticks 250 times a second would do nothing else. So two interrupts of a timer are apart in proportion to what a
//! fetch takes. To the guest that is a host that has had no time for it: it counts the time that has passed, not its ticks.

/// Fetches that there is time for between two interrupts: more than a tick needs.
const FETCHES: u64 = 32;
/// The longest that one is put off, nanoseconds: guests take CPUs that don't tick for seconds for broken.
const LONGEST_NS: u64 = 50_000_000;

/// One vCPU's.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    interrupted_ns: u64,
}

impl Pace {
    /// The timer interrupts now.
    pub fn interrupts(&mut self, now_ns: u64) {
        self.interrupted_ns = now_ns;
    }

    /// In how many nanoseconds it may again, when a page takes so long.
    pub fn left_ns(self, now_ns: u64, fetch_ns: u64) -> u64 {
        let apart_ns = fetch_ns.saturating_mul(FETCHES).min(LONGEST_NS);
        (self.interrupted_ns + apart_ns).saturating_sub(now_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_as_far_apart_as_fetches_are_slow() {
        let mut pace = Pace::default();
        pace.interrupts(1_000_000_000);
        assert_eq!(pace.left_ns(1_000_000_000, 0), 0);
        // A quick network leaves ticks as they are.
        assert_eq!(pace.left_ns(1_004_000_000, 15_000), 0);
        assert_eq!(pace.left_ns(1_004_000_000, 1_000_000), 28_000_000);
        assert_eq!(pace.left_ns(1_000_000_000, u64::MAX), LONGEST_NS);
        assert_eq!(pace.left_ns(1_000_000_000 + LONGEST_NS, u64::MAX), 0);
    }
}
