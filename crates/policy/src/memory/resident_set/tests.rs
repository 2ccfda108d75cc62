use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::memory::paging_slots::PagingSlots;

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
    assert_eq!(set.touch(3), Touch::MapCached { saved_io: false });
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
    assert_eq!(set.touch(0), Touch::MapCached { saved_io: true });
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
    assert!(set.written(0, Some(77)));
    assert!(set.written(1, None), "zeroes need no slot");
    assert_eq!((set.state(0), set.slot(0)), (PageState::PagedOut, Some(77)));
    assert_eq!(set.touch(1), Touch::MapZero);
    assert_eq!(set.touch(0), Touch::Read { slot: 77 });
    assert_eq!(set.touch(0), Touch::Wait);
    assert!(set.read_done(0, 77));
    assert_eq!(set.touch(0), Touch::MapCached { saved_io: false });
}

#[test]
fn page_that_is_touched_while_it_is_written_stays_in_memory() {
    let mut set = touched(LIMIT + 1);
    trimmed(&mut set);
    assert_eq!(taken(&mut set, 2), [0, 1]);
    assert_eq!(set.touch(0), Touch::MapCached { saved_io: true });
    assert_eq!(set.release(1), None);
    assert!(!set.written(0, Some(5)));
    assert!(!set.written(1, Some(6)));
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
        set.written(page, Some(if page == 3 { 99 } else { 10 + page }));
    }
    assert_eq!(set.touch(0), Touch::Read { slot: 10 });
    assert_eq!(set.read_ahead(0, 10, 1), 1);
    assert_eq!(set.touch(1), Touch::Wait);
    assert_eq!(set.touch(2), Touch::Read { slot: 12 });
    assert_eq!(set.read_ahead(2, 12, 7), 0);
    assert_eq!(set.touch(4), Touch::Read { slot: 14 });
    // Page 6 is in memory.
    assert_eq!(set.read_ahead(4, 14, 7), 1);
    let last = set.pages() - 1;
    assert_eq!(set.read_ahead(last, 3, 7), 0, "no page follows the last");
}

#[test]
fn page_that_is_released_while_it_is_read_is_zero() {
    let mut set = touched(LIMIT + 1);
    trimmed(&mut set);
    for page in taken(&mut set, 1) {
        set.written(page, Some(4));
    }
    assert_eq!(set.touch(0), Touch::Read { slot: 4 });
    assert_eq!(set.release(0), Some(4));
    assert!(!set.read_done(0, 4));
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
        steps in prop::collection::vec((0_u8..9, any::<u16>()), 1..300),
    ) {
        let (pages, limit) = (400, 128);
        let mut set = ResidentSet::new(pages, limit);
        let mut slots = PagingSlots::new(150);
        let mut cached = BTreeMap::<u32, u64>::new();
        let mut stored = BTreeMap::<u32, u64>::new();
        let mut wrote = BTreeMap::<u32, u64>::new();
        let mut writing = Vec::<(u32, u64, Option<u32>)>::new();
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
                            Touch::MapCached { .. } => prop_assert!(cached.contains_key(&page)),
                            Touch::Read { slot } => {
                                prop_assert!(slots.share_for_read(slot));
                                reading.push((page, slot, stored[&slot]));
                                continue;
                            }
                            Touch::Wait => continue,
                        }
                        prop_assert_eq!(cached[&page], wrote.get(&page).copied().unwrap_or(0));
                        if number % 3 != 0 {
                            cached.insert(page, next);
                            wrote.insert(page, next);
                            next += 1;
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
                        let slot = (content != 0).then(|| slots.allocate(1)).flatten();
                        if content != 0 && slot.is_none() {
                            set.not_written(&[page]);
                            continue;
                        }
                        if let Some(slot) = slot.as_ref() {
                            stored.insert(slot.start, content);
                        }
                        writing.push((page, content, slot.map(|run| run.start)));
                    }
                }
                5 => for (page, content, slot) in writing.drain(..) {
                    if set.written(page, slot) {
                        prop_assert_eq!(cached.remove(&page), Some(content));
                    } else if let Some(slot) = slot {
                        slots.release(slot);
                    }
                },
                6 => for (page, slot, content) in reading.drain(..) {
                    if set.read_done(page, slot) {
                        prop_assert_eq!(cached.insert(page, content), None);
                        slots.release(slot);
                    }
                    slots.release(slot);
                },
                7 => {
                    if let Some(slot) = set.release(page) {
                        slots.release(slot);
                    }
                    cached.remove(&page);
                    wrote.remove(&page);
                }
                _ => set.set_limit(u32::from(number) % (2 * limit)),
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
                    PageState::PagedOut => by_state.paged_out += 1,
                    PageState::Reading => by_state.reading += 1,
                }
                match model.state {
                    PageState::Zero => prop_assert!(!cached.contains_key(&page)),
                    PageState::PagedOut | PageState::Reading => {
                        let slot = set.slot(page).unwrap();
                        prop_assert_eq!(stored[&slot], model.content);
                        prop_assert!(slots.references(slot) > 0);
                    }
                    _ => prop_assert_eq!(cached[&page], model.content),
                }
            }
            prop_assert_eq!(counts, by_state);
            prop_assert_eq!(counts.in_memory() - counts.reading, cached.len() as u32);
        }
        // Nothing leaks: each used slot is that of a page, of a read or of a write.
        let of_pages = (0..pages).filter(|page| set.slot(*page).is_some()).count();
        let of_writes = writing.iter().filter(|(.., slot)| slot.is_some()).count();
        let of_released = reading.iter().filter(|(page, slot, _)| set.slot(*page) != Some(*slot)).count();
        prop_assert_eq!(slots.capacity() - slots.free(), (of_pages + of_writes + of_released) as u32);
    }
}
