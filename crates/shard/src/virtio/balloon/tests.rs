use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use super::{Balloon, PlainRelease, Release};
use crate::kind::VmKind;
use crate::memory::GuestRam;
use crate::sandbox::Threads;
use crate::virtio::device::RING_FEATURES;
use crate::virtio::test_driver::{DriverQueue, RecordedSignals, wait};
use crate::virtio::{Activation, VirtioDevice, VirtioId};

const BYTES: u64 = 8 << 20;

struct Rig {
    balloon: Balloon,
    queues: Vec<DriverQueue>,
    signals: Arc<RecordedSignals>,
    memory: GuestRam,
    file: std::fs::File,
}

/// A balloon over 8 MiB of shared file memory, every page of it written, with the features statistics and
/// reporting.
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
    let signals = Arc::new(RecordedSignals::default());
    let mut balloon = Balloon::new(
        &Threads::sealed(),
        BYTES,
        Release(VmKind::Plain(PlainRelease::Whole)),
    )
    .unwrap();
    balloon
        .activate(Activation {
            memory: memory.clone(),
            features,
            queues: queues.iter().map(DriverQueue::active).collect(),
            interrupt: signals.clone(),
            resumed: false,
        })
        .unwrap();
    Rig {
        balloon,
        queues,
        signals,
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
fn reporting_works_with_both_numberings_of_its_queue() {
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
    // The thread serves its queues in turn. Once a later request is complete, the first queue has been
    // checked.
    rig.queues[1].add(&[(0x30_0000, 4)], false);
    rig.queues[1].take_used().unwrap();
    assert_eq!(host_bytes(&rig.file), BYTES);
}

#[test]
fn statistics_are_read_and_requested_again() {
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
fn pages_outside_memory_request_a_reset() {
    for number in [u32::MAX, (BYTES / 4096) as u32] {
        let mut rig = rig();
        rig.memory.write_obj(number, GuestAddress(0x10_0000)).unwrap();
        rig.queues[0].add(&[(0x10_0000, 4)], false);
        assert!(rig.signals.failure().contains("not all memory"));
    }
}

#[test]
fn of_a_huge_list_64_kib_are_read() {
    let mut rig = rig();
    // The first 64 KiB of the list name page 0x400 repeatedly; the rest names pages outside memory.
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

#[test]
fn balloon_offers_to_deflate_when_memory_runs_out() {
    let rig = rig();
    assert_eq!(rig.balloon.id(), VirtioId::Balloon);
    assert_eq!(rig.balloon.queue_sizes(), [128, 128, 16, 64, 64]);
    // Statistics, deflating when out of memory, reporting.
    assert_eq!(rig.balloon.features(), RING_FEATURES | 1 << 1 | 1 << 2 | 1 << 5);
}

#[test]
fn only_the_actual_size_is_written_by_the_driver() {
    let mut rig = rig();
    rig.balloon.handle().set_bytes(3 * 4096);
    assert_eq!(
        rig.signals.configs.load(Ordering::SeqCst),
        1,
        "the driver is notified"
    );
    rig.balloon.write_config(0, &7_u32.to_le_bytes());
    rig.balloon.write_config(4, &7_u16.to_le_bytes());
    rig.balloon.write_config(4, &2_u32.to_le_bytes());
    let mut config = [0xFF; 12];
    rig.balloon.read_config(0, &mut config);
    assert_eq!(config, [3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.balloon.handle().actual_bytes(), 2 * 4096);
    let status = rig.balloon.status();
    assert_eq!(status["target_bytes"], 3 * 4096);
    assert_eq!(status["actual_bytes"], 2 * 4096);
}

#[test]
fn a_target_beyond_memory_is_all_of_it() {
    let rig = rig();
    for bytes in [BYTES + 4096, u64::MAX] {
        rig.balloon.handle().set_bytes(bytes);
        assert_eq!(rig.balloon.status()["target_bytes"], BYTES);
    }
}

#[test]
fn inflating_to_the_target_keeps_it() {
    let mut rig = rig();
    rig.balloon.handle().set_bytes(4096);
    for actual in [1_u32, 1, 2] {
        rig.balloon.write_config(4, &actual.to_le_bytes());
    }
    assert_eq!(rig.balloon.status()["target_bytes"], 4096);
}

#[test]
fn reset_deflates_and_stops_notifying_the_driver() {
    let mut rig = rig();
    rig.balloon.write_config(4, &2_u32.to_le_bytes());
    rig.balloon.reset();
    let handle = rig.balloon.handle();
    assert_eq!(handle.actual_bytes(), 0);
    handle.set_bytes(4096);
    assert_eq!(rig.signals.configs.load(Ordering::SeqCst), 0);
}

#[test]
fn restored_balloon_continues_with_both_sizes() {
    let (mut before, mut after) = (rig(), rig());
    before.balloon.handle().set_bytes(5 * 4096);
    before.balloon.write_config(4, &4_u32.to_le_bytes());
    after.balloon.resume(&before.balloon.save());
    let sizes = |rig: &Rig| {
        let status = rig.balloon.status();
        (status["target_bytes"].clone(), status["actual_bytes"].clone())
    };
    assert_eq!(sizes(&after), ((5 * 4096).into(), (4 * 4096).into()));
    after.balloon.resume(&serde_json::Value::Null);
    assert_eq!(
        sizes(&after),
        sizes(&before),
        "data that are no state are ignored"
    );
}

#[test]
fn statistics_are_named_by_the_specification() {
    use super::metrics::statistic_name;
    let names = [0, 4, 9, 10, u16::MAX].map(statistic_name);
    assert_eq!(
        names,
        [
            "swap_in_bytes",
            "free_bytes",
            "hugetlb_failures",
            "tag_10",
            "tag_65535"
        ]
    );
}

#[test]
fn adjacent_pages_are_released_in_any_listed_order() {
    let mut rig = rig();
    let numbers = [7_u32, 5, 6, 6, 100];
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    let at = 0x70_0000;
    rig.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
    // A trailing part of a number is ignored.
    rig.queues[0].add(&[(at, bytes.len() as u32 + 2)], false);
    rig.queues[0].take_used().unwrap();
    assert_eq!(host_bytes(&rig.file), BYTES - 4 * 4096);
    let counted = || (rig.balloon.status()["inflated_bytes"] == 4 * 4096).then_some(());
    assert_eq!(wait(counted), Some(()));
    for page in [5, 6, 7, 100] {
        let byte: u8 = rig.memory.read_obj(GuestAddress(page * 4096 + 0xFFF)).unwrap();
        assert_eq!(byte, 0, "page {page}");
    }
}
