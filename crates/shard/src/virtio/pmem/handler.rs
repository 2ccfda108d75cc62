//! Answers flush requests.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestMemoryMmap};

use super::metrics::PmemMetrics;
use crate::virtio::DeviceError;
use crate::virtio::one_queue::{OneQueue, Requests};
use crate::virtio::serve::{Chain, broken};

/// `VIRTIO_PMEM_REQ_TYPE_FLUSH`.
const FLUSH: u32 = 0;
/// What the driver gets for a flush that failed (any value but 0).
const FAILED: u32 = 1;
const ANSWER_BYTES: u32 = 4;

/// Persistent memory's requests.
pub struct PmemRequests {
    /// The file to sync; none when writes are not kept.
    file: Option<File>,
    metrics: Arc<PmemMetrics>,
}

impl PmemRequests {
    pub fn handler(file: Option<File>, metrics: Arc<PmemMetrics>) -> OneQueue<Self> {
        OneQueue::new(Self { file, metrics })
    }
}

impl Requests for PmemRequests {
    /// A request is a readable word that says what, and a writable one for the answer.
    fn answer(&mut self, memory: &GuestMemoryMmap<()>, mut request: Chain<'_>) -> Result<u32, DeviceError> {
        let short = || DeviceError::Protocol("a flush request is too short".to_owned());
        let what = request
            .next()
            .filter(|word| !word.is_write_only() && word.len() >= 4)
            .ok_or_else(short)?;
        let reply = request
            .next()
            .filter(|word| word.is_write_only() && word.len() >= ANSWER_BYTES)
            .ok_or_else(short)?;
        let what: u32 = memory.read_obj(what.addr()).map_err(broken)?;
        let result = if u32::from_le(what) == FLUSH {
            flush(self.file.as_ref(), &self.metrics)
        } else {
            FAILED
        };
        memory.write_obj(result.to_le(), reply.addr()).map_err(broken)?;
        Ok(ANSWER_BYTES)
    }
}

fn flush(file: Option<&File>, metrics: &PmemMetrics) -> u32 {
    metrics.flushes.fetch_add(1, Ordering::Relaxed);
    match file.map(File::sync_data) {
        None | Some(Ok(())) => 0,
        Some(Err(_)) => {
            metrics.failures.fetch_add(1, Ordering::Relaxed);
            FAILED
        }
    }
}
