use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};

use super::{Pmem, Writes, region_bytes};
use crate::memory::GuestRam;
use crate::sandbox::Threads;
use crate::virtio::device::RING_FEATURES;
use crate::virtio::test_driver::{DriverQueue, RecordedSignals, memory};
use crate::virtio::{Activation, VirtioDevice, VirtioId};

fn active(writes: Writes) -> (Pmem, DriverQueue, Arc<RecordedSignals>, GuestRam) {
    let memfd = nix::sys::memfd::memfd_create(c"test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    let mut file = std::fs::File::from(memfd);
    file.write_all(&[7; 5000]).unwrap();
    let memory = memory();
    let queue = DriverQueue::new(&memory, 0);
    let signals = Arc::new(RecordedSignals::default());
    let mut pmem = Pmem::new(&Threads::sealed(), file, 4 << 30, writes).unwrap();
    pmem.activate(Activation {
        memory: memory.clone(),
        features: 0,
        queues: vec![queue.active()],
        interrupt: signals.clone(),
        resumed: false,
    })
    .unwrap();
    (pmem, queue, signals, memory)
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
fn short_or_misplaced_request_requests_a_reset() {
    for (address, length) in [(0x10_0000, 2), (u64::MAX - 1, 4)] {
        let (_pmem, mut queue, signals, _memory) = active(Writes::Kept);
        queue.descriptor(0, address, length, 1, 1);
        queue.descriptor(1, 0x10_0010, 4, 2, 0);
        queue.offer(0);
        assert!(!signals.failure().is_empty());
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

#[test]
fn configuration_has_the_address_of_persistent_memory() {
    let (pmem, ..) = active(Writes::Kept);
    assert_eq!((pmem.id(), pmem.queue_sizes()), (VirtioId::Pmem, &[64][..]));
    assert_eq!(pmem.features(), RING_FEATURES);
    let mut config = [0xFF; 20];
    pmem.read_config(0, &mut config);
    let (address, size): (u64, u64) = (4 << 30, 2 << 20);
    assert_eq!(config[..8], address.to_le_bytes());
    assert_eq!(config[8..16], size.to_le_bytes());
    assert_eq!(config[16..], [0; 4]);
}

#[test]
fn only_refused_writes_make_the_slot_read_only() {
    let is_read_only = |writes| active(writes).0.region().read_only;
    assert_eq!(
        [Writes::Kept, Writes::Private, Writes::Refused].map(is_read_only),
        [false, false, true]
    );
}

#[test]
fn only_kept_writes_reach_the_file() {
    for writes in [Writes::Kept, Writes::Private, Writes::Refused] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let copy = file.try_clone().unwrap();
        let pmem = Pmem::new(&Threads::sealed(), copy, 4 << 30, writes).unwrap();
        let host = pmem.region().host;
        assert!(host.is_multiple_of(2 << 20), "huge pages fit");
        // SAFETY: the region is mapped, for writing too, and lives to the end of the process.
        unsafe { (host as *mut u8).write_volatile(9) };
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(byte == [9], writes == Writes::Kept, "{writes:?}");
    }
}

#[test]
fn other_devices_reach_the_region_at_its_guest_address() {
    let (pmem, _queue, _told, memory) = active(Writes::Private);
    let region = pmem.region();
    let joined = region.join(&memory).unwrap();
    let read = |address| joined.read_obj::<u8>(GuestAddress(address));
    assert_eq!((read(4 << 30).unwrap(), read((4 << 30) + 4999).unwrap()), (7, 7));
    assert_eq!(read((4 << 30) + region.bytes - 1).unwrap(), 0);
    assert!(read((4 << 30) + region.bytes).is_err());
    assert!(
        joined.read_obj::<u8>(GuestAddress(0)).is_ok(),
        "RAM remains accessible"
    );
    assert!(region.join(&joined).is_err(), "two regions at one address");
}

#[test]
fn regions_are_whole_multiples_of_2_mib() {
    const UNIT: u64 = 2 << 20;
    let sizes = [0, 1, UNIT, UNIT + 1].map(region_bytes);
    assert_eq!(sizes, [Some(UNIT), Some(UNIT), Some(UNIT), Some(2 * UNIT)]);
}

#[test]
fn words_of_the_wrong_direction_or_length_request_a_reset() {
    // Two words with their lengths and flags: 1 means that another follows, 2 that the word is writable.
    for (what, answer) in [
        ((4, 3), (4, 2)),
        ((4, 1), (4, 0)),
        ((4, 1), (3, 2)),
        ((4, 0), (4, 2)),
    ] {
        let (_pmem, mut queue, signals, _memory) = active(Writes::Kept);
        queue.descriptor(0, 0x10_0000, what.0, what.1, 1);
        queue.descriptor(1, 0x10_0010, answer.0, answer.1, 0);
        queue.offer(0);
        assert!(signals.failure().contains("too short"), "{what:?} {answer:?}");
    }
}

#[test]
fn region_for_reading_is_mapped_shared_without_write_access() {
    let file = std::fs::File::from(
        nix::sys::memfd::memfd_create(c"region", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap(),
    );
    file.set_len(2 << 20).unwrap();
    let reader = std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let region = super::mapping::map(&reader, 4 << 30, Writes::ReadOnly).unwrap();
    assert!(region.read_only && region.bytes == 2 << 20);
    file.write_all_at(b"later", 4096).unwrap();
    // SAFETY: the mapping has 2 MiB and is never removed; no reference to it is kept.
    let seen = unsafe { std::ptr::read_volatile((region.host + 4096) as *const [u8; 5]) };
    assert_eq!(seen, *b"later", "the mapping is a private copy");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps
        .lines()
        .find(|line| line.starts_with(&format!("{:x}-", region.host)));
    let line = line.expect("the mapping");
    assert_eq!(line.split_whitespace().nth(1), Some("r--s"), "{line}");
    // A private mapping would take pages of this process for each write.
    let made_writable = mprotect(region.host, 2 << 20);
    assert_eq!(made_writable, Some(libc::EACCES), "the shard makes it writable");
}

/// Requests write access to a mapping; returns the error.
fn mprotect(start: u64, bytes: usize) -> Option<i32> {
    // SAFETY: the range is a mapping of this test's, to which no reference exists.
    let result = unsafe {
        libc::mprotect(
            start as *mut libc::c_void,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
        )
    };
    (result != 0)
        .then(|| std::io::Error::last_os_error().raw_os_error())
        .flatten()
}
