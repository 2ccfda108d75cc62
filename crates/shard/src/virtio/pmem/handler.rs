//! Serves flush requests.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use diskstore::disk::SyncState;
use vm_memory::{Bytes, GuestMemoryMmap};

use super::metrics::PmemMetrics;
use crate::virtio::DeviceError;
use crate::virtio::one_queue::{OneQueue, Requests};
use crate::virtio::serve::{Chain, broken};

/// Type `VIRTIO_PMEM_REQ_TYPE_FLUSH` of a flush request.
const FLUSH: u32 = 0;
/// Result of a failed flush for the driver (any value but 0).
const FAILED: u32 = 1;
const ANSWER_BYTES: u32 = 4;

/// Persistent memory's requests.
pub struct PmemRequests {
    /// The file to sync; none if writes are not kept.
    file: Option<File>,
    sync_state: SyncState,
    metrics: Arc<PmemMetrics>,
}

impl PmemRequests {
    pub fn handler(file: Option<File>, metrics: Arc<PmemMetrics>) -> OneQueue<Self> {
        OneQueue::new(Self {
            file,
            sync_state: SyncState::default(),
            metrics,
        })
    }
}

impl Requests for PmemRequests {
    /// Serves a request: a readable word with its type, and a writable one for the result.
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
            self.flush()
        } else {
            FAILED
        };
        memory.write_obj(result.to_le(), reply.addr()).map_err(broken)?;
        Ok(ANSWER_BYTES)
    }
}

impl PmemRequests {
    fn flush(&self) -> u32 {
        self.metrics.flushes.fetch_add(1, Ordering::Relaxed);
        let synced = self.file.as_ref().map_or(Ok(()), File::sync_data);
        match self.sync_state.note(synced) {
            Ok(()) => 0,
            Err(_) => {
                self.metrics.failures.fetch_add(1, Ordering::Relaxed);
                FAILED
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_flush_succeeds_after_a_failed_sync() {
        // A pipe can't be synced.
        let (pipe, _) = nix::unistd::pipe().unwrap();
        let mut requests = PmemRequests {
            file: Some(pipe.into()),
            sync_state: SyncState::default(),
            metrics: Arc::default(),
        };
        assert_eq!(requests.flush(), FAILED);
        requests.file = Some(tempfile::tempfile().unwrap());
        assert_eq!(requests.flush(), FAILED);
        assert_eq!(requests.metrics.failures.load(Ordering::Relaxed), 2);
    }
}
