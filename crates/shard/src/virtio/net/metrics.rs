//! Counters of a card.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// Counters of a card since the shard started; relaxed, written by the card's thread, read by any.
#[derive(Debug, Default)]
pub struct NetMetrics {
    /// Frames to the guest.
    pub rx_frames: AtomicU64,
    /// Bytes of frames to the guest.
    pub rx_bytes: AtomicU64,
    /// Frames to the guest that did not fit its buffers.
    pub rx_dropped: AtomicU64,
    /// Number of times that reading stopped because the guest had no free buffers.
    pub rx_stalls: AtomicU64,
    /// Frames from the guest.
    pub tx_frames: AtomicU64,
    /// Bytes of frames from the guest.
    pub tx_bytes: AtomicU64,
    /// Frames from the guest that the backend did not accept.
    pub tx_dropped: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the fields are those of `NetMetrics`")]
pub struct NetCounts {
    pub rx_frames: u64,
    pub rx_bytes: u64,
    pub rx_dropped: u64,
    pub rx_stalls: u64,
    pub tx_frames: u64,
    pub tx_bytes: u64,
    pub tx_dropped: u64,
}

impl NetMetrics {
    /// Reads the counters.
    pub fn counts(&self) -> NetCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        NetCounts {
            rx_frames: get(&self.rx_frames),
            rx_bytes: get(&self.rx_bytes),
            rx_dropped: get(&self.rx_dropped),
            rx_stalls: get(&self.rx_stalls),
            tx_frames: get(&self.tx_frames),
            tx_bytes: get(&self.tx_bytes),
            tx_dropped: get(&self.tx_dropped),
        }
    }
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}
