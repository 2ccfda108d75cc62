//! The front of the entropy source.

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::handler::RngHandler;
use super::metrics::RngMetrics;
use crate::sandbox::{ThreadKind, Threads};
use crate::virtio::worker::Worker;
use crate::virtio::{Activation, DeviceError, VirtioDevice, VirtioId};

const QUEUE_SIZES: [u16; 1] = [64];

/// The entropy source.
pub struct Rng {
    worker: Worker,
    metrics: Arc<RngMetrics>,
}

impl Rng {
    /// Starts the device's thread.
    pub fn new(threads: &Threads) -> io::Result<Self> {
        let metrics = Arc::new(RngMetrics::default());
        let worker = Worker::spawn(threads, ThreadKind::Rng, "rng", RngHandler::new(metrics.clone()))?;
        Ok(Self { worker, metrics })
    }
}

/// The handler without its thread, for [`crate::fuzzing`].
#[cfg(fuzzing)]
pub(crate) fn bare() -> impl crate::virtio::worker::Handler {
    RngHandler::new(Arc::default())
}

impl VirtioDevice for Rng {
    fn id(&self) -> VirtioId {
        VirtioId::Rng
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
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
