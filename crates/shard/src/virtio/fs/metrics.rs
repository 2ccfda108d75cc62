//! Counters of a shared folder.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counters since the shard started; relaxed, written by the device's thread, read by any.
#[derive(Debug, Default)]
pub struct FsMetrics {
    /// Requests that the folder's process received.
    pub requests: AtomicU64,
    /// Bytes of these requests.
    pub request_bytes: AtomicU64,
    /// Replies that the guest received.
    pub replies: AtomicU64,
    /// Bytes of these replies.
    pub reply_bytes: AtomicU64,
    /// Requests that got an error from the device itself.
    pub refused: AtomicU64,
    /// Packets of the folder's process that were no reply to a request.
    pub strays: AtomicU64,
    /// Files of which pages may be shared.
    pub lent_files: AtomicU64,
    /// Whether the folder's process has ended.
    pub has_ended: AtomicBool,
}

impl FsMetrics {
    pub fn status(&self) -> serde_json::Value {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        serde_json::json!({
            "requests": get(&self.requests),
            "request_bytes": get(&self.request_bytes),
            "replies": get(&self.replies),
            "reply_bytes": get(&self.reply_bytes),
            "refused": get(&self.refused),
            "strays": get(&self.strays),
            "lent_files": get(&self.lent_files),
            "server": if self.has_ended.load(Ordering::Relaxed) { "ended" } else { "running" },
        })
    }
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}
