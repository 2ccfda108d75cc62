//! Answers flush requests.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestMemoryMmap};

use super::metrics::PmemMetrics;
use crate::virtio::serve::{Chain, broken, serve};
use crate::virtio::worker::{Event, Handler, Sources};
use crate::virtio::{Activation, DeviceError};

/// `VIRTIO_PMEM_REQ_TYPE_FLUSH`.
const FLUSH: u32 = 0;
/// What the driver gets for a flush that failed (any value but 0).
const FAILED: u32 = 1;
const ANSWER_BYTES: u32 = 4;

pub struct PmemHandler {
    /// The file to sync; none when writes are not kept.
    file: Option<File>,
    metrics: Arc<PmemMetrics>,
    active: Option<Activation>,
}

impl PmemHandler {
    pub fn new(file: Option<File>, metrics: Arc<PmemMetrics>) -> Self {
        Self {
            file,
            metrics,
            active: None,
        }
    }
}

impl Handler for PmemHandler {
    fn start(&mut self, activation: Activation, _sources: &Sources) -> Result<(), DeviceError> {
        self.active = Some(activation);
        Ok(())
    }

    fn handle(&mut self, event: Event, _sources: &Sources) -> Result<(), DeviceError> {
        let (Event::Queue(_), Some(active)) = (event, &mut self.active) else {
            return Ok(());
        };
        let Some(queue) = active.queues.first_mut() else {
            return Ok(());
        };
        serve(queue, &active.memory, &active.interrupt, |chain| {
            answer(&active.memory, chain, self.file.as_ref(), &self.metrics)
        })
    }

    fn stop(&mut self, _sources: &Sources) {
        self.active = None;
    }
}

/// Serves one request: a readable word that says what, a writable one for the answer.
fn answer(
    memory: &GuestMemoryMmap<()>,
    mut chain: Chain<'_>,
    file: Option<&File>,
    metrics: &PmemMetrics,
) -> Result<u32, DeviceError> {
    let short = || DeviceError::Protocol("a flush request is too short".to_owned());
    let request = chain
        .next()
        .filter(|word| !word.is_write_only() && word.len() >= 4)
        .ok_or_else(short)?;
    let reply = chain
        .next()
        .filter(|word| word.is_write_only() && word.len() >= ANSWER_BYTES)
        .ok_or_else(short)?;
    let kind: u32 = memory.read_obj(request.addr()).map_err(broken)?;
    let result = if u32::from_le(kind) == FLUSH {
        flush(file, metrics)
    } else {
        FAILED
    };
    memory.write_obj(result.to_le(), reply.addr()).map_err(broken)?;
    Ok(ANSWER_BYTES)
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
