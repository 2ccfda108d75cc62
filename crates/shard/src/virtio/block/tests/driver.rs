//! A small driver: writes descriptor chains to guest memory, notifies, waits for the replies.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use diskstore::disk::{Format, Store, assemble};
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_S_OK};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::launch::OnFull;
use crate::memory::GuestRam;
use crate::sandbox::Threads;
use crate::virtio::block::Block;
use crate::virtio::{Activation, ActiveQueue, DeviceError, Interrupt, VirtioDevice};

pub const QUEUE_SIZE: u16 = 256;
/// Address of the rings of queue 0; those of further queues follow at intervals of 64 KiB.
const RINGS: u64 = 0x10_0000;
pub const HEADER: u64 = 0x1000;
pub const STATUS: u64 = 0x2000;
pub const DATA: u64 = 0x20_0000;
/// A second region of memory, like that above the hole below 4 GiB.
pub const HIGH: u64 = 1 << 32;
pub const MEMORY_BYTES: usize = 8 << 20;
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub address: u64,
    pub length: u32,
    pub writable: bool,
}

pub fn readable(address: u64, length: u32) -> Buffer {
    Buffer {
        address,
        length,
        writable: false,
    }
}

pub fn writable(address: u64, length: u32) -> Buffer {
    Buffer {
        address,
        length,
        writable: true,
    }
}

#[derive(Default)]
pub struct Line {
    pub interrupts: AtomicUsize,
    pub config_changes: AtomicUsize,
    pub needs_reset: Mutex<Option<String>>,
}

impl Interrupt for Line {
    fn signal_queue(&self, _index: u16) {
        self.interrupts.fetch_add(1, Ordering::SeqCst);
    }

    fn signal_config(&self) {
        self.config_changes.fetch_add(1, Ordering::SeqCst);
    }

    fn needs_reset(&self, error: &DeviceError) {
        *self.needs_reset.lock().unwrap() = Some(error.to_string());
    }
}

pub struct Driver {
    pub memory: GuestRam,
    pub block: Block,
    pub line: Arc<Line>,
    notify: Vec<EventFd>,
    /// Next free descriptor, next available and used index of each queue.
    rings: Vec<(u16, u16, u16)>,
}

pub fn raw_store(path: &Path, read_only: bool) -> Arc<dyn Store> {
    let file = File::options().read(true).write(!read_only).open(path).unwrap();
    assemble(vec![(file, Format::Raw)], read_only).unwrap()
}

/// Creates a disk whose every sector has its number in each byte.
pub fn numbered(directory: &Path, sectors: usize) -> std::path::PathBuf {
    let path = directory.join("disk");
    let bytes: Vec<u8> = (0..sectors).flat_map(|sector| [sector as u8; 512]).collect();
    std::fs::write(&path, bytes).unwrap();
    path
}

impl Driver {
    /// Creates a driver that negotiates every offered feature but `without`.
    pub fn new(store: Arc<dyn Store>, read_only: bool, queues: u16, without: u64) -> Self {
        Self::with(store, read_only, queues, without, OnFull::Error)
    }

    /// Works as `new`, with a policy for writes that find no room.
    pub fn with(store: Arc<dyn Store>, read_only: bool, queues: u16, without: u64, on_full: OnFull) -> Self {
        let ranges = [
            (GuestAddress(0), MEMORY_BYTES),
            (GuestAddress(HIGH), MEMORY_BYTES),
        ];
        let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap());
        let block = Block::new(
            &Threads::sealed(),
            "serial-number",
            store,
            read_only,
            queues,
            None,
            on_full,
        )
        .unwrap();
        let mut driver = Self::of(memory, block);
        driver.activate(queues, without);
        driver
    }

    /// Creates the driver of a device that is not active yet.
    pub fn of(memory: GuestRam, block: Block) -> Self {
        Self {
            memory,
            block,
            line: Arc::default(),
            notify: Vec::new(),
            rings: Vec::new(),
        }
    }

    pub fn activate(&mut self, queues: u16, without: u64) {
        self.activate_as(queues, without, false);
    }

    /// Activates the device as that of a VM that resumes.
    pub fn activate_resumed(&mut self, queues: u16) {
        self.activate_as(queues, 0, true);
    }

    fn activate_as(&mut self, queues: u16, without: u64, resumed: bool) {
        let mut active = Vec::new();
        self.notify.clear();
        self.rings = vec![(0, 0, 0); queues.into()];
        *self.line.needs_reset.lock().unwrap() = None;
        for index in 0..queues {
            let rings = rings(index);
            self.memory
                .write_slice(&[0; 0x1_0000], GuestAddress(rings))
                .unwrap();
            let mut queue = Queue::new(QUEUE_SIZE).unwrap();
            queue.try_set_desc_table_address(GuestAddress(rings)).unwrap();
            queue
                .try_set_avail_ring_address(GuestAddress(rings + 0x4000))
                .unwrap();
            queue
                .try_set_used_ring_address(GuestAddress(rings + 0x8000))
                .unwrap();
            queue.set_ready(true);
            let notify = EventFd::new(EFD_NONBLOCK).unwrap();
            self.notify.push(notify.try_clone().unwrap());
            active.push(ActiveQueue { index, queue, notify });
        }
        let activation = Activation {
            memory: self.memory.clone(),
            features: self.block.features() & !without,
            queues: active,
            interrupt: self.line.clone(),
            resumed,
        };
        self.block.activate(activation).unwrap();
    }

    /// Makes a chain available, without a notification.
    pub fn offer(&mut self, queue: u16, buffers: &[Buffer]) {
        let (free, available, _) = self.rings[usize::from(queue)];
        for (place, buffer) in buffers.iter().enumerate() {
            let at = (free + place as u16) % QUEUE_SIZE;
            let last = place + 1 == buffers.len();
            let flags = u16::from(!last) | u16::from(buffer.writable) << 1;
            self.descriptor(rings(queue), at, *buffer, flags, (at + 1) % QUEUE_SIZE);
        }
        self.avail(queue, available, free);
        self.rings[usize::from(queue)].0 = (free + buffers.len() as u16) % QUEUE_SIZE;
    }

    pub fn descriptor(&self, table: u64, index: u16, buffer: Buffer, flags: u16, next: u16) {
        let at = table + u64::from(index) * 16;
        self.memory.write_obj(buffer.address, GuestAddress(at)).unwrap();
        self.memory
            .write_obj(buffer.length, GuestAddress(at + 8))
            .unwrap();
        self.memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
        self.memory.write_obj(next, GuestAddress(at + 14)).unwrap();
    }

    /// Puts descriptor `head` into the available ring.
    pub fn avail(&mut self, queue: u16, available: u16, head: u16) {
        let ring = rings(queue) + 0x4000;
        let place = ring + 4 + u64::from(available % QUEUE_SIZE) * 2;
        self.memory.write_obj(head, GuestAddress(place)).unwrap();
        self.memory
            .store(
                available.wrapping_add(1),
                GuestAddress(ring + 2),
                Ordering::SeqCst,
            )
            .unwrap();
        self.rings[usize::from(queue)].1 = available.wrapping_add(1);
    }

    pub fn notify(&self, queue: u16) {
        self.notify[usize::from(queue)].write(1).unwrap();
    }

    pub fn available(&self, queue: u16) -> u16 {
        self.rings[usize::from(queue)].1
    }

    /// Waits until every offered request is complete. Returns false if the device requests a reset.
    pub fn wait(&mut self, queue: u16) -> bool {
        let start = Instant::now();
        loop {
            let used: u16 = self
                .memory
                .load(GuestAddress(rings(queue) + 0x8002), Ordering::SeqCst)
                .unwrap();
            let ring = &mut self.rings[usize::from(queue)];
            if used == ring.1 {
                ring.2 = used;
                return true;
            }
            if self.line.needs_reset.lock().unwrap().is_some() {
                return false;
            }
            assert!(
                start.elapsed() < WAIT_TIMEOUT,
                "no answer: used {used} of {}",
                ring.1
            );
            // Like a driver: requests an interrupt for the next one.
            let event = rings(queue) + 0x4004 + u64::from(QUEUE_SIZE) * 2;
            self.memory.write_obj(used, GuestAddress(event)).unwrap();
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Returns the number of bytes that the device reports for the last reply.
    pub fn last_filled(&self, queue: u16) -> u32 {
        let last = self.rings[usize::from(queue)].2.wrapping_sub(1) % QUEUE_SIZE;
        self.memory
            .read_obj(GuestAddress(rings(queue) + 0x8004 + u64::from(last) * 8 + 4))
            .unwrap()
    }

    /// Performs one request with header and status; returns the status.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[Buffer]) -> u8 {
        self.header(HEADER, kind, sector);
        self.memory.write_obj(0xff_u8, GuestAddress(STATUS)).unwrap();
        let mut buffers = vec![readable(HEADER, 16)];
        buffers.extend(data);
        buffers.push(writable(STATUS, 1));
        self.offer(0, &buffers);
        self.notify(0);
        assert!(self.wait(0), "{:?}", self.line.needs_reset.lock().unwrap());
        self.memory.read_obj(GuestAddress(STATUS)).unwrap()
    }

    pub fn header(&self, at: u64, kind: u32, sector: u64) {
        self.memory.write_obj(u64::from(kind), GuestAddress(at)).unwrap();
        self.memory.write_obj(sector, GuestAddress(at + 8)).unwrap();
    }

    pub fn bytes(&self, at: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    /// Checks that the device still works: reads sector 5 of a disk made by [`numbered`].
    pub fn assert_works(&mut self) {
        let status = self.request(0, 5, &[writable(DATA, 512)]);
        assert_eq!(u32::from(status), VIRTIO_BLK_S_OK);
        assert_eq!(self.bytes(DATA, 512), [5; 512]);
    }
}

pub fn rings(queue: u16) -> u64 {
    RINGS + u64::from(queue) * 0x1_0000
}

pub const NO_EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
pub const NO_FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;
