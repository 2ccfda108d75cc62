//! A driver for tests: one queue laid out in guest memory, driven by hand.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::device::{ActiveQueue, DeviceError, Interrupt};
use crate::memory::GuestRam;

/// Descriptors of each test queue.
pub const SIZE: u16 = 64;
const LIMIT: Duration = Duration::from_secs(5);

/// Returns 8 MiB of guest memory. Queue `n` is at `n * 0x10000`, and buffers are above 1 MiB.
pub fn memory() -> GuestRam {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap())
}

/// Records the device's notifications to the guest.
#[derive(Default)]
pub struct RecordedSignals {
    pub configs: AtomicU32,
    pub failure: Mutex<Option<String>>,
}

impl Interrupt for RecordedSignals {
    fn signal_queue(&self, _index: u16) {}
    fn signal_config(&self) {
        self.configs.fetch_add(1, Ordering::SeqCst);
    }
    fn needs_reset(&self, error: &DeviceError) {
        *self.failure.lock().unwrap() = Some(error.to_string());
    }
}

impl RecordedSignals {
    /// Waits for the device to request a reset, and returns the reason.
    pub fn failure(&self) -> String {
        wait(|| self.failure.lock().unwrap().clone()).expect("the device requests a reset")
    }
}

/// Polls until `look` returns a value.
pub fn wait<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        if let Some(found) = look() {
            return Some(found);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    None
}

/// The driver's side of a queue.
pub struct DriverQueue {
    memory: GuestRam,
    base: u64,
    index: u16,
    next_descriptor: u16,
    available: u16,
    used: u16,
    notify: EventFd,
}

impl DriverQueue {
    pub fn new(memory: &GuestRam, index: u16) -> Self {
        let base = u64::from(index) * 0x10000;
        let notify = EventFd::new(EFD_NONBLOCK).unwrap();
        Self {
            memory: memory.clone(),
            base,
            index,
            next_descriptor: 0,
            available: 0,
            used: 0,
            notify,
        }
    }

    /// Returns the queue as the device receives it.
    pub fn active(&self) -> ActiveQueue {
        let mut queue = Queue::new(SIZE).unwrap();
        queue.set_desc_table_address(Some(self.base as u32), Some(0));
        queue.set_avail_ring_address(Some(self.base as u32 + 0x2000), Some(0));
        queue.set_used_ring_address(Some(self.base as u32 + 0x4000), Some(0));
        queue.set_ready(true);
        ActiveQueue {
            index: self.index,
            queue,
            notify: self.notify.try_clone().unwrap(),
        }
    }

    /// Writes a descriptor without checks.
    pub fn descriptor(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let at = GuestAddress(self.base + 16 * u64::from(index));
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.memory.write_slice(&bytes, at).unwrap();
    }

    /// Makes a head available and notifies.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.available % SIZE);
        self.memory
            .write_obj(head, GuestAddress(self.base + 0x2004 + 2 * slot))
            .unwrap();
        self.available = self.available.wrapping_add(1);
        self.memory
            .store(self.available, GuestAddress(self.base + 0x2002), Ordering::SeqCst)
            .unwrap();
        self.notify.write(1).unwrap();
    }

    /// Offers a chain of (address, length), all writable by the device or none.
    pub fn add(&mut self, buffers: &[(u64, u32)], writable: bool) -> u16 {
        let head = self.next_descriptor;
        for (position, (address, length)) in buffers.iter().enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (index + 1) % SIZE;
            let more = u16::from(position + 1 < buffers.len());
            self.descriptor(
                index,
                *address,
                *length,
                (u16::from(writable) * 2) | more,
                self.next_descriptor,
            );
        }
        self.offer(head);
        head
    }

    /// Returns the next used chain: its head and the number of bytes written to it.
    pub fn take_used(&mut self) -> Option<(u32, u32)> {
        let (memory, base, used) = (self.memory.clone(), self.base, self.used);
        let found = wait(|| {
            let index: u16 = memory
                .load(GuestAddress(base + 0x4002), Ordering::SeqCst)
                .unwrap();
            let slot = u64::from(used % SIZE);
            let read = |offset| {
                memory
                    .read_obj(GuestAddress(base + 0x4004 + 8 * slot + offset))
                    .unwrap()
            };
            (index != used).then(|| (read(0), read(4)))
        });
        self.used = self.used.wrapping_add(u16::from(found.is_some()));
        found
    }
}
