//! Pages of the guest that came from the paging file, and the paging disk.

use super::*;
use crate::paging::rig::MIB;

#[test]
fn page_that_was_read_back_moves_to_the_disk_without_io_until_it_is_changed() {
    let (rig, mut driver) = driver();
    rig.fill_from(FREE);
    (0..300).for_each(|page| rig.check(FREE + page, 1000 + u64::from(FREE + page)));
    rig.write(FREE + 7, 7);
    warm_up(&mut driver);
    rig.settle();
    let (written, free) = (rig.number("/written_bytes"), rig.number("/file/free_bytes"));
    driver.swap_out(0, FREE, 300);
    assert_eq!(
        rig.number("/disk/writes/without_io"),
        299,
        "{}",
        rig.paging.status()
    );
    assert_eq!(rig.number("/disk/writes/with_io"), 1);
    assert_eq!(rig.number("/written_bytes"), written + PAGE);
    assert_eq!(rig.number("/file/free_bytes"), free - PAGE, "one new slot");
    // The disk keeps its content when the guest's pages change.
    (0..300).for_each(|page| rig.write(FREE + page, 9));
    driver.swap_in(0, UNUSED, 300);
    for page in 0..300 {
        let value = if page == 7 {
            7
        } else {
            1000 + u64::from(FREE + page)
        };
        rig.check(UNUSED + page, value);
        rig.check(FREE + page, 9);
    }
    // The pages that came from the disk leave memory again without a write, and share its slots still.
    rig.settle();
    let (unchanged, used) = (rig.number("/unchanged_bytes"), rig.number("/disk/used_bytes"));
    rig.fill_from(FREE);
    (0..LIMIT_PAGES).for_each(|page| rig.check(FREE + page, 1000 + u64::from(FREE + page)));
    assert!(
        rig.number("/unchanged_bytes") >= unchanged + 300 * PAGE,
        "{}",
        rig.paging.status()
    );
    assert_eq!(rig.number("/disk/used_bytes"), used);
    for page in 0..300 {
        let value = if page == 7 {
            7
        } else {
            1000 + u64::from(FREE + page)
        };
        rig.check(UNUSED + page, value);
    }
}

/// A guest that swaps in one page at a time, in any order, finds each page mapped.
#[test]
fn page_that_is_swapped_in_alone_takes_no_fault() {
    let (rig, mut driver) = driver();
    rig.fill_from(FREE);
    driver.swap_out(0, FREE, 512);
    rig.settle();
    warm_up(&mut driver);
    let counted = || {
        [
            "/faults/with_io",
            "/faults/read_ahead",
            "/disk/read_at_once_bytes",
        ]
        .map(|path| rig.number(path))
    };
    let before = counted();
    let page = |number: u32| number * 97 % 512;
    for number in 0..512 {
        driver.swap_in(page(number), UNUSED + number, 1);
        rig.check(UNUSED + number, 1000 + u64::from(FREE + page(number)));
    }
    let after = counted();
    assert_eq!(after[2] - before[2], 512 * PAGE, "{}", rig.paging.status());
    // Few faults, of rings and headers.
    let faults = after[0] + after[1] - before[0] - before[1];
    assert!(faults < 32, "{faults} faults: {}", rig.paging.status());
    // A page that no request has left memory for is unchanged, and one that the guest writes is its own.
    rig.write(UNUSED, 3);
    driver.swap_in(page(0), UNUSED + 512, 1);
    rig.check(UNUSED, 3);
    rig.check(UNUSED + 512, 1000 + u64::from(FREE + page(0)));
    rig.settle();
    assert!(rig.end.cause().is_none());
}

#[test]
fn no_page_is_read_at_once_while_memory_is_1_mib_over_its_limit() {
    let (rig, mut driver) = driver();
    rig.fill_from(FREE);
    driver.swap_out(0, FREE, 512);
    rig.settle();
    warm_up(&mut driver);
    rig.settle();
    // Without an instant without I/O nothing leaves memory.
    rig.quiescer.io_started();
    let over = || {
        (rig.number("/resident_bytes") + rig.number("/second_chance_bytes") + rig.number("/read_ahead_bytes"))
            .saturating_sub(rig.number("/limit_bytes"))
    };
    for page in UNUSED + 100.. {
        if over() == MIB {
            break;
        }
        rig.write(page, 5);
    }
    let read = rig.number("/disk/read_at_once_bytes");
    driver.swap_in(0, UNUSED, 1);
    assert_eq!(rig.number("/disk/read_at_once_bytes"), read + PAGE, "at the mark");
    assert_eq!(over(), MIB + PAGE);
    for page in 1..4 {
        driver.swap_in(page, UNUSED + page, 1);
    }
    assert_eq!(
        rig.number("/disk/read_at_once_bytes"),
        read + PAGE,
        "{}",
        rig.paging.status()
    );
    rig.quiescer.io_done();
    rig.settle();
    (0..4).for_each(|page| rig.check(UNUSED + page, 1000 + u64::from(FREE + page)));
    driver.swap_in(4, UNUSED + 4, 1);
    assert_eq!(rig.number("/disk/read_at_once_bytes"), read + 2 * PAGE);
}

#[test]
fn damaged_slot_of_a_page_that_is_read_at_once_ends_the_vm() {
    let (rig, mut driver) = driver();
    rig.fill_from(FREE);
    driver.swap_out(0, FREE, 64);
    rig.settle();
    warm_up(&mut driver);
    rig.faults.read_error.store(true, Ordering::SeqCst);
    assert_eq!(driver.swap(VIRTIO_BLK_T_IN, 5, UNUSED, 1), IOERR);
    rig.wait("the end", || rig.end.cause().is_some());
    let cause = format!("{:?}", rig.end.cause());
    assert!(cause.contains("/x/paging cannot be read at byte"), "{cause}");
    assert!(!rig.paging.is_whole());
}

#[test]
fn pages_that_a_request_moved_together_are_read_together() {
    let (rig, mut driver) = driver();
    rig.fill_from(FREE);
    driver.swap_out(0, FREE, 256);
    rig.settle();
    // Neighbours of the disk go to pages that are no neighbours, as a guest's free pages.
    let target = |at: u32| UNUSED + 2 * (255 - at);
    for first in (0..256).step_by(32) {
        let buffers: Vec<_> = (first..first + 32)
            .map(|at| writable(u64::from(target(at)) * PAGE, PAGE as u32))
            .collect();
        let sector = u64::from(first) * SECTORS;
        assert_eq!(driver.request(VIRTIO_BLK_T_IN, sector, &buffers), OK);
    }
    assert_eq!(
        rig.number("/disk/reads/without_io"),
        256,
        "{}",
        rig.paging.status()
    );
    let before = rig.number("/faults/with_io");
    for at in 0..256 {
        rig.check(target(at), 1000 + u64::from(FREE + at));
    }
    let reads = rig.number("/faults/with_io") - before;
    assert!(
        (32..80).contains(&reads),
        "{reads} reads of 256 pages: {}",
        rig.paging.status()
    );
}
