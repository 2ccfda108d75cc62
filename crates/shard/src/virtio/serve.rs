//! Takes chains from a queue, a bounded number at a time, so that a guest that never stops cannot delay a
//! reset of its device.

use std::sync::Arc;

use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use super::device::{ActiveQueue, DeviceError, Interrupt};
use crate::memory::GuestRam;

/// A chain of the guest's descriptors.
pub type Chain<'a> = DescriptorChain<&'a GuestMemoryMmap<()>>;

/// Serves the available chains, at most the queue's size, and requests another event for the rest. `each`
/// returns the number of bytes that it wrote to the chain.
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

/// Returns the next chain, if there is one.
pub fn take<'a>(
    active: &mut ActiveQueue,
    memory: &'a GuestMemoryMmap<()>,
) -> Result<Option<Chain<'a>>, DeviceError> {
    Ok(active.queue.iter(memory).map_err(broken)?.next())
}

/// Notifies the driver of used buffers if it requests that.
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

/// Makes the driver notify from now on, and checks again for chains that were added meanwhile.
pub fn listen(active: &mut ActiveQueue, memory: &GuestMemoryMmap<()>) -> Result<(), DeviceError> {
    if active.queue.enable_notification(memory).map_err(broken)? {
        requeue(active);
    }
    Ok(())
}

/// Requests another event for the queue, after the other events of its thread.
pub fn requeue(active: &ActiveQueue) {
    // A full counter also wakes the thread.
    let _ = active.notify.write(1);
}

/// Returns the error of the queue's own checks.
pub fn broken(error: impl std::fmt::Display) -> DeviceError {
    DeviceError::Protocol(error.to_string())
}
