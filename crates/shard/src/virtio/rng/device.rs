//! The entropy source's front end: status; it has no configuration space.

use std::io;
use std::sync::Arc;

use super::handler::RngRequests;
use super::metrics::RngMetrics;
use crate::sandbox::{ThreadKind, Threads};
use crate::virtio::VirtioId;
use crate::virtio::worker::Worker;
use crate::virtio::worker_device::WorkerDevice;

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

impl WorkerDevice for Rng {
    const ID: VirtioId = VirtioId::Rng;

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn worker(&self) -> &Worker {
        &self.worker
    }

    fn status(&self) -> serde_json::Value {
        self.metrics.status()
    }
}
