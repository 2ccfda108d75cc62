//! Fills buffers with random bytes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestMemoryMmap};

use super::metrics::RngMetrics;
use crate::virtio::DeviceError;
use crate::virtio::one_queue::{OneQueue, Requests};
use crate::virtio::serve::{Chain, broken};

/// Greatest size of one reply, bytes; a driver that needs more sends another request (Linux requests about
/// 64).
const REQUEST_BYTES_MAX: usize = 4096;

/// The entropy source's requests.
pub struct RngRequests {
    metrics: Arc<RngMetrics>,
}

impl RngRequests {
    pub fn handler(metrics: Arc<RngMetrics>) -> OneQueue<Self> {
        OneQueue::new(Self { metrics })
    }
}

impl Requests for RngRequests {
    fn answer(&mut self, memory: &GuestMemoryMmap<()>, request: Chain<'_>) -> Result<u32, DeviceError> {
        let written = fill(memory, request)?;
        self.metrics.requests.fetch_add(1, Ordering::Relaxed);
        self.metrics
            .bytes
            .fetch_add(u64::from(written), Ordering::Relaxed);
        Ok(written)
    }
}

/// Fills the start of a chain's writable memory; returns the number of bytes.
fn fill(memory: &GuestMemoryMmap<()>, chain: Chain<'_>) -> Result<u32, DeviceError> {
    let mut random = [0; REQUEST_BYTES_MAX];
    let mut written = 0;
    for descriptor in chain.writable() {
        let length = (descriptor.len() as usize).min(REQUEST_BYTES_MAX - written);
        let piece = &mut random[..length];
        draw(piece)?;
        memory.write_slice(piece, descriptor.addr()).map_err(broken)?;
        written += length;
        if written == REQUEST_BYTES_MAX {
            break;
        }
    }
    // At most REQUEST_BYTES_MAX.
    Ok(written as u32)
}

fn draw(buffer: &mut [u8]) -> Result<(), DeviceError> {
    let mut filled = 0;
    while filled < buffer.len() {
        let rest = &mut buffer[filled..];
        // SAFETY: the pointer and the length are those of a live buffer.
        let count = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(count) {
            Ok(count) => filled += count,
            Err(_) => {
                let source = std::io::Error::last_os_error();
                if source.kind() != std::io::ErrorKind::Interrupted {
                    return Err(DeviceError::host("the host gives no random bytes")(source));
                }
            }
        }
    }
    Ok(())
}
