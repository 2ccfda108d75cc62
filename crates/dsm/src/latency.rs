//! Running mean of the time to fetch a remote page.

use std::sync::atomic::{AtomicU64, Ordering};

/// Weight of one page in the mean: 1 of this number.
const WEIGHT: u64 = 16;

/// A running mean that any thread may read.
#[derive(Debug, Default)]
pub struct Latency(AtomicU64);

impl Latency {
    /// Returns the mean, nanoseconds; 0 before the first page.
    pub fn ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds one page's time. Of two concurrent calls one may be lost.
    pub(crate) fn record(&self, ns: u64) {
        let mean = self.ns();
        self.0
            .store(mean - mean / WEIGHT + ns / WEIGHT, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_follows_recent_fetches() {
        let latency = Latency::default();
        (0..100).for_each(|_| latency.record(1_000_000));
        assert!((900_000..=1_000_000).contains(&latency.ns()), "{}", latency.ns());
        (0..100).for_each(|_| latency.record(16_000));
        assert!((15_000..40_000).contains(&latency.ns()), "{}", latency.ns());
    }
}
