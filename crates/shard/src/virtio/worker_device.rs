//! Front end of a device that one thread serves, with no features but those of its queues.

use super::device::RING_FEATURES;
use super::worker::Worker;
use super::{Activation, DeviceError, VirtioDevice, VirtioId};

/// Such a device. Its thread gets all queues.
pub trait WorkerDevice: Send {
    /// The device's type.
    const ID: VirtioId;
    /// Returns the largest size of each queue, each a power of two.
    fn queue_sizes(&self) -> &[u16];
    /// Returns the device's thread.
    fn worker(&self) -> &Worker;
    /// Reads the device's configuration space. By default there is none.
    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }
    /// Returns the device's counters for the VM's status, as a JSON object.
    fn status(&self) -> serde_json::Value;
}

impl<D: WorkerDevice> VirtioDevice for D {
    fn id(&self) -> VirtioId {
        D::ID
    }

    fn features(&self) -> u64 {
        RING_FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        WorkerDevice::queue_sizes(self)
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        WorkerDevice::read_config(self, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.worker().activate(activation)
    }

    fn reset(&mut self) {
        self.worker().reset();
    }

    fn status(&self) -> serde_json::Value {
        WorkerDevice::status(self)
    }
}
