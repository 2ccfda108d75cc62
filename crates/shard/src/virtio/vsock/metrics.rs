//! Counters of the socket device.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// Counters since the shard started; relaxed, written by the device's thread, read by any.
#[derive(Debug, Default)]
pub struct VsockMetrics {
    /// Connections opened, either way.
    pub opened: AtomicU64,
    /// Connections refused or reset by this side.
    pub refused: AtomicU64,
    /// Payload bytes to the guest.
    pub rx_bytes: AtomicU64,
    /// Payload bytes from the guest.
    pub tx_bytes: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the fields are those of `VsockMetrics`")]
pub struct VsockCounts {
    pub opened: u64,
    pub refused: u64,
    pub rx_bytes: u64,
    pub tx_bytes: u64,
}

impl VsockMetrics {
    /// Reads the counters.
    pub fn counts(&self) -> VsockCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        VsockCounts {
            opened: get(&self.opened),
            refused: get(&self.refused),
            rx_bytes: get(&self.rx_bytes),
            tx_bytes: get(&self.tx_bytes),
        }
    }
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}
