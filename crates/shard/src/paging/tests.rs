//! Paging of a real memory file by a real userfaultfd, without a guest: threads and system calls of this
//! process take the guest's part.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use dsm::PAGE_LEN;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::rig::{LIMIT_BYTES, LIMIT_PAGES, MIB, Rig, rig};
use super::*;
use crate::kind::VmKind;
use crate::virtio::balloon::{PlainRelease, Release};

mod origins;
mod read_back;

#[test]
fn pages_of_several_threads_come_back_whole_from_the_paging_file() {
    let rig = Arc::new(rig(64, 20_000));
    let first: u64 = rig.memory.read_obj(GuestAddress(8)).unwrap();
    assert_eq!(first, 0x6b65_726e);
    let threads: Vec<_> = (0..4)
        .map(|own| {
            let rig = rig.clone();
            thread::spawn(move || {
                let mut random = 0x9e37_79b9_7f4a_7c15_u64 + u64::from(own);
                let mut written = BTreeMap::new();
                for round in 0..30_000_u64 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    // Neighbours belong to different threads; two thirds of the accesses are near each other.
                    let span = if round % 3 == 0 { 4096 } else { 600 };
                    let page = 4 * ((random >> 33) as u32 % span) + own;
                    match written.get(&page) {
                        Some(value) => rig.check(page, *value),
                        None => assert_eq!(rig.first_word(page), 0, "page {page}"),
                    }
                    if round % 2 == 0 {
                        rig.write(page, round);
                        written.insert(page, round);
                    }
                }
                written
            })
        })
        .collect();
    for thread in threads {
        for (page, value) in thread.join().unwrap() {
            rig.check(page, value);
        }
    }
    rig.settle();
    for counter in [
        "/written_bytes",
        "/read_bytes",
        "/faults/with_io",
        "/faults/without_io",
    ] {
        assert!(rig.number(counter) > 0, "{counter}: {}", rig.paging.status());
    }
    assert!(rig.end.cause().is_none());
}

#[test]
fn touch_soon_after_a_page_was_unmapped_needs_no_io() {
    let rig = rig(64, 20_000);
    // The second-chance list takes an eighth of the limit: these are unmapped, and not written.
    (0..LIMIT_PAGES - 8).for_each(|page| rig.write(page, u64::from(page)));
    rig.wait("pages to be unmapped", || {
        rig.number("/second_chance_bytes") > 400 * PAGE_BYTES
    });
    (0..400).for_each(|page| rig.check(page, u64::from(page)));
    assert!(rig.number("/faults/without_io") >= 300, "{}", rig.paging.status());
    assert_eq!(rig.number("/written_bytes"), 0);
}

#[test]
fn zeroes_are_not_written() {
    let rig = rig(64, 20_000);
    let pages = 2 * LIMIT_PAGES;
    for page in 1..pages {
        assert_eq!(rig.first_word(page), 0);
    }
    rig.settle();
    assert!(rig.number("/zero_bytes") >= LIMIT_BYTES - 64 * PAGE_BYTES);
    // The first page has the kernel.
    assert!(rig.number("/written_bytes") <= PAGE_BYTES);
    assert_eq!(rig.first_word(7), 0);
    let first: u64 = rig.memory.read_obj(GuestAddress(8)).unwrap();
    assert_eq!(first, 0x6b65_726e);
}

#[test]
fn system_calls_wait_for_pages_as_threads_do() {
    let rig = rig(64, 20_000);
    rig.fill();
    let file = tempfile::tempfile().unwrap();
    let bytes = 64 * PAGE_LEN;
    let address = |page: u32| {
        let address = GuestAddress(u64::from(page) * PAGE_BYTES);
        rig.memory.get_host_address(address).unwrap()
    };
    // SAFETY: the buffer is guest memory, mapped as long as `rig`.
    let written = unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&file), address(0).cast(), bytes) };
    assert_eq!(written, bytes as isize);
    let mut word = [0; 8];
    for page in 0..64 {
        file.read_exact_at(&mut word, page * PAGE_BYTES).unwrap();
        assert_eq!(u64::from_le_bytes(word), 1000 + page);
    }
    rig.fill();
    // SAFETY: as above; no reference to the memory exists.
    let read = unsafe {
        libc::pread(
            std::os::fd::AsRawFd::as_raw_fd(&file),
            address(128).cast(),
            bytes,
            0,
        )
    };
    assert_eq!(read, bytes as isize);
    for page in 0..64 {
        rig.check(128 + page, 1000 + u64::from(page));
    }
}

#[test]
fn pages_are_written_only_after_an_instant_without_io_into_memory() {
    let rig = rig(64, 20_000);
    rig.quiescer.io_started();
    (0..2 * LIMIT_PAGES).for_each(|page| rig.write(page, u64::from(page)));
    rig.wait("a deferred cluster", || rig.number("/deferred_writes") > 0);
    assert_eq!(rig.number("/written_bytes"), 0);
    assert_eq!(rig.number("/paged_out_bytes"), 0);
    rig.quiescer.io_done();
    rig.settle();
    assert!(rig.number("/written_bytes") > 0);
    (0..2 * LIMIT_PAGES).for_each(|page| rig.check(page, u64::from(page)));
}

#[test]
fn released_pages_are_zero_and_their_slots_free() {
    let rig = rig(64, 20_000);
    rig.fill();
    assert!(rig.number("/paged_out_bytes") > 0);
    rig.paging.release(0..2 * LIMIT_PAGES).unwrap();
    assert_eq!(rig.number("/paged_out_bytes"), 0);
    assert_eq!(rig.number("/resident_bytes"), 0);
    assert_eq!(rig.number("/file/free_bytes"), rig.number("/file/bytes"));
    assert_eq!(rig.memfd.metadata().unwrap().blocks(), 0);
    assert_eq!(rig.first_word(5), 0);
    rig.write(5, 55);
    rig.check(5, 55);
    // The guest's reports take the same way, in whole pages.
    let release = Release(VmKind::Plain(PlainRelease::Paged(rig.paging.clone())));
    let report = [(5 * PAGE_BYTES, 100), (4 * PAGE_BYTES + 1, 2 * PAGE_BYTES)];
    let released = release.ranges(&rig.memory, report.into_iter()).unwrap();
    assert_eq!((released, rig.first_word(5)), (PAGE_BYTES, 0));
    let outside = release.ranges(&rig.memory, [(64 * MIB, PAGE_BYTES)].into_iter());
    assert!(outside.is_err());
}

#[test]
fn pages_stay_in_memory_while_the_file_is_full_and_leave_once_it_is_not() {
    let rig = rig(64, 1000);
    (0..2 * LIMIT_PAGES).for_each(|page| rig.write(page, u64::from(page)));
    rig.wait("a full file", || rig.paging.status()["stalled"] == "it is full");
    assert!(rig.number("/refused_writes") > 0);
    assert_eq!(rig.number("/file/free_bytes"), 0);
    (0..2 * LIMIT_PAGES)
        .rev()
        .for_each(|page| rig.check(page, u64::from(page)));
    assert!(rig.end.cause().is_none(), "the VM goes on");
    rig.paging.release(0..LIMIT_PAGES).unwrap();
    rig.paging.set_limit(LIMIT_BYTES);
    rig.settle();
    (LIMIT_PAGES..2 * LIMIT_PAGES).for_each(|page| rig.check(page, u64::from(page)));
}

#[test]
fn write_that_the_host_refuses_loses_no_page() {
    let rig = rig(64, 20_000);
    rig.faults.write_error.store(true, Ordering::SeqCst);
    (0..2 * LIMIT_PAGES).for_each(|page| rig.write(page, u64::from(page)));
    rig.wait("a refused write", || rig.number("/refused_writes") > 0);
    (0..2 * LIMIT_PAGES).for_each(|page| rig.check(page, u64::from(page)));
    assert_eq!(
        rig.number("/file/free_bytes"),
        rig.number("/file/bytes"),
        "no slot leaks"
    );
    rig.faults.write_error.store(false, Ordering::SeqCst);
    rig.settle();
    (0..2 * LIMIT_PAGES).for_each(|page| rig.check(page, u64::from(page)));
}

/// Returns the end of a VM whose page 3 was touched after `damage` was done to its paging file.
fn end_after(damage: impl FnOnce(&Rig)) -> String {
    let rig = Arc::new(rig(64, 20_000));
    rig.fill();
    assert!(rig.paging.is_whole());
    damage(&rig);
    let (got, touched) = mpsc::channel();
    let other = rig.clone();
    thread::spawn(move || {
        for page in 0..LIMIT_PAGES {
            let _ = got.send((page, other.first_word(page)));
        }
    });
    rig.wait("the end", || rig.end.cause().is_some());
    assert!(!rig.paging.is_whole());
    // No thread goes on with a wrong page.
    thread::sleep(Duration::from_millis(50));
    for (page, word) in touched.try_iter() {
        assert_eq!(word, 1000 + u64::from(page));
    }
    match rig.end.cause() {
        Some(Ending::ShardFailed { detail }) => detail,
        other => panic!("{other:?}"),
    }
}

#[test]
fn wrong_byte_short_file_and_error_end_the_vm_with_file_and_offset() {
    let wrong = end_after(|rig| {
        let bytes = rig.file.metadata().unwrap().len();
        for page in (0..bytes).step_by(PAGE_LEN) {
            let mut byte = [0];
            rig.file.read_exact_at(&mut byte, page + 99).unwrap();
            rig.file.write_all_at(&[byte[0] ^ 1], page + 99).unwrap();
        }
    });
    assert!(
        wrong.starts_with("the paging file /x/paging cannot be read at byte "),
        "{wrong}"
    );
    assert!(
        wrong.ends_with(": the bytes are not those that were written"),
        "{wrong}"
    );
    let short = end_after(|rig| rig.file.set_len(0).unwrap());
    assert!(short.ends_with("the file ends there"), "{short}");
    let error = end_after(|rig| rig.faults.read_error.store(true, Ordering::SeqCst));
    assert!(error.contains("Input/output error"), "{error}");
    assert_eq!(error.lines().count(), 1);
}

#[test]
fn lower_limit_pages_out_and_a_higher_one_lets_pages_stay() {
    let rig = rig(64, 20_000);
    rig.paging.set_limit(64 * MIB);
    (0..2 * LIMIT_PAGES).for_each(|page| rig.write(page, u64::from(page)));
    assert_eq!(rig.number("/written_bytes"), 0);
    rig.paging.set_limit(LIMIT_BYTES);
    rig.settle();
    assert!(rig.number("/paged_out_bytes") >= LIMIT_BYTES - 64 * PAGE_BYTES);
    (0..2 * LIMIT_PAGES).for_each(|page| rig.check(page, u64::from(page)));
    rig.paging.set_limit(0);
    assert_eq!(rig.number("/limit_bytes"), LIMIT_BYTES, "the least limit");
}
