use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::memory::resident_set::{Content, LIMIT_MIN_PAGES, ReadDone, Touch, WRITE_CLUSTER_PAGES};

/// Sets of which page 0 is paged out to slot 0, and page 1 is in memory.
fn paged_out() -> (ResidentSet, PagingSlots) {
    let mut set = ResidentSet::new(2 * LIMIT_MIN_PAGES, LIMIT_MIN_PAGES);
    for page in 0..=LIMIT_MIN_PAGES {
        set.touch(page);
    }
    let mut pages = Vec::new();
    set.trim(u32::MAX, &mut pages);
    pages.clear();
    set.take_for_writing(1, &mut pages);
    assert_eq!(pages, [0]);
    let mut slots = PagingSlots::new(1000);
    let slot = slots.allocate(1).unwrap().start;
    assert!(set.written(0, Content::Slot(slot)));
    (set, slots)
}

#[test]
fn page_that_is_paged_out_is_put_and_fetched_without_its_bytes() {
    let (mut set, mut slots) = paged_out();
    let mut disk = PagingDisk::new(8);
    assert_eq!(disk.put(3, 0, &set, &mut slots), Put::Shared);
    assert_eq!((disk.slot(3), slots.references(0)), (Some(0), 2));
    // A rewrite with the same slot keeps it.
    assert_eq!(disk.put(3, 0, &set, &mut slots), Put::Shared);
    assert_eq!(slots.references(0), 2);
    let last = set.pages() - 1;
    assert_eq!(
        disk.fetch(3, last, &mut set, &mut slots),
        Fetch::Shared { remove: false }
    );
    assert_eq!((set.slot(last), slots.references(0)), (Some(0), 3));
    // A page in memory has to be removed.
    assert_eq!(
        disk.fetch(3, 1, &mut set, &mut slots),
        Fetch::Shared { remove: true }
    );
    assert_eq!(set.touch(1), Touch::Read { slot: 0 });
    assert_eq!(disk.put(4, 1, &set, &mut slots), Put::Shared, "while it is read");
    disk.set(3, None, &mut slots);
    disk.set(4, None, &mut slots);
    assert_eq!((slots.references(0), disk.used()), (3, 0));
}

#[test]
fn page_in_memory_is_copied_and_zeroes_need_no_slot() {
    let (mut set, mut slots) = paged_out();
    let mut disk = PagingDisk::new(8);
    assert_eq!(disk.put(0, 1, &set, &mut slots), Put::Copy);
    assert_eq!(disk.slot(0), None, "until it is copied");
    let slot = slots.allocate(1).unwrap().start;
    disk.set(0, Some(slot), &mut slots);
    let zero = set.pages() - 1;
    assert_eq!(disk.put(0, zero, &set, &mut slots), Put::Zero);
    assert_eq!((disk.slot(0), slots.references(slot), disk.used()), (None, 0, 0));
    assert_eq!(
        disk.fetch(0, 0, &mut set, &mut slots),
        Fetch::Zero { remove: false }
    );
    assert_eq!(
        slots.references(0),
        0,
        "the guest's page was the last to refer to it"
    );
    assert_eq!(
        disk.fetch(0, 1, &mut set, &mut slots),
        Fetch::Zero { remove: true }
    );
    assert_eq!(set.touch(1), Touch::MapZero);
}

#[test]
fn slot_with_too_many_references_is_copied() {
    let (mut set, mut slots) = paged_out();
    let mut disk = PagingDisk::new(2);
    assert_eq!(disk.put(0, 0, &set, &mut slots), Put::Shared);
    while slots.share(0) {}
    assert_eq!(disk.put(1, 0, &set, &mut slots), Put::ReadAndCopy);
    assert_eq!(disk.fetch(0, 1, &mut set, &mut slots), Fetch::Copy);
    assert!(set.is_in_memory(1), "nothing has changed");
    assert!(slots.share_for_read(0), "the page can be read");
}

/// Guest, pager and disk with numbers as contents of pages.
struct World {
    set: ResidentSet,
    slots: PagingSlots,
    disk: PagingDisk,
    /// Contents of pages in memory.
    cached: BTreeMap<u32, u64>,
    /// Contents of slots.
    stored: BTreeMap<u32, u64>,
    /// Pages that are being written: their content and its place.
    writing: Vec<(u32, u64, Content)>,
    /// Reads of slots in flight.
    reading: Vec<(u32, u32, u64)>,
    /// Contents that the guest's and the disk's pages must have.
    guest: BTreeMap<u32, u64>,
    on_disk: BTreeMap<u32, u64>,
    next: u64,
}

const PAGES: u32 = 400;
const GUEST_PAGES: u32 = 60;
const DISK_PAGES: u32 = 40;

impl World {
    fn new() -> Self {
        Self {
            set: ResidentSet::new(PAGES, 128),
            slots: PagingSlots::new(4 * PAGES),
            disk: PagingDisk::new(DISK_PAGES),
            cached: BTreeMap::new(),
            stored: BTreeMap::new(),
            writing: Vec::new(),
            reading: Vec::new(),
            guest: BTreeMap::new(),
            on_disk: BTreeMap::new(),
            next: 1,
        }
    }

    fn content(&self, page: u32) -> u64 {
        self.guest.get(&page).copied().unwrap_or(0)
    }

    /// The guest touches a page, checks it, and may write it.
    fn access(&mut self, page: u32, writes: bool) {
        match self.set.touch(page) {
            Touch::MapZero => {
                self.cached.insert(page, 0);
            }
            Touch::MapCached(_) => {}
            Touch::Read { slot } => {
                let mut pages = vec![page];
                self.set.read_ahead(slot, &mut pages);
                for (slot, page) in (slot..).zip(pages) {
                    assert!(self.slots.share_for_read(slot));
                    self.reading.push((page, slot, self.stored[&slot]));
                }
                return;
            }
            Touch::Wait => return,
        }
        assert_eq!(self.cached[&page], self.content(page), "page {page}");
        if writes {
            self.cached.insert(page, self.next);
            self.guest.insert(page, self.next);
            self.next += 1;
        }
    }

    fn take(&mut self) {
        let (mut trimmed, mut taken) = (Vec::new(), Vec::new());
        self.set.trim(u32::MAX, &mut trimmed);
        if !self.writing.is_empty() {
            return;
        }
        self.set.take_for_writing(WRITE_CLUSTER_PAGES, &mut taken);
        for page in taken {
            let content = self.cached[&page];
            let former = self.set.slot(page);
            let place = match former {
                Some(slot) if self.stored[&slot] == content => Content::Unchanged(slot),
                _ => {
                    if let Some(slot) = self.set.release_former(page) {
                        self.slots.release(slot);
                    }
                    match content {
                        0 => Content::Zero,
                        _ => Content::Slot(self.allocate(content)),
                    }
                }
            };
            self.writing.push((page, content, place));
        }
    }

    fn allocate(&mut self, content: u64) -> u32 {
        // There are as many slots as all pages together can have.
        let slot = self.slots.allocate(1).expect("a free slot").start;
        self.stored.insert(slot, content);
        slot
    }

    fn commit(&mut self) {
        for (page, content, place) in std::mem::take(&mut self.writing) {
            if self.set.written(page, place) {
                assert_eq!(self.cached.remove(&page), Some(content));
            } else if let Content::Slot(slot) = place {
                self.slots.release(slot);
            }
        }
    }

    fn finish_reads(&mut self) {
        for (page, slot, content) in std::mem::take(&mut self.reading) {
            assert_eq!(
                self.stored[&slot], content,
                "a slot is immutable while it is read"
            );
            if self.set.read_done(page, slot) != ReadDone::Drop {
                assert_eq!(self.cached.insert(page, content), None);
            }
            self.slots.release(slot);
        }
        let mut unused = Vec::new();
        self.set.take_unused(&mut unused);
        for page in unused {
            assert_eq!(self.cached.remove(&page), Some(self.content(page)));
        }
    }

    fn put(&mut self, at: u32, page: u32) {
        match self.disk.put(at, page, &self.set, &mut self.slots) {
            Put::Zero | Put::Shared => {}
            Put::Copy => {
                let content = self.cached[&page];
                let former = self.set.slot(page);
                if let Some(slot) = former.filter(|slot| self.stored[slot] == content) {
                    assert!(self.disk.share(at, slot, &mut self.slots));
                    self.on_disk.insert(at, content);
                    return;
                }
                let slot = (content != 0).then(|| self.allocate(content));
                self.disk.set(at, slot, &mut self.slots);
            }
            Put::ReadAndCopy => panic!("few references"),
        }
        self.on_disk.insert(at, self.content(page));
    }

    fn fetch(&mut self, at: u32, page: u32) {
        let before = self.set.pages() - 1 - page;
        self.set.link(before % GUEST_PAGES, page);
        match self.disk.fetch(at, page, &mut self.set, &mut self.slots) {
            Fetch::Zero { remove } | Fetch::Shared { remove } => {
                assert_eq!(self.cached.remove(&page).is_some(), remove);
            }
            Fetch::Copy => panic!("few references"),
        }
        let content = self.on_disk.get(&at).copied().unwrap_or(0);
        self.guest.insert(page, content);
        if at.is_multiple_of(3) {
            // The request has more pages, of which some are read at once.
            let mut pages = vec![page, before % GUEST_PAGES, page];
            pages.truncate(1 + page as usize % 3);
            self.set.read_moved(&mut pages);
            for page in pages {
                let slot = self.set.slot(page).unwrap();
                assert!(self.slots.share_for_read(slot));
                self.reading.push((page, slot, self.stored[&slot]));
            }
        }
    }

    fn check(&self) {
        for page in 0..PAGES {
            let content = self.content(page);
            if self.set.state(page) == PageState::Zero {
                assert_eq!((content, self.set.slot(page)), (0, None), "page {page}");
            }
            if self.set.has_slots_content(page) {
                let slot = self.set.slot(page).unwrap();
                assert_eq!(self.stored[&slot], content, "page {page}");
            }
            let in_memory = self.set.is_in_memory(page).then_some(content);
            assert_eq!(self.cached.get(&page).copied(), in_memory, "page {page}");
        }
        let mut references = BTreeMap::<u32, u16>::new();
        let mut count = |slot: Option<u32>| {
            if let Some(slot) = slot {
                *references.entry(slot).or_default() += 1;
            }
        };
        for at in 0..DISK_PAGES {
            let content = self.disk.slot(at).map_or(0, |slot| self.stored[&slot]);
            assert_eq!(
                content,
                self.on_disk.get(&at).copied().unwrap_or(0),
                "disk page {at}"
            );
            count(self.disk.slot(at));
        }
        (0..PAGES).for_each(|page| count(self.set.slot(page)));
        for (.., place) in &self.writing {
            if let Content::Slot(slot) = place {
                count(Some(*slot));
            }
        }
        self.reading.iter().for_each(|(_, slot, _)| count(Some(*slot)));
        for slot in 0..self.slots.capacity() {
            let expected = references.get(&slot).copied().unwrap_or(0);
            assert_eq!(self.slots.references(slot), expected, "slot {slot}");
        }
        let used = (0..DISK_PAGES).filter(|at| self.disk.slot(*at).is_some()).count();
        assert_eq!(self.disk.used() as usize, used);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A guest writes pages, and swaps them to the disk and back, while they are paged out and read in any
    /// order. Each page of the guest and of the disk has the content that was written there last, and each
    /// reference to a slot is counted.
    #[test]
    fn guest_and_disk_keep_their_contents_whatever_the_order_of_steps(
        steps in prop::collection::vec((0_u8..9, any::<u16>(), any::<u16>()), 1..250),
    ) {
        let mut world = World::new();
        let mut press = 0;
        for (kind, first, second) in steps {
            let (page, at) = (u32::from(first) % GUEST_PAGES, u32::from(second) % DISK_PAGES);
            match kind {
                0 => {
                    // The guest uses so many other pages that the former ones leave memory.
                    press = (press + 90) % (PAGES - GUEST_PAGES - 90);
                    for other in press..press + 90 {
                        world.access(GUEST_PAGES + other, second % 2 == 0);
                    }
                }
                1 => world.access(page, true),
                2 => (page..GUEST_PAGES).for_each(|page| world.access(page, second % 3 == 0)),
                3 => world.take(),
                4 => world.commit(),
                5 => world.finish_reads(),
                6 => world.put(at, page),
                7 => world.fetch(at, page),
                _ => {
                    world.disk.set(at, None, &mut world.slots);
                    world.on_disk.remove(&at);
                    if let Some(slot) = world.set.release(page) {
                        world.slots.release(slot);
                    }
                    world.cached.remove(&page);
                    world.guest.remove(&page);
                }
            }
            world.check();
        }
    }
}
