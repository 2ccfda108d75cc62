//! Counters of a disk's queues.

use std::sync::atomic::{AtomicU64, Ordering};

use diskstore::disk::Operation;
use serde::Serialize;

/// Counters of one disk, shared by its queues. Each of them only grows, except `waiting`.
#[derive(Debug, Default)]
pub struct Metrics {
    pub(super) reads: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    pub(super) flushes: AtomicU64,
    pub(super) discards: AtomicU64,
    pub(super) zeroed: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) unsupported: AtomicU64,
    pub(super) in_background: AtomicU64,
    pub(super) notifications: AtomicU64,
    pub(super) interrupts: AtomicU64,
    pub(super) waiting: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Read requests.
    pub reads: u64,
    /// Bytes of read requests.
    pub read_bytes: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes of write requests.
    pub written_bytes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Discard requests.
    pub discards: u64,
    /// Write-zeroes requests.
    pub zeroed: u64,
    /// Requests completed with an I/O error.
    pub failed: u64,
    /// Requests completed as unsupported.
    pub unsupported: u64,
    /// Requests that the kernel's ring served in the background.
    pub in_background: u64,
    /// Notifications from the driver.
    pub notifications: u64,
    /// Interrupts to the driver.
    pub interrupts: u64,
    /// Requests that wait for room on the host now.
    pub waiting: u64,
}

impl Metrics {
    /// Counts a request.
    pub(super) fn count(&self, operation: &Operation) {
        let (counter, bytes): (_, Option<(&AtomicU64, u64)>) = match operation {
            Operation::Read { into, .. } => (&self.reads, Some((&self.read_bytes, into.bytes()))),
            Operation::Write { from, .. } => (&self.writes, Some((&self.written_bytes, from.bytes()))),
            Operation::Flush => (&self.flushes, None),
            Operation::Discard { .. } => (&self.discards, None),
            Operation::WriteZeroes { .. } => (&self.zeroed, None),
        };
        add(counter, 1);
        if let Some((counter, bytes)) = bytes {
            add(counter, bytes);
        }
    }

    /// Returns the current counters.
    pub fn snapshot(&self) -> Snapshot {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Snapshot {
            reads: read(&self.reads),
            read_bytes: read(&self.read_bytes),
            writes: read(&self.writes),
            written_bytes: read(&self.written_bytes),
            flushes: read(&self.flushes),
            discards: read(&self.discards),
            zeroed: read(&self.zeroed),
            failed: read(&self.failed),
            unsupported: read(&self.unsupported),
            in_background: read(&self.in_background),
            notifications: read(&self.notifications),
            interrupts: read(&self.interrupts),
            waiting: read(&self.waiting),
        }
    }
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
