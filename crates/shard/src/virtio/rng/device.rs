//! The entropy source's front end: status; it has no configuration space.

use std::io;
use std::sync::Arc;

use super::handler::RngRequests;
use super::metrics::RngMetrics;
use crate::sandbox::{ThreadKind, Threads};
use crate::virtio::device::RING_FEATURES;
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
        let worker = Worker::spawn(
            threads,
            ThreadKind::Rng,
            "rng",
            RngRequests::handler(metrics.clone()),
        )?;
        Ok(Self { worker, metrics })
    }
}

/// Returns the handler without its thread, for [`crate::fuzzing`].
#[cfg(fuzzing)]
pub(crate) fn bare() -> impl crate::virtio::worker::Handler {
    RngRequests::handler(Arc::default())
}

impl VirtioDevice for Rng {
    fn id(&self) -> VirtioId {
        VirtioId::Rng
    }

    fn features(&self) -> u64 {
        RING_FEATURES
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
