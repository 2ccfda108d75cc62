//! The socket device's front end: configuration space and status.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use super::handler::VsockHandler;
use super::metrics::VsockMetrics;
use crate::ports::Ports;
use crate::sandbox::{ThreadKind, Threads};
use crate::virtio::VirtioId;
use crate::virtio::device::read_space;
use crate::virtio::worker::Worker;
use crate::virtio::worker_device::WorkerDevice;

/// Sizes of the receive, transmit and event queues.
const QUEUE_SIZES: [u16; 3] = [256, 256, 16];

/// The socket device.
pub struct Vsock {
    worker: Worker,
    metrics: Arc<VsockMetrics>,
    cid: u64,
}

impl Vsock {
    /// Creates the device for the guest `cid` and starts its thread. `ports` connects to the host's sockets
    /// that the guest may request.
    pub fn new(
        threads: &Threads,
        cid: u32,
        listener: UnixListener,
        ports: Option<Ports>,
    ) -> io::Result<Self> {
        let metrics = Arc::new(VsockMetrics::default());
        let handler = VsockHandler::new(u64::from(cid), listener, ports, metrics.clone())?;
        let worker = Worker::spawn(threads, ThreadKind::Vsock, "vsock", handler)?;
        Ok(Self {
            worker,
            metrics,
            cid: u64::from(cid),
        })
    }

    /// Returns the counters of the device.
    pub fn metrics(&self) -> &Arc<VsockMetrics> {
        &self.metrics
    }
}

/// Returns the device's handler without its thread, for [`crate::fuzzing`].
#[cfg(fuzzing)]
pub(crate) fn bare(
    cid: u64,
    listener: UnixListener,
    ports: Ports,
) -> io::Result<impl crate::virtio::worker::Handler> {
    VsockHandler::new(cid, listener, Some(ports), Arc::default())
}

impl WorkerDevice for Vsock {
    const ID: VirtioId = VirtioId::Vsock;

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_space(&self.cid.to_le_bytes(), offset, data);
    }

    fn worker(&self) -> &Worker {
        &self.worker
    }

    fn status(&self) -> serde_json::Value {
        serde_json::to_value(self.metrics.counts()).unwrap_or_default()
    }
}
