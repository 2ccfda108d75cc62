//! What the transport and a device know of each other.

use std::sync::Arc;

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use crate::memory::GuestRam;

/// Virtio device ids (Virtio 1.2, section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum VirtioId {
    /// Network card.
    Net = 1,
    /// Block device.
    Block = 2,
    /// Entropy source.
    Rng = 4,
    /// Memory balloon.
    Balloon = 5,
    /// Socket device.
    Vsock = 19,
    /// Persistent memory.
    Pmem = 27,
}

/// Why a device stopped serving its queues. The device asks for a reset; the guest harms only itself.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The driver wrote something the specification forbids (a loop, a wild address, a short header).
    #[error("the guest's driver broke the protocol: {0}")]
    Protocol(String),
    /// The host could not do what the device needs.
    #[error("{what}")]
    Host {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
}

impl DeviceError {
    /// For `map_err`: the host failed at `what`.
    pub fn host(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Host { what, source }
    }
}

/// How a device reaches its guest. Implemented by the transport with MSI-X over irqfd; called from any
/// thread.
pub trait Interrupt: Send + Sync {
    /// Tells the driver that queue `index` has used buffers. The caller has checked `needs_notification`.
    fn signal_queue(&self, index: u16);
    /// Tells the driver that the configuration space changed.
    fn signal_config(&self);
    /// Sets DEVICE_NEEDS_RESET and tells the driver; `error` goes to the log of the VM.
    fn needs_reset(&self, error: &DeviceError);
}

/// One queue the driver has enabled.
pub struct ActiveQueue {
    /// The queue's number on its device.
    pub index: u16,
    /// The queue as the driver configured it; already checked by `is_valid`.
    pub queue: Queue,
    /// Written by KVM (ioeventfd) when the driver notifies the queue.
    pub notify: EventFd,
}

/// What a device gets when the driver sets DRIVER_OK.
pub struct Activation {
    /// The guest's memory.
    pub memory: GuestRam,
    /// The features both sides agreed on.
    pub features: u64,
    /// The enabled queues in order of their index; a driver need not enable all.
    pub queues: Vec<ActiveQueue>,
    /// How to reach the guest.
    pub interrupt: Arc<dyn Interrupt>,
    /// The VM goes on from a saved state, in which the driver was set up already.
    pub resumed: bool,
}

/// What every device offers: the queues' implementation has it.
pub const RING_FEATURES: u64 = 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// Reads a configuration space from byte `offset` on; past its end are zeroes.
pub fn read_space(space: &[u8], offset: u64, data: &mut [u8]) {
    let start = usize::try_from(offset).unwrap_or(usize::MAX).min(space.len());
    let known = &space[start..];
    let length = known.len().min(data.len());
    data[..length].copy_from_slice(&known[..length]);
    data[length..].fill(0);
}

/// The front of a device: what the transport asks on a vCPU's thread.
///
/// The transport adds `VIRTIO_F_VERSION_1` itself, checks that the driver accepts only what was offered, and
/// calls `activate` and `reset` in turn, never twice the same.
pub trait VirtioDevice: Send {
    /// Which device this is.
    fn id(&self) -> VirtioId;
    /// The features offered, without `VIRTIO_F_VERSION_1`.
    fn features(&self) -> u64;
    /// The largest size of each queue, each a power of two.
    fn queue_sizes(&self) -> &[u16];
    /// Reads the device's configuration space; bytes past its end read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// Writes the device's configuration space; what is not writable is ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    /// Hands the queues to the device's thread.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;
    /// Takes the queues back; when this returns the device's thread touches guest memory no more.
    fn reset(&mut self);
    /// What the device must know to go on in another VM, beyond what the transport keeps and guest memory
    /// holds.
    fn save(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
    /// Takes over what [`VirtioDevice::save`] gave, before it is activated. What it can't understand it
    /// ignores.
    fn resume(&mut self, _state: &serde_json::Value) {}
    /// The device's counters for the VM's status, as a JSON object.
    fn status(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_space_is_read_as_far_as_it_goes() {
        let space = [1, 2, 3, 4];
        let read = |offset| {
            let mut data = [0xFF; 3];
            read_space(&space, offset, &mut data);
            data
        };
        assert_eq!(read(0), [1, 2, 3]);
        assert_eq!(read(1), [2, 3, 4]);
        assert_eq!(read(3), [4, 0, 0]);
        assert_eq!(read(4), [0; 3]);
        assert_eq!(read(u64::MAX), [0; 3]);
    }

    #[test]
    fn every_ring_may_use_indirect_tables_and_event_indices() {
        assert_eq!(RING_FEATURES, 1 << 28 | 1 << 29);
    }
}
