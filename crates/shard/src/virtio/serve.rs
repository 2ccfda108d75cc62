//! Takes chains off a queue, a bounded number at a time, so that a guest that never stops cannot keep its
//! device's thread from a reset.

use std::sync::Arc;

use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use super::device::{ActiveQueue, DeviceError, Interrupt};
use crate::memory::GuestRam;

/// A chain of the guest's descriptors.
pub type Chain<'a> = DescriptorChain<&'a GuestMemoryMmap<()>>;

/// Serves what the driver has made available, one queue's worth at most; the rest by another event.
/// `each` returns the bytes it wrote to the chain.
pub fn serve(
    active: &mut ActiveQueue,
    memory: &GuestRam,
    interrupt: &Arc<dyn Interrupt>,
    mut each: impl FnMut(Chain<'_>) -> Result<u32, DeviceError>,
) -> Result<(), DeviceError> {
    let memory: &GuestMemoryMmap<()> = memory;
    let mut used = false;
    for _ in 0..active.queue.size() {
        let Some(chain) = take(active, memory)? else { break };
        let head = chain.head_index();
        let written = each(chain)?;
        active.queue.add_used(memory, head, written).map_err(broken)?;
        used = true;
    }
    if used {
        signal(active, memory, &**interrupt)?;
    }
    listen(active, memory)
}

/// The next chain, if there is one.
pub fn take<'a>(
    active: &mut ActiveQueue,
    memory: &'a GuestMemoryMmap<()>,
) -> Result<Option<Chain<'a>>, DeviceError> {
    Ok(active.queue.iter(memory).map_err(broken)?.next())
}

/// Tells the driver of used buffers if it wants to know.
pub fn signal(
    active: &mut ActiveQueue,
    memory: &GuestMemoryMmap<()>,
    interrupt: &dyn Interrupt,
) -> Result<(), DeviceError> {
    if active.queue.needs_notification(memory).map_err(broken)? {
        interrupt.signal_queue(active.index);
    }
    Ok(())
}

/// Has the driver notify of what it makes available from now on; what it has by now is looked at again.
pub fn listen(active: &mut ActiveQueue, memory: &GuestMemoryMmap<()>) -> Result<(), DeviceError> {
    if active.queue.enable_notification(memory).map_err(broken)? {
        look_again(active);
    }
    Ok(())
}

/// Comes back to a queue after what else waits for its thread.
pub fn look_again(active: &ActiveQueue) {
    // A full counter does as well.
    let _ = active.notify.write(1);
}

/// What the queue's own checks found.
pub fn broken(error: impl std::fmt::Display) -> DeviceError {
    DeviceError::Protocol(error.to_string())
}
