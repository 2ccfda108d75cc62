//! A shared folder's front end: configuration space and status.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::handler::FsHandler;
use super::metrics::FsMetrics;
use crate::sandbox::{ThreadKind, Threads};
use crate::sharing::FolderSharing;
use crate::virtio::VirtioId;
use crate::virtio::device::read_space;
use crate::virtio::transport::Log;
use crate::virtio::worker::Worker;
use crate::virtio::worker_device::WorkerDevice;

/// Sizes of the queue of urgent requests, and of the queue of all others. A request takes a descriptor for
/// each page of its data.
const QUEUE_SIZES: [u16; 2] = [128, 256];
/// Number of queues of ordinary requests.
const REQUEST_QUEUES: u32 = 1;
/// Length of the tag's field, bytes.
pub const TAG_BYTES: usize = 36;

/// A shared folder.
pub struct Fs {
    worker: Worker,
    metrics: Arc<FsMetrics>,
    config: [u8; TAG_BYTES + 4],
}

impl Fs {
    /// Starts the device's thread. `socket` leads to the folder's process. With `sharing`, pages that the
    /// guest reads become mappings of the folder's files.
    pub fn new(
        threads: &Threads,
        tag: &str,
        socket: OwnedFd,
        sharing: Option<FolderSharing>,
        log: Log,
    ) -> io::Result<Self> {
        let mut config = [0; TAG_BYTES + 4];
        let field = config
            .get_mut(..tag.len())
            .filter(|_| tag.len() <= TAG_BYTES)
            .ok_or(io::ErrorKind::InvalidInput)?;
        field.copy_from_slice(tag.as_bytes());
        config[TAG_BYTES..].copy_from_slice(&REQUEST_QUEUES.to_le_bytes());
        let metrics = Arc::new(FsMetrics::default());
        let handler = FsHandler::new(tag, socket, sharing, metrics.clone(), log);
        let worker = Worker::spawn(threads, ThreadKind::Fs, "folder", handler)?;
        Ok(Self {
            worker,
            metrics,
            config,
        })
    }
}

/// Returns the handler without its thread, for [`crate::fuzzing`].
#[cfg(fuzzing)]
pub(crate) fn bare(socket: OwnedFd) -> impl crate::virtio::worker::Handler {
    FsHandler::new("fuzz", socket, None, Arc::default(), Arc::new(|_| ()))
}

impl WorkerDevice for Fs {
    const ID: VirtioId = VirtioId::Fs;

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_space(&self.config, offset, data);
    }

    fn worker(&self) -> &Worker {
        &self.worker
    }

    fn status(&self) -> serde_json::Value {
        self.metrics.status()
    }
}
