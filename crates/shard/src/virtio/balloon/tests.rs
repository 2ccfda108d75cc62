use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use super::{Balloon, Release};
use crate::memory::GuestRam;
use crate::sandbox::Threads;
use crate::virtio::test_driver::{DriverQueue, Told, wait};
use crate::virtio::{Activation, VirtioDevice};

const BYTES: u64 = 8 << 20;

struct Rig {
    balloon: Balloon,
    queues: Vec<DriverQueue>,
    told: Arc<Told>,
    memory: GuestRam,
    file: std::fs::File,
}

/// A balloon over 8 MiB of shared file memory, every page of it written; features statistics and reporting.
fn rig() -> Rig {
    rig_with(1 << 1 | 1 << 5)
}

fn rig_with(features: u64) -> Rig {
    let memfd = nix::sys::memfd::memfd_create(c"test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    let file = std::fs::File::from(memfd);
    file.set_len(BYTES).unwrap();
    let range = (
        GuestAddress(0),
        BYTES as usize,
        Some(FileOffset::new(file.try_clone().unwrap(), 0)),
    );
    let memory: GuestRam = Arc::new(GuestMemoryMmap::from_ranges_with_files([range]).unwrap());
    for page in (0..BYTES).step_by(4096) {
        memory.write_obj(1u8, GuestAddress(page + 0xFFF)).unwrap();
    }
    let queues: Vec<DriverQueue> = (0..5).map(|index| DriverQueue::new(&memory, index)).collect();
    let told = Arc::new(Told::default());
    let mut balloon = Balloon::new(&Threads::sealed(), BYTES, Release::default()).unwrap();
    balloon
        .activate(Activation {
            memory: memory.clone(),
            features,
            queues: queues.iter().map(DriverQueue::active).collect(),
            interrupt: told.clone(),
            resumed: false,
        })
        .unwrap();
    Rig {
        balloon,
        queues,
        told,
        memory,
        file,
    }
}

fn host_bytes(file: &std::fs::File) -> u64 {
    file.metadata().unwrap().blocks() * 512
}

#[test]
fn inflating_returns_pages_to_the_host() {
    let mut rig = rig();
    assert_eq!(host_bytes(&rig.file), BYTES);
    for index in 0..256u32 {
        rig.memory
            .write_obj(0x200 + index, GuestAddress(0x10_0000 + 4 * u64::from(index)))
            .unwrap();
    }
    rig.queues[0].add(&[(0x10_0000, 1024)], false);
    rig.queues[0].take_used().unwrap();
    assert_eq!(host_bytes(&rig.file), BYTES - (1 << 20));
}

#[test]
fn reporting_works_however_the_driver_numbers_its_queue() {
    // Statistics and reporting: 3 in Linux, 4 in the specification; reporting alone: 2 or 4.
    for (features, queue) in [
        (1 << 1 | 1 << 5, 3),
        (1 << 1 | 1 << 5, 4),
        (1 << 5, 2),
        (1 << 5, 4),
    ] {
        let mut rig = rig_with(features);
        rig.queues[queue].add(&[(0x60_0000, 0x10_0000), (0x70_0000, 0x1000)], true);
        rig.queues[queue].take_used().unwrap();
        assert_eq!(host_bytes(&rig.file), BYTES - 0x10_1000, "queue {queue}");
    }
}

#[test]
fn without_the_feature_nothing_is_reported() {
    let mut rig = rig_with(1 << 1);
    rig.queues[3].add(&[(0x60_0000, 0x10_0000)], true);
    // The thread serves its queues one by one, so once a later request is answered the first has been looked at.
    rig.queues[1].add(&[(0x30_0000, 4)], false);
    rig.queues[1].take_used().unwrap();
    assert_eq!(host_bytes(&rig.file), BYTES);
}

#[test]
fn statistics_are_read_and_asked_for_again() {
    let mut rig = rig();
    rig.memory
        .write_slice(&[4, 0, 42, 0, 0, 0, 0, 0, 0, 0], GuestAddress(0x10_0000))
        .unwrap();
    rig.queues[2].add(&[(0x10_0000, 10)], false);
    wait(|| (rig.balloon.status()["guest"]["free_bytes"] == 42).then_some(())).unwrap();
    rig.balloon.status();
    assert!(rig.queues[2].take_used().is_some(), "the buffer comes back");
}

#[test]
fn pages_outside_memory_ask_for_a_reset() {
    for number in [u32::MAX, (BYTES / 4096) as u32] {
        let mut rig = rig();
        rig.memory.write_obj(number, GuestAddress(0x10_0000)).unwrap();
        rig.queues[0].add(&[(0x10_0000, 4)], false);
        assert!(rig.told.failure().contains("not all memory"));
    }
}

#[test]
fn of_a_huge_list_64_kib_are_read() {
    let mut rig = rig();
    // The first 64 KiB of the list name page 0x400 over and over, what follows pages outside memory.
    for index in 0..(64 << 10) / 4 {
        rig.memory
            .write_obj(0x400u32, GuestAddress(0x30_0000 + 4 * index))
            .unwrap();
    }
    rig.memory
        .write_obj(u32::MAX, GuestAddress(0x30_0000 + (64 << 10)))
        .unwrap();
    rig.queues[0].add(&[(0x30_0000, u32::MAX)], false);
    rig.queues[0].take_used().unwrap();
    assert_eq!(host_bytes(&rig.file), BYTES - 4096);
}

#[test]
fn deflating_below_the_target_lowers_it() {
    let mut rig = rig();
    rig.balloon.handle().set_bytes(4 << 20);
    rig.balloon.write_config(4, &1024u32.to_le_bytes());
    rig.balloon.write_config(4, &512u32.to_le_bytes());
    let mut target = [0; 4];
    rig.balloon.read_config(0, &mut target);
    assert_eq!(u32::from_le_bytes(target), 512);
}
