//! Counters of the entropy source.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the shard started; relaxed, written by the device's thread, read by any.
#[derive(Debug, Default)]
pub struct RngMetrics {
    /// Requests served.
    pub requests: AtomicU64,
    /// Random bytes written.
    pub bytes: AtomicU64,
}

impl RngMetrics {
    pub fn status(&self) -> serde_json::Value {
        serde_json::json!({
            "requests": self.requests.load(Ordering::Relaxed),
            "bytes": self.bytes.load(Ordering::Relaxed),
        })
    }
}
