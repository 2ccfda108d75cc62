//! A small guest: its memory and the rings of its queues.

use std::sync::Arc;

use shard::memory::GuestRam;
use shard::virtio::{Activation, ActiveQueue, DeviceError, Interrupt};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::file::sparse_file;

/// Bytes of the guest's memory.
pub const MEMORY_BYTES: u64 = 1 << 20;
/// Descriptors of each queue: few, so that the rings wrap.
pub const QUEUE_SIZE: u16 = 16;
/// Address of the buffers; below are the rings.
pub const BUFFERS: u64 = 0x4_0000;

const QUEUE_BYTES: u64 = 0x4000;
const DESCRIPTOR_BYTES: u64 = 16;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
/// A table for indirect descriptors, of a page.
const INDIRECT: u64 = 0x3000;

/// Memory and queues, in the driver's view.
pub struct Guest {
    pub memory: GuestRam,
    notify: Vec<EventFd>,
    available: Vec<u16>,
}

/// A descriptor in memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Descriptor {
    pub address: u64,
    pub length: u32,
    pub flags: u16,
    pub next: u16,
}

struct Deaf;

impl Interrupt for Deaf {
    fn signal_queue(&self, _index: u16) {}
    fn signal_config(&self) {}
    fn needs_reset(&self, _error: &DeviceError) {}
}

impl Guest {
    /// Zeroed memory, and `queues` empty queues.
    pub fn new(queues: usize) -> Self {
        // A file, as a VM's memory is.
        let file = FileOffset::new(sparse_file(MEMORY_BYTES), 0);
        let ranges = [(GuestAddress(0), MEMORY_BYTES as usize, Some(file))];
        let memory = Arc::new(GuestMemoryMmap::from_ranges_with_files(ranges).expect("guest memory"));
        let notify = (0..queues)
            .map(|_| EventFd::new(EFD_NONBLOCK).expect("an event file"))
            .collect();
        Self {
            memory,
            notify,
            available: vec![0; queues],
        }
    }

    pub fn queues(&self) -> usize {
        self.notify.len()
    }

    /// The arguments of the device at DRIVER_OK, with the rings empty.
    pub fn activation(&mut self, features: u64) -> Activation {
        let mut queues = Vec::new();
        for index in 0..self.notify.len() {
            let base = QUEUE_BYTES * index as u64;
            self.write(base + AVAILABLE, &[0; 64]);
            self.write(base + USED, &[0; 256]);
            self.available[index] = 0;
            let mut queue = Queue::new(QUEUE_SIZE).expect("a power of two");
            queue.set_desc_table_address(Some(base as u32), Some(0));
            queue.set_avail_ring_address(Some((base + AVAILABLE) as u32), Some(0));
            queue.set_used_ring_address(Some((base + USED) as u32), Some(0));
            // As the transport does.
            queue.set_event_idx(features & (1 << 29) != 0);
            queue.set_ready(true);
            let notify = self.notify[index].try_clone().expect("a copy of an event file");
            queues.push(ActiveQueue {
                index: index as u16,
                queue,
                notify,
            });
        }
        Activation {
            memory: self.memory.clone(),
            features,
            queues,
            interrupt: Arc::new(Deaf),
            resumed: false,
        }
    }

    /// Whether the device was notified for the queue since the last call.
    pub fn take_notification(&self, queue: usize) -> bool {
        self.notify[queue].read().is_ok()
    }

    /// Writes to memory; bytes beyond its end are left out.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let _ = self.memory.write(bytes, GuestAddress(address));
    }

    /// Writes a descriptor of a queue, or of its indirect table.
    pub fn describe(&self, queue: usize, indirect: bool, index: u16, descriptor: Descriptor) {
        let base = QUEUE_BYTES * queue as u64 + if indirect { INDIRECT } else { 0 };
        let index = u64::from(index) % (if indirect { 256 } else { u64::from(QUEUE_SIZE) });
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        bytes[..8].copy_from_slice(&descriptor.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&descriptor.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&descriptor.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&descriptor.next.to_le_bytes());
        self.write(base + DESCRIPTOR_BYTES * index, &bytes);
    }

    /// Address of a queue's indirect table.
    pub fn indirect(queue: usize) -> u64 {
        QUEUE_BYTES * queue as u64 + INDIRECT
    }

    /// Makes a chain available.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let slot = u64::from(self.available[queue] % QUEUE_SIZE);
        self.write(
            QUEUE_BYTES * queue as u64 + AVAILABLE + 4 + 2 * slot,
            &head.to_le_bytes(),
        );
        let next = self.available[queue].wrapping_add(1);
        self.set_available(queue, next);
    }

    /// Writes the available index as it is.
    pub fn set_available(&mut self, queue: usize, index: u16) {
        self.available[queue] = index;
        self.write(QUEUE_BYTES * queue as u64 + AVAILABLE + 2, &index.to_le_bytes());
    }

    /// Writes the used event index, after which the driver requests an interrupt.
    pub fn set_used_event(&self, queue: usize, index: u16) {
        let at = QUEUE_BYTES * queue as u64 + AVAILABLE + 4 + 2 * u64::from(QUEUE_SIZE);
        self.write(at, &index.to_le_bytes());
    }
}
