use proptest::prelude::*;

use super::*;
use crate::memory::paging_slots::PagingSlots;
use crate::memory::resident_set::{
    Cached, Content, LIMIT_MIN_PAGES, ReadDone, ResidentSet, Touch, WRITE_CLUSTER_PAGES,
};

#[test]
fn window_grows_while_pages_are_used_and_is_trusted_at_its_end() {
    let mut ahead = ReadAhead::default();
    let mut windows = Vec::new();
    for _ in 0..12 {
        windows.push(ahead.plan(0).pages);
        ahead.used();
    }
    assert_eq!(windows, [1, 1, 1, 1, 3, 3, 3, 3, 7, 7, 7, 7]);
    let trusted = Plan {
        pages: 7,
        unmapped: 1,
    };
    assert_eq!(ahead.plan(TRUSTED_WAITING_PAGES), trusted);
    let watched = Plan {
        pages: 7,
        unmapped: 7,
    };
    assert_eq!(
        ahead.plan(TRUSTED_WAITING_PAGES + 1),
        watched,
        "many wait for a verdict"
    );
    ahead.unused();
    assert_eq!(ahead.plan(0), watched);
}

#[test]
fn closed_window_brings_one_page_in_sixteen_reads_until_one_is_used() {
    let mut ahead = ReadAhead::default();
    (0..SCORE_END).for_each(|_| ahead.unused());
    assert_eq!(ahead.window(), 0);
    let mut brought = Vec::new();
    for read in 1..=100 {
        let Plan { pages, .. } = ahead.plan(0);
        // The reads of 40 to 50 have no neighbours.
        let pages = if (40..=50).contains(&read) { 0 } else { pages };
        ahead.read(pages);
        if pages > 0 {
            brought.push(read);
            ahead.unused();
        }
    }
    assert_eq!(brought, [16, 32, 51, 67, 83, 99]);
    assert_eq!(ahead.read_pages(), 6);
    ahead.used();
    ahead.unused();
    assert_eq!(ahead.window(), 1);
    ahead.unused();
    assert_eq!(ahead.window(), 0, "the window is on probation");
    ahead.used();
    ahead.used();
    (0..3).for_each(|_| ahead.unused());
    assert_eq!(ahead.window(), 1, "others were used before");
}

proptest! {
    /// From any state, a limited number of verdicts brings the longest window, or closes it, whatever the
    /// order of verdicts of the other kind among them, as long as these are few.
    #[test]
    fn window_follows_the_use_of_pages_from_any_state(
        before in prop::collection::vec(any::<bool>(), 0..200),
        start in 0_u32..10,
    ) {
        let mut ahead = ReadAhead::default();
        for used in before {
            let plan = ahead.plan(0);
            prop_assert!([0, 1, 3, 7].contains(&ahead.window()));
            prop_assert!(plan.pages <= WINDOW_MAX && plan.unmapped <= plan.pages);
            prop_assert!(plan.pages == 0 || plan.unmapped > 0, "each read has a page for a verdict");
            if used { ahead.used() } else { ahead.unused() }
        }
        let (mut grown, mut closed) = (ahead.clone(), ahead);
        // Half of the pages are used.
        for number in 0..100 {
            if (number + start) % 2 == 0 { grown.used() } else { grown.unused() }
        }
        prop_assert_eq!(grown.window(), WINDOW_MAX);
        // One page in ten is used: the window closes, and opens on probation only.
        let mut windows = 0;
        for number in 0..200 {
            if (number + start) % 10 == 0 { closed.used() } else { closed.unused() }
            windows += if number < 100 { 0 } else { closed.window() };
        }
        prop_assert!(windows <= 50, "{}", windows);
    }
}

/// A paged memory of twice the limit, whose reads and writes end at once.
struct Memory {
    set: ResidentSet,
    slots: PagingSlots,
    faults: Faults,
}

/// Numbers of events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Faults {
    reads: u32,
    read_pages: u32,
    without_io: u32,
}

const LIMIT: u32 = LIMIT_MIN_PAGES;
const PAGES: u32 = 2 * LIMIT;

impl Memory {
    /// The pages were written in order, so that neighbours are in neighbouring slots.
    fn new() -> Self {
        let mut memory = Self {
            set: ResidentSet::new(PAGES, LIMIT),
            slots: PagingSlots::new(2 * PAGES),
            faults: Faults::default(),
        };
        for page in 0..PAGES {
            memory.touch(page);
        }
        memory
    }

    fn touch(&mut self, page: u32) {
        match self.set.touch(page) {
            Touch::MapZero | Touch::MapCached(Cached::Resident) => {}
            Touch::MapCached(_) => self.faults.without_io += 1,
            Touch::Read { slot } => {
                let mut pages = vec![page];
                self.set.read_ahead(slot, &mut pages);
                self.faults.reads += 1;
                self.faults.read_pages += pages.len() as u32;
                for (slot, page) in (slot..).zip(pages) {
                    assert_ne!(self.set.read_done(page, slot), ReadDone::Drop);
                }
            }
            Touch::Wait => panic!("reads end at once"),
        }
        self.set.take_unused(&mut Vec::new());
        self.set.trim(u32::MAX, &mut Vec::new());
        let mut taken = Vec::new();
        self.set.take_for_writing(WRITE_CLUSTER_PAGES, &mut taken);
        taken.sort_unstable();
        for page in taken {
            let content = match self.set.slot(page) {
                Some(slot) => Content::Unchanged(slot),
                None => Content::Slot(self.slots.allocate(1).unwrap().start),
            };
            assert!(self.set.written(page, content));
        }
    }

    /// Touches pages, and returns the faults.
    fn run(&mut self, order: impl Iterator<Item = u32>) -> Faults {
        self.faults = Faults::default();
        order.for_each(|page| self.touch(page));
        self.faults
    }
}

/// Pages without a pattern.
fn random(count: u32) -> impl Iterator<Item = u32> {
    let mut state = 1_u64;
    (0..count).map(move |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % PAGES
    })
}

#[test]
fn sequential_order_takes_two_faults_for_eight_pages() {
    let mut memory = Memory::new();
    memory.run(0..PAGES);
    let faults = memory.run(0..PAGES);
    assert_eq!(faults.read_pages, PAGES, "each page is read once");
    assert!(faults.reads <= PAGES / 8 + 2, "{faults:?}");
    assert!(faults.without_io <= PAGES / 8 + 2, "{faults:?}");
}

#[test]
fn random_order_reads_little_more_than_the_touched_pages() {
    let mut memory = Memory::new();
    let faults = memory.run(random(4 * PAGES));
    assert!(faults.reads >= PAGES, "{faults:?}");
    assert!(
        f64::from(faults.read_pages) <= 1.12 * f64::from(faults.reads),
        "{faults:?}"
    );
}

#[test]
fn window_follows_a_change_of_the_order_within_few_reads() {
    let mut memory = Memory::new();
    memory.run(0..PAGES);
    memory.run(random(PAGES));
    assert_eq!(memory.set.ahead().window(), 0);
    // The scan begins where nothing is in memory.
    let faults = memory.run(0..PAGES);
    assert_eq!(memory.set.ahead().window(), WINDOW_MAX);
    assert!(faults.reads <= PAGES / 4, "{faults:?}");
    let faults = memory.run(random(1000));
    assert!(faults.read_pages - faults.reads <= 250, "{faults:?}");
}

#[test]
fn several_sequential_orders_at_once_keep_the_window_open() {
    let mut memory = Memory::new();
    memory.run(0..PAGES);
    let streams = 8;
    let part = PAGES / streams;
    let order = || (0..part).flat_map(move |at| (0..streams).map(move |stream| stream * part + at));
    memory.run(order());
    let faults = memory.run(order());
    assert_eq!(memory.set.ahead().window(), WINDOW_MAX);
    assert!(faults.reads <= PAGES / 6, "{faults:?}");
}
