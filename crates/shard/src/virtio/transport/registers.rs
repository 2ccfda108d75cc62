//! The common configuration registers (Virtio 1.2, section 4.1.4.3): offsets, and one queue's registers.

use virtio_queue::{Queue, QueueT};

use crate::memory::GuestRam;
use crate::virtio::DeviceError;

/// Value of a vector register without a vector.
pub const NO_VECTOR: u16 = 0xFFFF;
/// Bytes of the common configuration.
pub const COMMON_BYTES: usize = 0x40;

pub const DEVICE_FEATURE_SELECT: usize = 0x00;
pub const DEVICE_FEATURE: usize = 0x04;
pub const DRIVER_FEATURE_SELECT: usize = 0x08;
pub const DRIVER_FEATURE: usize = 0x0C;
pub const CONFIG_VECTOR: usize = 0x10;
pub const QUEUES: usize = 0x12;
pub const STATUS: usize = 0x14;
pub const GENERATION: usize = 0x15;
pub const QUEUE_SELECT: usize = 0x16;
pub const QUEUE_SIZE: usize = 0x18;
pub const QUEUE_VECTOR: usize = 0x1A;
pub const QUEUE_ENABLE: usize = 0x1C;
pub const QUEUE_NOTIFY_OFFSET: usize = 0x1E;
pub const QUEUE_DESCRIPTORS: usize = 0x20;
pub const QUEUE_DRIVER: usize = 0x28;
pub const QUEUE_DEVICE: usize = 0x30;

/// One queue's registers during its set-up by the driver.
pub struct QueueRegisters {
    /// Greatest size that the device allows.
    pub size_max: u16,
    /// Number of entries.
    pub size: u16,
    /// Whether the driver has enabled the queue; from then on the registers do not change.
    pub enabled: bool,
    /// Descriptor table, available ring and used ring.
    pub addresses: [u64; 3],
}

impl QueueRegisters {
    /// Creates the registers' reset state.
    pub fn new(size_max: u16) -> Self {
        Self {
            size_max,
            size: size_max,
            enabled: false,
            addresses: [0; 3],
        }
    }

    /// Returns the queue to serve, checked against guest memory.
    pub fn queue(&self, index: u16, event_idx: bool, memory: &GuestRam) -> Result<Queue, DeviceError> {
        let bad = |what: &str| DeviceError::Protocol(format!("queue {index}: {what}"));
        let mut queue = Queue::new(self.size_max).map_err(|error| bad(&error.to_string()))?;
        let [descriptors, driver, device] = self.addresses.map(vm_memory::GuestAddress);
        queue
            .try_set_size(self.size)
            .map_err(|_| bad("its size is not a power of two"))?;
        queue
            .try_set_desc_table_address(descriptors)
            .map_err(|error| bad(&error.to_string()))?;
        queue
            .try_set_avail_ring_address(driver)
            .map_err(|error| bad(&error.to_string()))?;
        queue
            .try_set_used_ring_address(device)
            .map_err(|error| bad(&error.to_string()))?;
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        if !queue.is_valid(&**memory) {
            return Err(bad("its rings are not in memory"));
        }
        Ok(queue)
    }
}
