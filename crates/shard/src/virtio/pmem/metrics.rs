//! Counters of persistent memory.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the shard started; relaxed, written by the device's thread, read by any.
#[derive(Debug, Default)]
pub struct PmemMetrics {
    /// Flush requests.
    pub flushes: AtomicU64,
    /// Flushes that failed on the host.
    pub failures: AtomicU64,
}

impl PmemMetrics {
    pub fn status(&self) -> serde_json::Value {
        serde_json::json!({
            "flushes": self.flushes.load(Ordering::Relaxed),
            "failures": self.failures.load(Ordering::Relaxed),
        })
    }
}
