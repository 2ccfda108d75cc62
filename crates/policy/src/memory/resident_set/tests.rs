use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::memory::image_slots::ImageSlots;
use crate::memory::paging_slots::PagingSlots;

mod origins;
mod swapped_in;

const LIMIT: u32 = LIMIT_MIN_PAGES;
const FIFO: u32 = LIMIT - LIMIT / SECOND_CHANCE_DIVISOR;

/// A set of which the pages `0..pages` were touched in order.
fn touched(pages: u32) -> ResidentSet {
    let mut set = ResidentSet::new(2 * LIMIT, LIMIT);
    for page in 0..pages {
        assert_eq!(set.touch(page), Touch::MapZero);
    }
    set
}

fn trimmed(set: &mut ResidentSet) -> Vec<u32> {
    let mut pages = Vec::new();
    set.trim(u32::MAX, &mut pages);
    pages
}

fn taken(set: &mut ResidentSet, most: u32) -> Vec<u32> {
    let mut pages = Vec::new();
    set.take_for_writing(most, &mut pages);
    pages
}

#[test]
fn pages_leave_the_fifo_in_the_order_in_which_they_came() {
    let mut set = touched(FIFO);
    assert_eq!(trimmed(&mut set), []);
    for page in FIFO..FIFO + 3 {
        set.touch(page);
    }
    assert_eq!(trimmed(&mut set), [0, 1, 2]);
    assert_eq!(set.state(1), PageState::SecondChance);
    // A page that is in the FIFO keeps its place, whatever touches it.
    assert_eq!(set.touch(3), Touch::MapCached(Cached::Resident));
    set.touch(FIFO + 3);
    assert_eq!(trimmed(&mut set), [3]);
}

#[test]
fn eviction_is_due_for_several_pages_of_the_fifo_or_for_one_beyond_the_limit() {
    let mut set = touched(FIFO + TRIM_SLACK_PAGES);
    assert!(!set.needs_eviction());
    set.touch(LIMIT);
    assert!(set.needs_eviction());
    trimmed(&mut set);
    assert!(!set.needs_eviction());
    let mut set = touched(LIMIT);
    trimmed(&mut set);
    assert!(!set.needs_eviction());
    set.touch(LIMIT);
    assert!(set.needs_eviction());
}

#[test]
fn touch_in_the_second_list_brings_a_page_back_without_io() {
    let mut set = touched(FIFO + 2);
    assert_eq!(trimmed(&mut set), [0, 1]);
    assert_eq!(set.touch(0), Touch::MapCached(Cached::SecondChance));
    assert_eq!(set.state(0), PageState::Resident);
    // It is the youngest page of the FIFO now.
    assert_eq!(trimmed(&mut set), [2]);
}

#[test]
fn oldest_pages_of_the_second_list_are_written_once_memory_is_over_its_limit() {
    let mut set = touched(LIMIT);
    let unmapped = trimmed(&mut set);
    assert_eq!(unmapped.len() as u32, LIMIT - FIFO);
    assert_eq!(taken(&mut set, 8), [], "memory is not over its limit");
    set.touch(LIMIT);
    assert_eq!(trimmed(&mut set).len(), 1);
    assert_eq!(taken(&mut set, 8), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(taken(&mut set, 8), [], "those that are being written are enough");
    assert!(set.written(0, Content::Slot(77)));
    assert!(set.written(1, Content::Zero), "zeroes need no slot");
    assert_eq!((set.state(0), set.slot(0)), (PageState::PagedOut, Some(77)));
    assert_eq!(set.touch(1), Touch::MapZero);
    assert_eq!(set.touch(0), Touch::Read { slot: 77 });
    assert_eq!(set.touch(0), Touch::Wait);
    assert_eq!(set.read_done(0, 77), ReadDone::Map);
    assert_eq!(set.touch(0), Touch::MapCached(Cached::Resident));
}

#[test]
fn page_that_is_touched_while_it_is_written_stays_in_memory() {
    let mut set = touched(LIMIT + 1);
    trimmed(&mut set);
    assert_eq!(taken(&mut set, 2), [0, 1]);
    assert_eq!(set.touch(0), Touch::MapCached(Cached::SecondChance));
    assert_eq!(set.release(1), None);
    assert!(!set.written(0, Content::Slot(5)));
    assert!(!set.written(1, Content::Slot(6)));
    assert_eq!(
        (set.state(0), set.state(1)),
        (PageState::Resident, PageState::Zero)
    );
    assert_eq!(set.counts().writing, 0);
}

#[test]
fn pages_that_could_not_be_written_are_the_next_again_in_their_order() {
    let mut set = touched(LIMIT + 1);
    trimmed(&mut set);
    let first = taken(&mut set, 3);
    set.touch(first[1]);
    set.not_written(&first);
    assert_eq!(taken(&mut set, 3), [0, 2, 3]);
}

#[test]
fn read_of_a_page_brings_those_that_follow_it_in_both_places() {
    let mut set = touched(LIMIT + 1);
    trimmed(&mut set);
    for page in taken(&mut set, 6) {
        // Page 3 is elsewhere.
        set.written(page, Content::Slot(if page == 3 { 99 } else { 10 + page }));
    }
    open_window(&mut set);
    assert_eq!(set.touch(0), Touch::Read { slot: 10 });
    assert_eq!(ahead(&mut set, 0, 10), [1, 2]);
    assert_eq!(set.touch(1), Touch::Wait);
    assert_eq!(set.touch(4), Touch::Read { slot: 14 });
    // Page 6 is in memory.
    assert_eq!(ahead(&mut set, 4, 14), [5]);
    assert_eq!(set.touch(3), Touch::Read { slot: 99 });
    assert_eq!(
        ahead(&mut set, 3, 99),
        [],
        "page 4 is elsewhere, and is being read"
    );
    let last = set.pages() - 1;
    assert_eq!(ahead(&mut set, last, 3), [], "no page follows the last");
}

/// The pages that are read ahead with a page.
fn ahead(set: &mut ResidentSet, page: u32, slot: u32) -> Vec<u32> {
    let mut pages = vec![page];
    set.read_ahead(slot, &mut pages);
    pages.split_off(1)
}

#[test]
fn read_of_a_page_brings_those_that_the_guest_moved_with_it() {
    let mut set = ResidentSet::new(2 * LIMIT, LIMIT);
    // A request for four pages of the disk, whose slots are side by side, into pages in any order.
    let request = [70, 20, 90, 91];
    for (slot, page) in (5..).zip(request) {
        set.replace(page, slot);
    }
    for two in request.windows(2) {
        set.link(two[0], two[1]);
    }
    open_window(&mut set);
    set.touch(70);
    assert_eq!(ahead(&mut set, 70, 5), [20, 90, 91]);
    for (slot, page) in (5..).zip(request) {
        set.read_done(page, slot);
    }
    // A link is of a page that is paged out, and ends with that content.
    set.link(70, 20);
    set.replace(70, 29);
    set.link(70, 20);
    set.replace(70, 30);
    set.replace(20, 31);
    set.touch(70);
    assert_eq!(ahead(&mut set, 70, 30), []);
    // One whose pages are in other slots now, or outside memory, has no effect.
    set.replace(100, 40);
    set.replace(101, 41);
    for second in [20, 100, u32::MAX - 1] {
        set.link(100, second);
    }
    set.touch(100);
    assert_eq!(ahead(&mut set, 100, 40), [101]);
}

/// Makes the window of the read-ahead the longest, as long orders do.
fn open_window(set: &mut ResidentSet) {
    while set.ahead.window() < super::super::read_ahead::WINDOW_MAX {
        set.ahead.used();
    }
}

#[test]
fn page_that_was_read_ahead_is_in_memory_and_its_slot_until_it_is_touched() {
    let mut set = touched(LIMIT + 1);
    trimmed(&mut set);
    for page in taken(&mut set, 4) {
        set.written(page, Content::Slot(10 + page));
    }
    open_window(&mut set);
    assert_eq!(set.touch(0), Touch::Read { slot: 10 });
    assert_eq!(ahead(&mut set, 0, 10), [1, 2, 3]);
    // A thread waits for page 2 while it is read.
    assert_eq!(set.touch(2), Touch::Wait);
    let done: Vec<_> = (0..4).map(|page| set.read_done(page, 10 + page)).collect();
    assert_eq!(
        done,
        [ReadDone::Map, ReadDone::Keep, ReadDone::Map, ReadDone::Keep]
    );
    assert_eq!(set.read_done(1, 11), ReadDone::Drop, "a second read of it");
    assert_eq!(set.state(1), PageState::ReadAhead);
    assert!(set.is_in_memory(1) && set.has_slots_content(1));
    assert_eq!(set.counts().read_ahead, 2);
    assert_eq!(set.touch(1), Touch::MapCached(Cached::ReadAhead));
    assert_eq!((set.state(1), set.slot(1)), (PageState::Resident, Some(11)));
    assert_eq!(
        set.ahead().used_pages(),
        2 + 4 + 4,
        "with those that opened the window"
    );
    assert_eq!(set.release(3), Some(13));
    assert_eq!(set.counts().read_ahead, 0);
}

#[test]
fn pages_that_were_read_ahead_count_for_the_limit() {
    let mut set = touched(LIMIT - 1);
    trimmed(&mut set);
    set.replace(LIMIT, 5);
    set.replace(LIMIT + 1, 6);
    assert_eq!(set.touch(LIMIT), Touch::Read { slot: 5 });
    assert_eq!(ahead(&mut set, LIMIT, 5), [LIMIT + 1]);
    set.read_done(LIMIT, 5);
    assert!(set.needs_eviction(), "a page is on its way into memory");
    assert_eq!(set.read_done(LIMIT + 1, 6), ReadDone::Keep);
    assert_eq!(set.counts().in_memory(), LIMIT + 1);
    assert!(set.needs_eviction());
}

#[test]
fn oldest_pages_that_were_read_ahead_leave_memory_unused_beyond_their_number() {
    let mut set = ResidentSet::new(2 * LIMIT, LIMIT);
    for page in 0..2 * LIMIT {
        set.replace(page, page);
    }
    open_window(&mut set);
    let mut unused = Vec::new();
    let read = |set: &mut ResidentSet, page: u32| {
        assert_eq!(set.touch(page), Touch::Read { slot: page });
        let mut pages = vec![page];
        set.read_ahead(page, &mut pages);
        for page in &pages {
            set.read_done(*page, *page);
        }
        pages.len() - 1
    };
    for number in 0..9 {
        assert_eq!(read(&mut set, 8 * number), 7);
        set.take_unused(&mut unused);
    }
    assert_eq!(unused, [], "63 pages");
    assert_eq!(read(&mut set, 72), 7);
    set.take_unused(&mut unused);
    assert_eq!(unused, [1, 2, 3, 4, 5, 6]);
    assert_eq!(set.state(1), PageState::PagedOut);
    assert_eq!((set.counts().read_ahead, set.ahead().unused_pages()), (64, 6));
    // A lower limit has room for fewer.
    set.set_limit(1);
    set.take_unused(&mut unused);
    assert_eq!(set.counts().read_ahead, 0);
    assert_eq!(set.counts().in_memory(), 10);
}

#[test]
fn page_that_was_read_back_keeps_its_slot_and_leaves_without_a_write_if_it_is_unchanged() {
    let mut set = ResidentSet::new(2 * LIMIT, LIMIT);
    for page in 0..=LIMIT {
        set.replace(page, 10 + page);
        set.touch(page);
        assert_eq!(set.read_done(page, 10 + page), ReadDone::Map);
    }
    trimmed(&mut set);
    assert_eq!(taken(&mut set, 4), [0, 1, 2, 3]);
    assert_eq!((set.mapped(0), set.slot(0)), (None, Some(10)));
    assert!(!set.has_slots_content(0), "it may have changed");
    assert!(set.written(0, Content::Unchanged(10)));
    assert_eq!((set.state(0), set.slot(0)), (PageState::PagedOut, Some(10)));
    assert_eq!(set.release_former(1), Some(11));
    assert_eq!(set.release_former(1), None);
    assert!(set.written(1, Content::Slot(5)));
    assert_eq!(set.slot(1), Some(5));
    assert_eq!(set.release_former(1), None, "the slot is its only place");
    // Its slot was freed after the comparison: it is written later.
    assert_eq!(set.release_former(2), Some(12));
    assert!(!set.written(2, Content::Unchanged(12)));
    assert_eq!(set.state(2), PageState::SecondChance);
    assert_eq!(set.counts().writing, 1);
}

#[test]
fn slots_that_pages_in_memory_have_kept_are_freed_once_and_none_is_kept_afterwards() {
    let mut set = ResidentSet::new(LIMIT, LIMIT);
    for page in 0..4 {
        set.replace(page, 10 + page);
    }
    for page in 0..2 {
        set.touch(page);
        set.read_done(page, 10 + page);
    }
    assert!(set.keeps_slots());
    assert_eq!(
        set.stop_keeping_slots(),
        [10, 11],
        "the others are in their slots only"
    );
    assert!(!set.keeps_slots());
    set.touch(2);
    set.read_done(2, 12);
    assert_eq!(set.stop_keeping_slots(), [], "one pass is enough");
    assert_eq!(set.release_former(2), Some(12));
}

#[test]
#[should_panic(expected = "leaves its former slot")]
fn loss_of_a_former_slot_is_a_bug() {
    let mut set = ResidentSet::new(LIMIT, 1);
    for page in 0..200 {
        set.replace(page, page);
        set.touch(page);
        set.read_done(page, page);
    }
    trimmed(&mut set);
    let page = taken(&mut set, 1)[0];
    set.written(page, Content::Zero);
}

#[test]
fn page_that_is_released_while_it_is_read_is_zero() {
    let mut set = touched(LIMIT + 1);
    trimmed(&mut set);
    for page in taken(&mut set, 1) {
        set.written(page, Content::Slot(4));
    }
    assert_eq!(set.touch(0), Touch::Read { slot: 4 });
    assert_eq!(set.release(0), Some(4));
    assert_eq!(set.read_done(0, 4), ReadDone::Drop);
    assert_eq!(set.touch(0), Touch::MapZero);
    assert_eq!(set.counts().reading, 0);
}

#[test]
fn lower_limit_trims_and_a_higher_one_does_not() {
    let mut set = ResidentSet::new(4 * LIMIT, 4 * LIMIT);
    for page in 0..2 * LIMIT {
        set.touch(page);
    }
    assert_eq!(trimmed(&mut set), []);
    set.set_limit(LIMIT);
    assert_eq!(trimmed(&mut set).len() as u32, 2 * LIMIT - FIFO);
    assert_eq!(
        taken(&mut set, WRITE_CLUSTER_PAGES).len() as u32,
        WRITE_CLUSTER_PAGES
    );
    set.set_limit(0);
    assert_eq!(set.counts().limit, 1);
}

/// Model of a page: its state, and the number that the last write of it left there.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ModelPage {
    state: PageState,
    content: u64,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A guest writes and reads numbers through the set, a model of the memory file and slots with reference
    /// counts, in any order of steps. It always reads what it wrote last, each page is in one state, and no
    /// slot leaks.
    #[test]
    fn no_page_is_lost_whatever_the_order_of_steps(
        steps in prop::collection::vec((0_u8..13, any::<u16>()), 1..300),
    ) {
        let (pages, limit) = (400, 128);
        let mut set = ResidentSet::new(pages, limit);
        let mut slots = PagingSlots::new(150).with_images(ImageSlots::new(150, [100]));
        set.set_image_slots(150);
        let mut cached = BTreeMap::<u32, u64>::new();
        let of_image = |page: u64| (slots.images().slot(0, page).unwrap(), 1 << 40 | page);
        let mut stored: BTreeMap<u32, u64> = (0..100).map(of_image).collect();
        let mut wrote = BTreeMap::<u32, u64>::new();
        let mut writing = Vec::<(u32, u64, Content)>::new();
        let mut reading = Vec::<(u32, u32, u64)>::new();
        let mut next = 1;
        let mut press = 0;
        for (kind, number) in steps {
            let page = u32::from(number) % 100;
            match kind {
                // The guest touches pages, and writes one of them.
                0..=2 => {
                    let range = if kind == 0 {
                        press = (press + 90) % (pages - 90);
                        press..press + 90
                    } else {
                        page..page + 1
                    };
                    for page in range {
                        match set.touch(page) {
                            Touch::MapZero => {
                                prop_assert_eq!(wrote.get(&page).copied().unwrap_or(0), 0);
                                cached.insert(page, 0);
                            }
                            Touch::MapCached(_) => prop_assert!(cached.contains_key(&page)),
                            Touch::Read { slot } => {
                                let mut pages = vec![page];
                                set.read_ahead(slot, &mut pages);
                                for (slot, page) in (slot..).zip(pages) {
                                    prop_assert!(slots.share_for_read(slot));
                                    reading.push((page, slot, stored[&slot]));
                                }
                                continue;
                            }
                            Touch::Wait => continue,
                        }
                        prop_assert_eq!(cached[&page], wrote.get(&page).copied().unwrap_or(0));
                        if number % 3 != 0 {
                            cached.insert(page, next);
                            wrote.insert(page, next);
                            next += 1;
                            // The former slot may be freed at any time.
                            if number % 2 == 0 && let Some(slot) = set.release_former(page) {
                                slots.release(slot);
                            }
                        }
                    }
                }
                3 => {
                    let mut trimmed = Vec::new();
                    set.trim(u32::from(number), &mut trimmed);
                    for page in trimmed {
                        prop_assert!(cached.contains_key(&page));
                    }
                }
                4 if writing.is_empty() => {
                    let mut taken = Vec::new();
                    set.take_for_writing(u32::from(number) % 70, &mut taken);
                    for page in taken {
                        let content = cached[&page];
                        match set.slot(page) {
                            Some(slot) if stored[&slot] == content => {
                                writing.push((page, content, Content::Unchanged(slot)));
                                continue;
                            }
                            _ => {
                                if let Some(slot) = set.release_former(page) {
                                    slots.release(slot);
                                }
                            }
                        }
                        if content == 0 {
                            writing.push((page, content, Content::Zero));
                        } else if let Some(run) = slots.allocate(1) {
                            stored.insert(run.start, content);
                            writing.push((page, content, Content::Slot(run.start)));
                        } else {
                            set.not_written(&[page]);
                        }
                    }
                }
                5 => for (page, content, place) in writing.drain(..) {
                    if set.written(page, place) {
                        prop_assert_eq!(cached.remove(&page), Some(content));
                    } else if let Content::Slot(slot) = place {
                        slots.release(slot);
                    }
                },
                6 => {
                    for (page, slot, content) in reading.drain(..) {
                        if set.read_done(page, slot) != ReadDone::Drop {
                            prop_assert_eq!(cached.insert(page, content), None);
                        }
                        slots.release(slot);
                    }
                    let mut unused = Vec::new();
                    set.take_unused(&mut unused);
                    for page in unused {
                        prop_assert_eq!(cached.remove(&page), wrote.get(&page).copied());
                    }
                }
                7 => {
                    if let Some(slot) = set.release(page) {
                        slots.release(slot);
                    }
                    cached.remove(&page);
                    wrote.remove(&page);
                }
                8 => set.set_limit(u32::from(number) % (2 * limit)),
                9 => set.link(page, u32::from(number) % 399),
                // A disk fills a page in memory from the image. The origin that is recorded may be wrong.
                10..=11 => {
                    let origin = slots.images().slot(0, page.into()).unwrap();
                    if let Touch::MapZero | Touch::MapCached(_) = set.touch(page) {
                        cached.insert(page, stored[&origin]);
                        wrote.insert(page, stored[&origin]);
                    }
                    if let Some(slot) = set.set_origin(page + u32::from(number % 5 == 0), origin) {
                        slots.release(slot);
                    }
                }
                _ => if number % 16 == 0 {
                    for slot in set.stop_keeping_slots() {
                        slots.release(slot);
                    }
                },
            }
            let counts = set.counts();
            let mut by_state = Counts { limit: counts.limit, ..Counts::default() };
            for page in 0..pages {
                let content = wrote.get(&page).copied().unwrap_or(0);
                let model = ModelPage { state: set.state(page), content };
                match model.state {
                    PageState::Zero => prop_assert_eq!(model.content, 0),
                    PageState::Resident => by_state.resident += 1,
                    PageState::SecondChance => by_state.second_chance += 1,
                    PageState::Writing => by_state.writing += 1,
                    PageState::PagedOut => {
                        by_state.paged_out += 1;
                        by_state.in_images += u32::from(set.slot(page) > Some(150));
                    }
                    PageState::Reading | PageState::ReadingAhead => by_state.reading += 1,
                    PageState::ReadAhead => by_state.read_ahead += 1,
                }
                if model.state == PageState::Zero {
                    prop_assert_eq!(set.slot(page), None);
                }
                if set.has_slots_content(page) {
                    prop_assert_eq!(stored[&set.slot(page).unwrap()], model.content);
                }
                let in_memory = set.is_in_memory(page).then_some(model.content);
                prop_assert_eq!(cached.get(&page).copied(), in_memory);
            }
            // Each reference is that of a page, of a read or of a write.
            let mut references = BTreeMap::<u32, u16>::new();
            let of_pages = (0..pages).filter_map(|page| set.slot(page));
            let of_writes = writing.iter().filter_map(|(.., place)| match place {
                Content::Slot(slot) => Some(*slot),
                Content::Zero | Content::Unchanged(_) => None,
            });
            let of_reads = reading.iter().map(|(_, slot, _)| *slot);
            for slot in of_pages.chain(of_writes).chain(of_reads) {
                *references.entry(slot).or_default() += 1;
            }
            for slot in 0..slots.capacity() {
                prop_assert_eq!(slots.references(slot), references.get(&slot).copied().unwrap_or(0));
            }
            prop_assert_eq!(counts, by_state);
            prop_assert_eq!(counts.in_memory() - counts.reading, cached.len() as u32);
        }
    }
}
