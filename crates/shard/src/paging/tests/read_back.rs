//! Pages that come back from the paging file: neighbours, and slots that are kept.

use std::sync::Arc;
use std::thread;

use super::*;

/// Checks pages of [`Rig::fill`].
fn check_filled(rig: &Rig, pages: impl Iterator<Item = u32>) {
    pages.for_each(|page| rig.check(page, 1000 + u64::from(page)));
}

#[test]
fn used_neighbours_are_brought_and_unused_ones_no_longer() {
    let rig = rig(64, 20_000);
    rig.fill();
    let counters = || {
        [
            "/faults/with_io",
            "/faults/read_ahead",
            "/read_bytes",
            "/read_ahead/window_pages",
        ]
        .map(|path| rig.number(path))
    };
    let before = counters();
    check_filled(&rig, 0..1024);
    let after = counters();
    assert_eq!(after[3], 7, "{}", rig.paging.status());
    // Each read brings eight, of which seven are mapped at once.
    let reads = after[0] - before[0];
    assert!((128..180).contains(&reads), "{reads} reads of 1024 pages");
    let first_touches = after[1] - before[1];
    assert!((110..250).contains(&first_touches), "{}", rig.paging.status());

    // One page in sixteen is touched, of those that are not in memory.
    rig.fill();
    let before = counters();
    check_filled(&rig, (0..3072).step_by(16));
    check_filled(&rig, (8..3072).step_by(16));
    let after = counters();
    assert_eq!(after[3], 0, "{}", rig.paging.status());
    assert!(rig.number("/read_ahead/unused_pages") > 0);
    let (reads, pages) = (after[0] - before[0], (after[2] - before[2]) / PAGE_BYTES);
    assert!(
        reads >= 350 && pages <= reads + 300,
        "{pages} pages by {reads} reads"
    );
    assert!(rig.number("/read_ahead_bytes") <= 64 * PAGE_BYTES);
    // Pages that were read ahead are whole, in memory and outside.
    check_filled(&rig, 0..2 * LIMIT_PAGES);
}

#[test]
fn page_that_is_unchanged_leaves_memory_without_a_write() {
    let rig = rig(64, 20_000);
    rig.fill();
    check_filled(&rig, 0..2 * LIMIT_PAGES);
    rig.settle();
    let (written, unchanged) = (rig.number("/written_bytes"), rig.number("/unchanged_bytes"));
    for _ in 0..3 {
        check_filled(&rig, 0..2 * LIMIT_PAGES);
    }
    rig.settle();
    assert_eq!(rig.number("/written_bytes"), written, "{}", rig.paging.status());
    let left = rig.number("/unchanged_bytes") - unchanged;
    assert!(left >= 2 * LIMIT_BYTES, "{}", rig.paging.status());
    // KVM reports most faults as those of a write. A page that has the same bytes afterwards is unchanged.
    (0..2 * LIMIT_PAGES).for_each(|page| rig.write(page, 1000 + u64::from(page)));
    rig.settle();
    assert_eq!(rig.number("/written_bytes"), written, "{}", rig.paging.status());
    // A change of one byte counts, whether it is made by the first access to the page or by a later one.
    let last = GuestAddress(17 * PAGE_BYTES + 2000);
    rig.memory.write_obj(1_u8, last).unwrap();
    rig.check(18, 1018);
    rig.memory
        .write_obj(1_u8, GuestAddress(18 * PAGE_BYTES + 2000))
        .unwrap();
    check_filled(&rig, 100..2 * LIMIT_PAGES);
    rig.settle();
    assert_eq!(rig.number("/written_bytes"), written + 2 * PAGE_BYTES);
    check_filled(&rig, 0..2 * LIMIT_PAGES);
    for page in [17, 18] {
        let byte: u8 = rig
            .memory
            .read_obj(GuestAddress(page * PAGE_BYTES + 2000))
            .unwrap();
        assert_eq!(byte, 1, "page {page}");
    }
    // A page that becomes zero needs no slot.
    let free = rig.number("/file/free_bytes");
    rig.memory
        .write_slice(&[0; PAGE_LEN], GuestAddress(20 * PAGE_BYTES))
        .unwrap();
    check_filled(&rig, 100..2 * LIMIT_PAGES);
    rig.settle();
    assert_eq!(rig.number("/file/free_bytes"), free + PAGE_BYTES);
    assert_eq!(rig.first_word(20), 0);
}

#[test]
fn kept_slots_make_room_once_the_file_is_full() {
    // Enough for the pages that do not fit into memory, and for few more.
    let rig = rig(64, LIMIT_PAGES + 400);
    rig.fill();
    assert!(rig.paging.state().set.keeps_slots());
    for round in 0..3 {
        (0..2 * LIMIT_PAGES).for_each(|page| {
            rig.check(page, 1000 + u64::from(page));
            if page % 3 == round {
                rig.write(page, 1000 + u64::from(page));
            }
        });
    }
    rig.settle();
    assert!(!rig.paging.state().set.keeps_slots(), "{}", rig.paging.status());
    assert_eq!(rig.number("/refused_writes"), 0);
    let state = rig.paging.state();
    let used = state.slots.capacity() - state.slots.free();
    assert_eq!(used, state.set.counts().paged_out + state.set.counts().read_ahead);
    drop(state);
    check_filled(&rig, 0..2 * LIMIT_PAGES);
}

/// Readers in order and at random touch pages while these are read ahead, leave unused, and change.
#[test]
fn pages_stay_whole_while_they_are_read_ahead_touched_and_released_at_once() {
    let rig = Arc::new(rig(64, 20_000));
    rig.fill();
    let readers: Vec<_> = (0..3_u32)
        .map(|number| {
            let rig = rig.clone();
            thread::spawn(move || {
                let mut random = 77 + u64::from(number);
                for round in 0..24_000_u32 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let page = match number {
                        // Two readers of the same order, which meet at pages that are being read.
                        0 | 1 => 100 + round % 6000,
                        _ => 100 + (random >> 33) as u32 % 6000,
                    };
                    rig.check(page, 1000 + u64::from(page));
                    if number == 2 && round % 5 == 0 {
                        rig.write(page, 1000 + u64::from(page));
                    }
                }
            })
        })
        .collect();
    // Others are released meanwhile, some of which are being read.
    let releases = {
        let rig = rig.clone();
        thread::spawn(move || {
            for round in 0..300_u32 {
                let page = 6200 + round * 4;
                rig.paging.release(page..page + 2).unwrap();
                let word = rig.first_word(page + 3);
                assert_eq!(word, 1000 + u64::from(page + 3));
                assert_eq!(rig.first_word(page), 0);
            }
        })
    };
    for thread in readers.into_iter().chain([releases]) {
        thread.join().unwrap();
    }
    rig.settle();
    for counter in ["/faults/read_ahead", "/unchanged_bytes", "/read_ahead/used_pages"] {
        assert!(rig.number(counter) > 0, "{counter}: {}", rig.paging.status());
    }
    let state = rig.paging.state();
    let with_slots = (0..state.set.pages()).filter(|page| state.set.slot(*page).is_some());
    let used = state.slots.capacity() - state.slots.free();
    assert_eq!(with_slots.count() as u32, used, "no slot leaks");
    let pages = state.set.pages();
    drop(state);
    // Nor does a reference to the slot of a page.
    rig.paging.release(0..pages).unwrap();
    let state = rig.paging.state();
    assert_eq!(state.slots.free(), state.slots.capacity());
}
