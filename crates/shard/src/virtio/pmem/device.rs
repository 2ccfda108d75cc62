//! Persistent memory's front end: configuration space and status.

use std::fs::File;
use std::io;
use std::sync::Arc;

use super::handler::PmemRequests;
use super::mapping::{PmemRegion, Writes, map};
use super::metrics::PmemMetrics;
use crate::sandbox::{ThreadKind, Threads};
use crate::virtio::VirtioId;
use crate::virtio::device::read_space;
use crate::virtio::worker::Worker;
use crate::virtio::worker_device::WorkerDevice;

const QUEUE_SIZES: [u16; 1] = [64];

/// Persistent memory.
pub struct Pmem {
    worker: Worker,
    region: PmemRegion,
    metrics: Arc<PmemMetrics>,
}

impl Pmem {
    /// Maps `file` for the guest address `guest` and starts the device's thread.
    pub fn new(threads: &Threads, file: File, guest: u64, writes: Writes) -> io::Result<Self> {
        let region = map(&file, guest, writes)?;
        let metrics = Arc::new(PmemMetrics::default());
        let kept = (writes == Writes::Kept).then_some(file);
        let handler = PmemRequests::handler(kept, metrics.clone());
        let worker = Worker::spawn(threads, ThreadKind::Pmem, "pmem", handler)?;
        Ok(Self {
            worker,
            region,
            metrics,
        })
    }

    /// Returns the region for KVM's memory slot.
    pub fn region(&self) -> PmemRegion {
        self.region
    }
}

/// Returns the handler without its thread, for [`crate::fuzzing`].
#[cfg(fuzzing)]
pub(crate) fn bare(file: File) -> impl crate::virtio::worker::Handler {
    PmemRequests::handler(Some(file), Arc::default())
}

impl WorkerDevice for Pmem {
    const ID: VirtioId = VirtioId::Pmem;

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = [self.region.guest.to_le_bytes(), self.region.bytes.to_le_bytes()];
        read_space(config.as_flattened(), offset, data);
    }

    fn worker(&self) -> &Worker {
        &self.worker
    }

    fn status(&self) -> serde_json::Value {
        self.metrics.status()
    }
}
