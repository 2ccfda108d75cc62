//! How long pages of other nodes take to come, as of late.

use std::sync::atomic::{AtomicU64, Ordering};

/// What one page weighs against all before it: 1 of so many.
const WEIGHT: u64 = 16;

/// A running mean that any thread may read.
#[derive(Debug, Default)]
pub struct Latency(AtomicU64);

impl Latency {
    /// Nanoseconds; zero while none has come.
    pub fn ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// One took so long. Of two lanes that say so at once one may be lost.
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
    fn it_follows_what_pages_take_and_forgets() {
        let latency = Latency::default();
        (0..100).for_each(|_| latency.record(1_000_000));
        assert!((900_000..=1_000_000).contains(&latency.ns()), "{}", latency.ns());
        (0..100).for_each(|_| latency.record(16_000));
        assert!((15_000..40_000).contains(&latency.ns()), "{}", latency.ns());
    }
}
