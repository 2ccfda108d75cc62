//! Interface between the transport and a device.

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
    /// Shared folder (file system device).
    Fs = 26,
    /// Persistent memory.
    Pmem = 27,
}

/// Reason why a device stopped serving its queues. The device requests a reset; the guest harms only itself.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The driver violated the specification (a loop, an address outside memory, a short header).
    #[error("the guest's driver broke the protocol: {0}")]
    Protocol(String),
    /// An operation of the host failed.
    #[error("{what}")]
    Host {
        /// The failed operation.
        what: &'static str,
        /// Reason of the failure.
        #[source]
        source: std::io::Error,
    },
}

impl DeviceError {
    /// Returns the error of a host that failed at `what`, for `map_err`.
    pub fn host(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Host { what, source }
    }
}

/// Notifications from a device to its guest. The transport implements them by MSI-X over irqfd. Any thread
/// may call them.
pub trait Interrupt: Send + Sync {
    /// Notifies the driver of used buffers in queue `index`. The caller has checked `needs_notification`.
    fn signal_queue(&self, index: u16);
    /// Notifies the driver that the configuration space changed.
    fn signal_config(&self);
    /// Sets DEVICE_NEEDS_RESET and notifies the driver; `error` is logged in the VM's log.
    fn needs_reset(&self, error: &DeviceError);
}

/// One queue that the driver has enabled.
pub struct ActiveQueue {
    /// The queue's number on its device.
    pub index: u16,
    /// The queue as the driver configured it; already checked by `is_valid`.
    pub queue: Queue,
    /// KVM writes it (ioeventfd) when the driver notifies the queue.
    pub notify: EventFd,
}

/// Arguments of a device's activation, when the driver sets DRIVER_OK.
pub struct Activation {
    /// The guest's memory.
    pub memory: GuestRam,
    /// Features that driver and device have negotiated.
    pub features: u64,
    /// The enabled queues in order of their index; a driver need not enable all.
    pub queues: Vec<ActiveQueue>,
    /// Notifications to the guest.
    pub interrupt: Arc<dyn Interrupt>,
    /// Whether the VM resumes from a saved state, in which the driver was set up already.
    pub resumed: bool,
}

/// Features of every device, which the queues' implementation supports.
pub const RING_FEATURES: u64 = 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// Reads a configuration space from byte `offset` on; bytes past its end are zero.
pub fn read_space(space: &[u8], offset: u64, data: &mut [u8]) {
    let start = usize::try_from(offset).unwrap_or(usize::MAX).min(space.len());
    let known = &space[start..];
    let length = known.len().min(data.len());
    data[..length].copy_from_slice(&known[..length]);
    data[length..].fill(0);
}

/// Front end of a device, which the transport calls on a vCPU's thread.
///
/// The transport adds `VIRTIO_F_VERSION_1` itself and checks that the driver accepts offered features only.
/// It calls `activate` and `reset` alternately.
pub trait VirtioDevice: Send {
    /// Returns the device's type.
    fn id(&self) -> VirtioId;
    /// Returns the offered features, without `VIRTIO_F_VERSION_1`.
    fn features(&self) -> u64;
    /// Returns the largest size of each queue, each a power of two.
    fn queue_sizes(&self) -> &[u16];
    /// Reads the device's configuration space; bytes past its end read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// Writes the device's configuration space; writes to read-only bytes are ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    /// Passes the queues to the device's thread.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;
    /// Takes the queues back. After the return the device's thread does not access guest memory.
    fn reset(&mut self);
    /// Returns the state with which the device can continue in another VM, beyond the transport's state and
    /// guest memory.
    fn save(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
    /// Restores the state of [`VirtioDevice::save`] before the activation. Unknown data are ignored.
    fn resume(&mut self, _state: &serde_json::Value) {}
    /// Returns the device's counters for the VM's status, as a JSON object.
    fn status(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_past_the_end_of_a_configuration_space_are_zero() {
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
