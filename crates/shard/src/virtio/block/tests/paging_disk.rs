//! Tests of the virtual paging disk, on paged memory with a real paging file.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use vm_memory::{Bytes, GuestAddress};

use super::driver::*;
use crate::launch::Ending;
use crate::paging::PagingDiskIo;
use crate::paging::rig::{LIMIT_PAGES, Rig, rig_with_disk};
use crate::virtio::block::Block;
use crate::virtio::block::paging_disk::PagingDiskHandler;
use crate::virtio::block::request::Disk;
use crate::virtio::test_driver::{DriverQueue, RecordedSignals};
use crate::virtio::worker::{Event, Handler, Sources};
use crate::virtio::{Activation, VirtioDevice};

mod read_back;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const PAGE: u64 = 4096;
const SECTORS: u64 = 8;
const DISK_PAGES: u32 = 3 * LIMIT_PAGES;
/// First page beyond those of rings, headers and small data.
const FREE: u32 = 1024;
/// A page that no test has filled.
const UNUSED: u32 = FREE + 2 * LIMIT_PAGES + 100;

/// Paged memory of 64 MiB with a disk of 48 MiB, and its driver.
fn driver() -> (Rig, Driver) {
    driver_of(DISK_PAGES)
}

/// The same with a disk of `pages` pages.
fn driver_of(pages: u32) -> (Rig, Driver) {
    let rig = rig_with_disk(64, 24_000 + pages, pages);
    let io = PagingDiskIo::new(&rig.paging).unwrap();
    let block = Block::paging(&rig.threads, "paging", io).unwrap();
    let mut driver = Driver::of(rig.memory.clone(), block);
    driver.activate(1, 0);
    (rig, driver)
}

fn range(at: u64, sectors: u32) -> Vec<u8> {
    [&at.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat()
}

impl Driver {
    /// Writes pages of the guest to the disk, or reads them, in one request.
    fn swap(&mut self, kind: u32, at: u32, page: u32, count: u32) -> u8 {
        let address = u64::from(page) * PAGE;
        let bytes = count * PAGE as u32;
        let buffer = match kind {
            VIRTIO_BLK_T_IN => writable(address, bytes),
            _ => readable(address, bytes),
        };
        self.request(kind, u64::from(at) * SECTORS, &[buffer])
    }

    fn swap_out(&mut self, at: u32, page: u32, count: u32) {
        assert_eq!(self.swap(VIRTIO_BLK_T_OUT, at, page, count), OK);
    }

    fn swap_in(&mut self, at: u32, page: u32, count: u32) {
        assert_eq!(self.swap(VIRTIO_BLK_T_IN, at, page, count), OK);
    }

    fn clear(&mut self, kind: u32, sector: u64, sectors: u32) -> u8 {
        self.put(DATA, &range(sector, sectors));
        self.request(kind, 0, &[readable(DATA, 16)])
    }
}

/// Brings the device's rings back into memory.
fn warm_up(driver: &mut Driver) {
    assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, &[]), OK);
}

#[test]
fn pages_that_are_paged_out_move_to_the_disk_and_back_without_io() {
    let (rig, mut driver) = driver();
    rig.fill_from(FREE);
    warm_up(&mut driver);
    rig.settle();
    let io = || {
        [
            "/written_bytes",
            "/read_bytes",
            "/faults/with_io",
            "/paged_out_bytes",
        ]
        .map(|path| rig.number(path))
    };
    let before = io();
    let free = rig.number("/file/free_bytes");
    driver.swap_out(0, FREE, 300);
    assert_eq!(
        rig.number("/disk/writes/without_io"),
        300,
        "{}",
        rig.paging.status()
    );
    assert_eq!(rig.number("/disk/used_bytes"), 300 * PAGE);
    assert_eq!((io(), rig.number("/file/free_bytes")), (before, free));
    // The guest's pages take other slots from now on, and the disk keeps its content.
    (0..300).for_each(|page| rig.write(FREE + page, 7));
    rig.settle();
    warm_up(&mut driver);
    rig.settle();
    let before = io();
    driver.swap_in(0, UNUSED, 300);
    assert_eq!(rig.number("/disk/reads/without_io"), 300);
    // Of each part of 64 pages, as many are read at once as the window has room for.
    let read = rig.number("/disk/read_at_once_bytes");
    assert!(read <= 5 * 8 * PAGE, "{}", rig.paging.status());
    let paged_out = before[3] + 300 * PAGE - read;
    assert_eq!(io(), [before[0], before[1] + read, before[2], paged_out]);
    for page in 0..300 {
        rig.check(UNUSED + page, 1000 + u64::from(FREE + page));
        rig.check(FREE + page, 7);
    }
    assert!(rig.end.cause().is_none());
}

#[test]
fn pages_in_memory_are_written_once_and_pages_of_zeroes_never() {
    let (rig, mut driver) = driver();
    (0..100).for_each(|page| rig.write(FREE + page, u64::from(page) + 1));
    driver.swap_out(10, FREE, 100);
    assert_eq!(rig.number("/disk/writes/with_io"), 100);
    assert_eq!(rig.number("/written_bytes"), 100 * PAGE);
    (0..100).for_each(|page| rig.write(FREE + page, 0));
    driver.swap_in(10, FREE, 100);
    (0..100).for_each(|page| rig.check(FREE + page, u64::from(page) + 1));
    // Pages that were never used, then the same as pages of the disk: no memory is touched.
    let blocks = rig.memfd.metadata().unwrap().blocks();
    driver.swap_out(10, UNUSED, 50);
    driver.swap_out(5000, UNUSED, 50);
    driver.swap_in(5000, UNUSED, 50);
    assert_eq!(rig.number("/disk/writes/zero"), 100);
    assert_eq!(rig.number("/disk/reads/zero"), 50);
    assert_eq!(rig.memfd.metadata().unwrap().blocks(), blocks);
    assert_eq!(rig.number("/disk/used_bytes"), 50 * PAGE);
    // A read of zeroes takes a page out of memory.
    driver.swap_in(5000, FREE, 100);
    assert!(rig.memfd.metadata().unwrap().blocks() <= blocks - 100 * 8);
    (0..100).for_each(|page| assert_eq!(rig.first_word(FREE + page), 0));
}

#[test]
fn discarded_and_zeroed_ranges_free_their_slots() {
    let (rig, mut driver) = driver();
    (0..64).for_each(|page| rig.write(FREE + page, u64::from(page) + 1));
    driver.swap_out(0, FREE, 64);
    let free = rig.number("/file/free_bytes");
    assert_eq!(driver.clear(VIRTIO_BLK_T_DISCARD, 0, 32 * 8), OK);
    assert_eq!(rig.number("/file/free_bytes"), free + 32 * PAGE);
    // Parts of pages: discards leave them, zeroes are written.
    assert_eq!(driver.clear(VIRTIO_BLK_T_DISCARD, 32 * 8 + 1, 8), OK);
    assert_eq!(driver.clear(VIRTIO_BLK_T_WRITE_ZEROES, 34 * 8 + 1, 8), OK);
    driver.swap_in(0, UNUSED, 64);
    (0..32).for_each(|page| assert_eq!(rig.first_word(UNUSED + page), 0));
    rig.check(UNUSED + 32, 33);
    rig.check(UNUSED + 33, 34);
    let at = u64::from(UNUSED + 34) * PAGE;
    let end: u64 = rig.memory.read_obj(GuestAddress(at + PAGE - 8)).unwrap();
    assert_eq!((rig.first_word(UNUSED + 34), end), (35, 0));
    assert_eq!(rig.first_word(UNUSED + 35), 0);
    rig.check(UNUSED + 36, 37);
    // The whole disk in one range.
    assert_eq!(driver.clear(VIRTIO_BLK_T_WRITE_ZEROES, 0, DISK_PAGES * 8), OK);
    assert_eq!(rig.number("/disk/used_bytes"), 0);
    for outside in [DISK_PAGES * 8, DISK_PAGES * 8 - 7] {
        assert_eq!(driver.clear(VIRTIO_BLK_T_DISCARD, outside.into(), 8), IOERR);
    }
    assert_eq!(driver.swap(VIRTIO_BLK_T_IN, DISK_PAGES - 1, UNUSED, 2), IOERR);
}

/// Numbers without a pattern.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Sectors and guest memory at random, whole pages and parts, while pages leave memory: both contents are
/// those of a model.
#[test]
fn disk_and_memory_agree_with_a_model_while_pages_leave_memory() {
    const BYTES: usize = 64 * 4096;
    let (rig, mut driver) = driver();
    let base = u64::from(UNUSED) * PAGE;
    let (mut disk, mut memory) = (vec![0_u8; BYTES], vec![0_u8; BYTES]);
    let mut random = Random(2026);
    for round in 0..600 {
        let is_whole = random.below(3) > 0;
        let step = if is_whole { PAGE } else { 512 };
        let length = (1 + random.below(12)) * step;
        let at = random.below((BYTES as u64 - length) / step + 1) * step;
        // Memory at any byte, or the same page more than once.
        let grain = if is_whole { PAGE } else { 8 };
        let mut buffers = Vec::new();
        let mut left = length;
        while left > 0 {
            let bytes = left.min((1 + random.below(4)) * step);
            let from = random.below((BYTES as u64 - bytes) / grain + 1) * grain;
            buffers.push((from, bytes));
            left -= bytes;
        }
        let chain = |is_read: bool| -> Vec<Buffer> {
            let buffer = |(from, bytes): &(u64, u64)| Buffer {
                address: base + from,
                length: *bytes as u32,
                writable: is_read,
            };
            buffers.iter().map(buffer).collect()
        };
        let mut offset = at as usize;
        match random.below(9) {
            0..3 => {
                assert_eq!(driver.request(VIRTIO_BLK_T_OUT, at / 512, &chain(false)), OK);
                for (from, bytes) in &buffers {
                    let (from, bytes) = (*from as usize, *bytes as usize);
                    disk[offset..offset + bytes].copy_from_slice(&memory[from..from + bytes]);
                    offset += bytes;
                }
            }
            3..6 => {
                assert_eq!(driver.request(VIRTIO_BLK_T_IN, at / 512, &chain(true)), OK);
                assert_eq!(driver.last_filled(0), length as u32 + 1);
                for (from, bytes) in &buffers {
                    let (from, bytes) = (*from as usize, *bytes as usize);
                    memory[from..from + bytes].copy_from_slice(&disk[offset..offset + bytes]);
                    offset += bytes;
                }
            }
            6 => {
                let kind = VIRTIO_BLK_T_WRITE_ZEROES;
                assert_eq!(driver.clear(kind, at / 512, (length / 512) as u32), OK);
                disk[offset..offset + length as usize].fill(0);
            }
            7 => {
                let bytes: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
                driver.put(base + at, &bytes);
                memory[offset..offset + bytes.len()].copy_from_slice(&bytes);
            }
            _ => rig.fill_from(FREE),
        }
        if round % 20 == 0 {
            assert!(
                driver.bytes(base, BYTES) == memory,
                "memory differs in round {round}"
            );
        }
    }
    assert!(driver.bytes(base, BYTES) == memory, "memory differs");
    let count = (BYTES as u64 / PAGE) as u32;
    driver.swap_in(0, UNUSED, count);
    assert!(driver.bytes(base, BYTES) == disk, "the disk differs");
    for counter in [
        "writes/without_io",
        "writes/with_io",
        "reads/without_io",
        "reads/with_io",
    ] {
        assert!(
            rig.number(&format!("/disk/{counter}")) > 0,
            "{counter}: {}",
            rig.paging.status()
        );
    }
    // Every slot is freed with its last reference.
    assert_eq!(driver.clear(VIRTIO_BLK_T_DISCARD, 0, DISK_PAGES * 8), OK);
    rig.paging.release(0..UNUSED + count).unwrap();
    assert_eq!(rig.number("/file/free_bytes"), rig.number("/file/bytes"));
}

#[test]
fn request_on_its_own_ring_harms_the_guest_alone() {
    let (rig, mut driver) = driver();
    rig.write(UNUSED, 9);
    driver.swap_out(0, UNUSED, 1);
    // The descriptors, the available ring, the used ring, the header, and the page of the status.
    for page in [rings(0), rings(0) + 0x4000, rings(0) + 0x8000, HEADER, STATUS] {
        for at in [0, 100] {
            driver.header(HEADER, VIRTIO_BLK_T_IN, at * SECTORS);
            let buffers = [
                readable(HEADER, 16),
                writable(page & !(PAGE - 1), PAGE as u32),
                writable(STATUS, 1),
            ];
            driver.offer(0, &buffers);
            driver.notify(0);
            // The device has served the request, or requests a reset; then it serves the next driver.
            thread::sleep(Duration::from_millis(20));
            driver.block.reset();
            driver.activate(1, 0);
            warm_up(&mut driver);
        }
    }
    driver.swap_in(0, UNUSED + 1, 1);
    rig.check(UNUSED + 1, 9);
    assert!(rig.end.cause().is_none());
}

/// A request may name one page 250 times.
#[test]
fn page_with_as_many_references_as_are_counted_is_still_read() {
    const PAGES: u32 = 66_000;
    let (rig, mut driver) = driver_of(PAGES);
    rig.fill_from(FREE);
    warm_up(&mut driver);
    let page = readable(u64::from(FREE) * PAGE, PAGE as u32);
    for at in (0..PAGES).step_by(250) {
        let status = driver.request(VIRTIO_BLK_T_OUT, u64::from(at) * SECTORS, &[page; 250]);
        assert_eq!(status, OK);
    }
    assert_eq!(rig.number("/disk/writes/without_io"), 65_470);
    assert_eq!(rig.number("/disk/writes/with_io"), u64::from(PAGES) - 65_470);
    let value = 1000 + u64::from(FREE);
    rig.check(FREE, value);
    // The page's own reference is gone, so that one page of the guest can have it.
    driver.swap_in(0, UNUSED, 2);
    driver.swap_in(PAGES - 1, UNUSED + 2, 1);
    (0..3).for_each(|page| rig.check(UNUSED + page, value));
    assert!(rig.end.cause().is_none());
    assert_eq!(driver.clear(VIRTIO_BLK_T_DISCARD, 0, PAGES * 8), OK);
    rig.paging.release(0..UNUSED + 3).unwrap();
    assert_eq!(rig.number("/file/free_bytes"), rig.number("/file/bytes"));
}

#[test]
fn random_descriptors_harm_the_guest_alone() {
    let (rig, mut driver) = driver();
    rig.fill_from(FREE);
    let mut random = Random(7);
    for _ in 0..200 {
        let sector = random.below(u64::from(DISK_PAGES) * SECTORS + 9);
        driver.header(HEADER, random.below(14) as u32, sector);
        for index in 0..16 {
            let (address, length) = match random.below(7) {
                0 => (HEADER, 16),
                1 => (rings(0) + random.below(0x9000), random.below(2000)),
                2 => (random.below(u64::MAX), random.below(1 << 32)),
                3 => (random.below(64 << 20), random.below(2000)),
                _ => {
                    let page = u64::from(FREE) + random.below(10_000);
                    (page * PAGE, random.below(500) * PAGE)
                }
            };
            let flags = random.below(4) as u16;
            let buffer = readable(address, length as u32);
            driver.descriptor(rings(0), index, buffer, flags, random.below(17) as u16);
        }
        driver.descriptor(rings(0), 0, readable(HEADER, 16), 1, 1);
        for _ in 0..8 {
            driver.avail(0, driver.available(0), random.below(4) as u16);
        }
        driver.notify(0);
        thread::sleep(Duration::from_millis(2));
        driver.block.reset();
        driver.activate(1, 0);
        warm_up(&mut driver);
    }
    rig.write(UNUSED, 9);
    driver.swap_out(0, UNUSED, 1);
    driver.swap_in(0, UNUSED + 1, 1);
    rig.check(UNUSED + 1, 9);
    assert!(rig.end.cause().is_none());
}

/// Threads in the role of vCPUs, each with pages of its own, and one that swaps its pages.
#[test]
fn no_page_is_lost_while_others_are_swapped() {
    let (rig, mut driver) = driver();
    let (rig, is_over) = (Arc::new(rig), Arc::new(AtomicBool::new(false)));
    let page_of = |own: u32, number: u32| FREE + 3 * number + own;
    let threads: Vec<_> = (0..2)
        .map(|own| {
            let rig = rig.clone();
            thread::spawn(move || {
                let mut random = Random(own.into());
                let mut written = BTreeMap::new();
                for round in 0..20_000 {
                    let span = if round % 3 == 0 { 3000 } else { 500 };
                    let page = page_of(own, random.below(span) as u32);
                    match written.get(&page) {
                        Some(value) => rig.check(page, *value),
                        None => assert_eq!(rig.first_word(page), 0, "page {page}"),
                    }
                    rig.write(page, round);
                    written.insert(page, round);
                }
            })
        })
        .collect();
    let over = is_over.clone();
    let waiter = thread::spawn(move || {
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        over.store(true, Ordering::SeqCst);
    });
    // Contents of pages and of the disk, by their numbers.
    let (mut pages, mut disk) = (BTreeMap::new(), BTreeMap::new());
    let mut random = Random(3);
    let mut round = 0;
    while !is_over.load(Ordering::SeqCst) || round < 200 {
        round += 1;
        let (number, at) = (random.below(3000) as u32, random.below(500) as u32);
        let page = page_of(2, number);
        let content = pages.get(&number).copied().unwrap_or(0);
        match random.below(3) {
            0 => {
                driver.swap_out(at, page, 1);
                disk.insert(at, content);
            }
            1 => {
                driver.swap_in(at, page, 1);
                pages.insert(number, disk.get(&at).copied().unwrap_or(0));
            }
            _ => {
                rig.write(page, round);
                pages.insert(number, round);
            }
        }
    }
    waiter.join().unwrap();
    for (number, content) in pages {
        let page = page_of(2, number);
        match content {
            0 => assert_eq!(rig.first_word(page), 0, "page {page}"),
            _ => rig.check(page, content),
        }
    }
    assert!(rig.end.cause().is_none());
}

#[test]
fn broken_chain_requests_a_reset() {
    let (_rig, mut driver) = driver();
    driver.header(HEADER, VIRTIO_BLK_T_IN, 0);
    driver.offer(0, &[readable(HEADER, 16), readable(DATA, 512)]);
    driver.notify(0);
    assert!(!driver.wait(0));
    driver.block.reset();
    driver.activate(1, 0);
    warm_up(&mut driver);
    assert_eq!(
        driver.request(VIRTIO_BLK_T_IN, 0, &[writable(u64::MAX - 511, 512)]),
        IOERR
    );
    assert_eq!(driver.request(77, 0, &[]), 2);
    let status = driver.request(VIRTIO_BLK_T_GET_ID, 0, &[writable(DATA, 20)]);
    assert_eq!((status, driver.bytes(DATA, 7)), (OK, b"paging\0".to_vec()));
    let mut config = [0; 28];
    driver.block.read_config(0, &mut config);
    assert_eq!(config[..8], (u64::from(DISK_PAGES) * SECTORS).to_le_bytes());
    assert_eq!(
        config[20..25],
        [0, 2, 0, 0, 3],
        "blocks of 512 bytes, of which 8 are a physical one"
    );
}

#[test]
fn request_waits_while_an_instant_without_devices_is_waited_for() {
    let (rig, mut driver) = driver();
    (0..64).for_each(|page| rig.write(FREE + page, 5));
    rig.quiescer.io_started();
    let quiescer = rig.quiescer.clone();
    let gap = thread::spawn(move || quiescer.io_gap(Duration::from_secs(60)));
    while !rig.quiescer.draining() {
        thread::yield_now();
    }
    driver.header(HEADER, VIRTIO_BLK_T_OUT, 0);
    driver.offer(
        0,
        &[
            readable(HEADER, 16),
            readable(u64::from(FREE) * PAGE, 64 * 4096),
            writable(STATUS, 1),
        ],
    );
    driver.notify(0);
    thread::sleep(Duration::from_millis(50));
    assert_eq!(
        rig.number("/disk/used_bytes"),
        0,
        "a device starts nothing meanwhile"
    );
    rig.quiescer.io_done();
    assert!(gap.join().unwrap());
    assert!(driver.wait(0));
    assert_eq!(rig.number("/disk/used_bytes"), 64 * PAGE);
}

#[test]
fn large_request_is_done_in_turns() {
    let rig = rig_with_disk(64, 40_000, DISK_PAGES);
    let disk = Disk {
        sectors: u64::from(DISK_PAGES) * SECTORS,
        read_only: false,
        id: [0; 20],
    };
    let io = PagingDiskIo::new(&rig.paging).unwrap();
    let mut handler = PagingDiskHandler::new(io, disk, Arc::default(), rig.quiescer.clone());
    let mut queue = DriverQueue::new(&rig.memory, 16);
    rig.memory
        .write_obj(VIRTIO_BLK_T_OUT, GuestAddress(HEADER))
        .unwrap();
    rig.memory.write_obj(0_u64, GuestAddress(HEADER + 8)).unwrap();
    queue.descriptor(0, HEADER, 16, 1, 1);
    queue.descriptor(1, u64::from(FREE) * PAGE, 32 << 20, 1, 2);
    queue.descriptor(2, STATUS, 1, 2, 0);
    queue.offer(0);
    let activation = Activation {
        memory: rig.memory.clone(),
        features: 0,
        queues: vec![queue.active()],
        interrupt: Arc::new(RecordedSignals::default()),
        resumed: false,
    };
    let sources = Sources::new().unwrap();
    handler.start(activation, &sources).unwrap();
    let used = || {
        rig.memory
            .read_obj::<u16>(GuestAddress(16 * 0x10000 + 0x4002))
            .unwrap()
    };
    assert_eq!((rig.number("/disk/writes/zero"), used()), (4096, 0));
    handler.handle(Event::Queue(0), &sources).unwrap();
    assert_eq!((rig.number("/disk/writes/zero"), used()), (8192, 1));
}

#[test]
fn refused_write_and_damaged_slot_fail_the_request_alone() {
    let (rig, mut driver) = driver();
    (0..10).for_each(|page| rig.write(FREE + page, u64::from(page) + 1));
    driver.swap_out(0, FREE, 10);
    (0..10).for_each(|page| rig.write(FREE + page, 100));
    rig.faults.write_error.store(true, Ordering::SeqCst);
    let free = rig.number("/file/free_bytes");
    assert_eq!(driver.swap(VIRTIO_BLK_T_OUT, 0, FREE, 10), IOERR);
    assert_eq!(rig.number("/file/free_bytes"), free, "no slot leaks");
    rig.faults.write_error.store(false, Ordering::SeqCst);
    driver.swap_in(0, UNUSED, 10);
    (0..10).for_each(|page| rig.check(UNUSED + page, u64::from(page) + 1));
    // Part of a page needs the bytes of its slot.
    let length = rig.file.metadata().unwrap().len();
    for at in (0..length).step_by(4096) {
        rig.file.write_all_at(&[0x5a; 8], at + 60).unwrap();
    }
    assert_eq!(driver.request(VIRTIO_BLK_T_IN, 1, &[writable(DATA, 512)]), IOERR);
    assert_eq!(driver.request(VIRTIO_BLK_T_OUT, 1, &[readable(DATA, 512)]), IOERR);
    assert!(rig.end.cause().is_none(), "the VM goes on");
    driver.swap_out(0, FREE, 10);
    driver.swap_in(0, UNUSED, 10);
    (0..10).for_each(|page| rig.check(UNUSED + page, 100));
}

/// Without the end of the VM the guest could read the former content of a page that it has replaced.
#[test]
fn page_that_cannot_be_removed_from_memory_ends_the_vm() {
    let (rig, mut driver) = driver();
    rig.write(FREE, 5);
    nix::fcntl::fcntl(
        &rig.memfd,
        nix::fcntl::FcntlArg::F_ADD_SEALS(nix::fcntl::SealFlag::F_SEAL_FUTURE_WRITE),
    )
    .unwrap();
    assert_eq!(driver.swap(VIRTIO_BLK_T_IN, 0, FREE, 1), IOERR);
    let cause = rig.end.cause();
    let Some(Ending::ShardFailed { detail }) = &cause else {
        panic!("{cause:?}");
    };
    assert!(
        detail.starts_with("a page cannot be removed from the VM's memory: "),
        "{detail}"
    );
    assert!(!rig.paging.is_whole());
}
