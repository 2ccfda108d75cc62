use std::io::Write;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};

use super::{Pmem, Writes, region_bytes};
use crate::memory::GuestRam;
use crate::sandbox::Threads;
use crate::virtio::test_driver::{DriverQueue, Told, memory};
use crate::virtio::{Activation, VirtioDevice};

fn active(writes: Writes) -> (Pmem, DriverQueue, Arc<Told>, GuestRam) {
    let memfd = nix::sys::memfd::memfd_create(c"test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    let mut file = std::fs::File::from(memfd);
    file.write_all(&[7; 5000]).unwrap();
    let memory = memory();
    let queue = DriverQueue::new(&memory, 0);
    let told = Arc::new(Told::default());
    let mut pmem = Pmem::new(&Threads::sealed(), file, 4 << 30, writes).unwrap();
    pmem.activate(Activation {
        memory: memory.clone(),
        features: 0,
        queues: vec![queue.active()],
        interrupt: told.clone(),
        resumed: false,
    })
    .unwrap();
    (pmem, queue, told, memory)
}

fn request(queue: &mut DriverQueue) {
    queue.descriptor(0, 0x10_0000, 4, 1, 1);
    queue.descriptor(1, 0x10_0010, 4, 2, 0);
    queue.offer(0);
}

#[test]
fn a_flush_is_answered() {
    for writes in [Writes::Kept, Writes::Private, Writes::Refused] {
        let (pmem, mut queue, _told, memory) = active(writes);
        memory.write_obj(u32::MAX, GuestAddress(0x10_0010)).unwrap();
        request(&mut queue);
        assert_eq!(queue.take_used(), Some((0, 4)));
        assert_eq!(memory.read_obj::<u32>(GuestAddress(0x10_0010)).unwrap(), 0);
        assert_eq!(pmem.status()["flushes"], 1);
    }
}

#[test]
fn an_unknown_request_fails_alone() {
    let (_pmem, mut queue, _told, memory) = active(Writes::Kept);
    memory.write_obj(9u32, GuestAddress(0x10_0000)).unwrap();
    request(&mut queue);
    assert_eq!(queue.take_used(), Some((0, 4)));
    assert_ne!(memory.read_obj::<u32>(GuestAddress(0x10_0010)).unwrap(), 0);
}

#[test]
fn a_short_or_wild_request_asks_for_a_reset() {
    for (address, length) in [(0x10_0000, 2), (u64::MAX - 1, 4)] {
        let (_pmem, mut queue, told, _memory) = active(Writes::Kept);
        queue.descriptor(0, address, length, 1, 1);
        queue.descriptor(1, 0x10_0010, 4, 2, 0);
        queue.offer(0);
        assert!(!told.failure().is_empty());
    }
}

#[test]
fn the_region_is_whole_and_zero_past_the_file() {
    let (pmem, ..) = active(Writes::Private);
    let region = pmem.region();
    assert_eq!((region.guest, region.bytes), (4 << 30, 2 << 20));
    assert!(!region.read_only);
    // SAFETY: the region is mapped and lives to the end of the process.
    let bytes = unsafe { std::slice::from_raw_parts(region.host as *const u8, region.bytes as usize) };
    assert_eq!((bytes[4999], bytes[5000], bytes[(2 << 20) - 1]), (7, 0, 0));
    assert_eq!(region_bytes(u64::MAX), None);
}
