//! The front of persistent memory.

use std::fs::File;
use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::handler::PmemHandler;
use super::mapping::{PmemRegion, map};
use super::metrics::PmemMetrics;
use crate::sandbox::{ThreadKind, Threads};
use crate::virtio::worker::Worker;
use crate::virtio::{Activation, DeviceError, VirtioDevice, VirtioId};

const QUEUE_SIZES: [u16; 1] = [64];

/// Persistent memory.
pub struct Pmem {
    worker: Worker,
    region: PmemRegion,
    metrics: Arc<PmemMetrics>,
}

impl Pmem {
    /// Maps `file` for the guest address `guest` and starts the device's thread. A `persistent` one keeps the guest's
    /// writes; its file must be open for writing.
    pub fn new(threads: &Threads, file: File, guest: u64, persistent: bool) -> io::Result<Self> {
        let region = map(&file, guest, persistent)?;
        let metrics = Arc::new(PmemMetrics::default());
        let handler = PmemHandler::new(persistent.then_some(file), metrics.clone());
        let worker = Worker::spawn(threads, ThreadKind::Pmem, "pmem", handler)?;
        Ok(Self {
            worker,
            region,
            metrics,
        })
    }

    /// Where it is, for KVM's memory slot.
    pub fn region(&self) -> PmemRegion {
        self.region
    }
}

/// The handler without its thread, for [`crate::fuzzing`].
#[cfg(fuzzing)]
pub(crate) fn bare(file: File) -> impl crate::virtio::worker::Handler {
    PmemHandler::new(Some(file), Arc::default())
}

impl VirtioDevice for Pmem {
    fn id(&self) -> VirtioId {
        VirtioId::Pmem
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = [self.region.guest.to_le_bytes(), self.region.bytes.to_le_bytes()];
        let config = config.as_flattened();
        for (position, byte) in (offset..).zip(data) {
            *byte = usize::try_from(position)
                .ok()
                .and_then(|at| config.get(at))
                .copied()
                .unwrap_or(0);
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.worker.activate(activation)
    }

    fn reset(&mut self) {
        self.worker.reset();
    }

    fn status(&self) -> serde_json::Value {
        self.metrics.status()
    }
}
