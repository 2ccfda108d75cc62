//! Counters of sharing.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the shard started; pages are of 4 KiB.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Pages mapped during a read.
    pub mapped_at_read: AtomicU64,
    /// Copies replaced by mappings in the background.
    pub mapped_later: AtomicU64,
    /// Pages of kernel and initramfs mapped at the start.
    pub mapped_at_boot: AtomicU64,
    /// Pages whose origin was recorded.
    pub remembered: AtomicU64,
    /// Copies that had changed before they were processed.
    pub changed: AtomicU64,
    /// Copies whose image page was no longer in the page cache.
    pub cold: AtomicU64,
    /// Overwritten pages that were turned back into plain memory.
    pub restored: AtomicU64,
    /// Pages that the guest released to the host.
    pub released: AtomicU64,
    /// Pages copied because the limit of mappings was reached.
    pub at_limit: AtomicU64,
    /// Files of shared folders that were given back to a waiting writer.
    pub leases_broken: AtomicU64,
    /// Number of pauses of the VM.
    pub pauses: AtomicU64,
    /// Length of all pauses, microseconds.
    pub pause_us: AtomicU64,
    /// Length of the longest pause, microseconds.
    pub pause_us_max: AtomicU64,
    /// Number of pauses that failed.
    pub pauses_missed: AtomicU64,
}

/// Adds to a counter.
pub fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Metrics {
    /// Counts a pause.
    pub fn paused(&self, time: std::time::Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        add(&self.pauses, 1);
        add(&self.pause_us, us);
        self.pause_us_max.fetch_max(us, Ordering::Relaxed);
    }

    /// Returns all counters, for `inspect`.
    pub fn snapshot(&self) -> serde_json::Value {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        serde_json::json!({
            "mapped_at_read": get(&self.mapped_at_read),
            "mapped_later": get(&self.mapped_later),
            "mapped_at_boot": get(&self.mapped_at_boot),
            "remembered": get(&self.remembered),
            "changed": get(&self.changed),
            "cold": get(&self.cold),
            "restored": get(&self.restored),
            "released": get(&self.released),
            "at_limit": get(&self.at_limit),
            "leases_broken": get(&self.leases_broken),
            "pauses": get(&self.pauses),
            "pause_us": get(&self.pause_us),
            "pause_us_max": get(&self.pause_us_max),
            "pauses_missed": get(&self.pauses_missed),
        })
    }
}
