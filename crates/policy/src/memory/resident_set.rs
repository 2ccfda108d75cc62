//! The resident set of a VM: a second-chance FIFO of its pages, "similar to VMS" (Cellular Disco, section
//! 5.3).
//!
//! Pages leave a FIFO in the order in which they came, are unmapped, and wait in a second list. A touch there
//! puts a page back without I/O, so that no reference bits are needed. The oldest pages of the second list
//! are written out. The caller maps, unmaps, reads and writes; this state machine says which pages.
//!
//! ```text
//!           touch                trim                  take_for_writing
//!   Zero ----------> Resident ----------> SecondChance ----------------> Writing
//!                     ^  ^  ^                |                            |  |  |
//!                     |  |  +----- touch ----+             touch: Resident  |  |
//!                     |  |                                                  |  |
//!            read_done|  +-- touch -- Zero <------- written(Zero) ----------+  |
//!                     |                                                        |
//!                   Reading <--------- touch, read_ahead -- PagedOut <---------+ written
//!                     ^                                     |     ^
//!                     | touch                    read_ahead |     | take_unused
//!                     +----------------------- ReadingAhead +     |
//!                                                   | read_done   |
//!                                 Resident <-touch- ReadAhead ----+
//! ```
//!
//! [`ResidentSet::release`] makes a page of any state [`PageState::Zero`], and [`ResidentSet::replace`]
//! [`PageState::PagedOut`]. A page is in exactly one state.
//!
//! A page that was read back keeps the reference to its slot, its *former slot*, until it is written to
//! another one or [`ResidentSet::release_former`] is called. The page may have changed since: the caller
//! compares both when the page leaves memory, and writes it only if they differ. A page that a disk has
//! filled from an image has that image's slot ([`super::image_slots`]) as its former one.
//!
//! The set takes 13 bytes of memory for each page, is deterministic, and every operation but the scan for a
//! read-ahead and [`ResidentSet::stop_keeping_slots`] takes constant time for each page that it returns.

use super::read_ahead::{Plan, ReadAhead};

pub use super::page_state::{Cached, Content, Counts, PageState, ReadDone, Touch};

/// Least limit that a VM's user may set, pages: 16 MiB. The resident size of small VMs in Cellular Disco's
/// measurements is 10 to 15 MB (section 5.2).
pub const LIMIT_MIN_PAGES: u32 = 4096;
/// Part of the limit that the second-chance list has: ours, the paper gives none.
const SECOND_CHANCE_DIVISOR: u32 = 8;
/// Greatest number of pages that are written out together: 256 KiB; ours.
pub const WRITE_CLUSTER_PAGES: u32 = 64;
/// Greatest number of pages that are read together: 32 KiB; ours. A longer read delays the page that a vCPU
/// waits for, and displaces as many pages.
pub const READ_CLUSTER_PAGES: u32 = 8;

/// Greatest number of pages in memory that were read ahead and not touched: 256 KiB; ours. The oldest ones
/// beyond it leave memory.
const UNUSED_PAGES_MAX: u32 = 64;

/// Pages by which the FIFO outgrows its part of the limit before it is trimmed, so that pages are unmapped
/// together; ours.
const TRIM_SLACK_PAGES: u32 = 32;

/// End of a list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct List {
    first: u32,
    last: u32,
    pages: u32,
}

impl List {
    const EMPTY: Self = Self {
        first: NONE,
        last: NONE,
        pages: 0,
    };
}

/// The resident set of one VM.
#[derive(Debug)]
pub struct ResidentSet {
    /// [`PageState`] of each page, as a number: memory that no page has used is not touched.
    states: Vec<u8>,
    /// The page before it in its list; of a page that is paged out, the one that [follows](Self::link) it.
    before: Vec<u32>,
    after: Vec<u32>,
    /// The slot to which each page refers plus one; 0 for none. So memory that no page has used is not
    /// touched.
    slots: Vec<u32>,
    resident: List,
    second_chance: List,
    /// Pages that were read ahead, and not touched since.
    unused: List,
    ahead: ReadAhead,
    keeps_slots: bool,
    writing: u32,
    reading: u32,
    paged_out: u32,
    /// Pages among them that an image has.
    in_images: u32,
    /// The first slot of an image.
    image_slots: u32,
    limit: u32,
}

impl ResidentSet {
    /// Creates the set of `pages` pages that hold zeroes, of which `limit` may be in memory, at least one.
    pub fn new(pages: u32, limit: u32) -> Self {
        let bytes = pages as usize;
        Self {
            states: vec![0; bytes],
            before: vec![0; bytes],
            after: vec![0; bytes],
            slots: vec![0; bytes],
            resident: List::EMPTY,
            second_chance: List::EMPTY,
            unused: List::EMPTY,
            ahead: ReadAhead::default(),
            keeps_slots: true,
            writing: 0,
            reading: 0,
            paged_out: 0,
            in_images: 0,
            image_slots: u32::MAX,
            limit: limit.max(1),
        }
    }

    /// Has slots from `first` on be those of images.
    pub fn set_image_slots(&mut self, first: u32) {
        self.image_slots = first;
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u32 {
        self.states.len() as u32
    }

    /// Returns the numbers of pages by state.
    pub fn counts(&self) -> Counts {
        Counts {
            resident: self.resident.pages,
            second_chance: self.second_chance.pages,
            writing: self.writing,
            reading: self.reading,
            read_ahead: self.unused.pages,
            paged_out: self.paged_out,
            in_images: self.in_images,
            limit: self.limit,
        }
    }

    /// Sets the greatest number of pages in memory, at least one.
    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit.max(1);
    }

    /// Returns the state of a page.
    pub fn state(&self, page: u32) -> PageState {
        PageState::ALL[usize::from(self.states[page as usize])]
    }

    /// Returns the slot to which a page refers. The page may have changed since if it
    /// [is in memory](Self::is_in_memory) and was touched ([`ResidentSet::has_slots_content`]).
    pub fn slot(&self, page: u32) -> Option<u32> {
        self.slots[page as usize].checked_sub(1)
    }

    /// Returns whether the content of a page is certainly that of its slot: it was not mapped since.
    pub fn has_slots_content(&self, page: u32) -> bool {
        matches!(
            self.state(page),
            PageState::PagedOut | PageState::Reading | PageState::ReadingAhead | PageState::ReadAhead
        )
    }

    /// Returns the window of the read-ahead, and its counters.
    pub fn ahead(&self) -> &ReadAhead {
        &self.ahead
    }

    /// Returns whether the memory's file has the page.
    pub fn is_in_memory(&self, page: u32) -> bool {
        matches!(
            self.state(page),
            PageState::Resident | PageState::SecondChance | PageState::Writing | PageState::ReadAhead
        )
    }

    /// Returns whether a page that was read back keeps its slot.
    pub fn keeps_slots(&self) -> bool {
        self.keeps_slots
    }

    /// Has pages keep no slots of the paging file from now on, which needs them. Returns those that pages in
    /// memory had, in time linear in the number of all pages; pages that were not mapped since keep theirs.
    pub fn stop_keeping_slots(&mut self) -> Vec<u32> {
        if !std::mem::take(&mut self.keeps_slots) {
            return Vec::new();
        }
        (0..self.pages()).filter_map(|page| self.mapped(page)).collect()
    }

    /// Drops the former slot of a page that is about to be mapped, unless the page keeps it, and returns the
    /// slot. Whether the thread writes to the page does not matter: a vCPU that reads may be reported as one
    /// that writes.
    pub fn mapped(&mut self, page: u32) -> Option<u32> {
        let is_kept = self.keeps_slots || self.slot(page).is_none_or(|slot| self.is_image_slot(slot));
        if is_kept {
            return None;
        }
        self.release_former(page)
    }

    /// Records that a page was filled from a slot of an image, which becomes its former slot. Returns the one
    /// that it had before. A page that has left memory since, or is leaving it, stays as it is.
    pub fn set_origin(&mut self, page: u32, slot: u32) -> Option<u32> {
        if !matches!(self.state(page), PageState::Resident | PageState::SecondChance) {
            return None;
        }
        let before = self.take_slot(page);
        self.slots[page as usize] = slot + 1;
        before
    }

    /// Drops the reference of a page in memory to its former slot, which it returns: the page is about to
    /// change, or has changed.
    pub fn release_former(&mut self, page: u32) -> Option<u32> {
        if self.has_slots_content(page) {
            return None;
        }
        self.take_slot(page)
    }

    /// Records that a page was touched while it was not mapped, and returns the step that it needs.
    pub fn touch(&mut self, page: u32) -> Touch {
        match self.state(page) {
            PageState::Zero => {
                self.push_resident(page);
                Touch::MapZero
            }
            PageState::Resident => Touch::MapCached(Cached::Resident),
            PageState::SecondChance => {
                self.unlink(page);
                self.push_resident(page);
                Touch::MapCached(Cached::SecondChance)
            }
            PageState::Writing => {
                self.writing -= 1;
                self.push_resident(page);
                Touch::MapCached(Cached::SecondChance)
            }
            PageState::PagedOut => {
                self.begin_read(page, PageState::Reading);
                Touch::Read {
                    slot: self.slots[page as usize] - 1,
                }
            }
            PageState::Reading => Touch::Wait,
            PageState::ReadingAhead => {
                self.ahead.used();
                self.states[page as usize] = PageState::Reading as u8;
                Touch::Wait
            }
            PageState::ReadAhead => {
                self.ahead.used();
                self.unlink(page);
                self.push_resident(page);
                Touch::MapCached(Cached::ReadAhead)
            }
        }
    }

    /// Records that the guest has moved both pages together: a read of the first one may bring the second one
    /// too. Nothing changes unless the first one is paged out.
    pub fn link(&mut self, first: u32, second: u32) {
        if self.state(first) == PageState::PagedOut {
            self.before[first as usize] = second;
        }
    }

    /// Appends to `pages`, of which the last one is being read from `slot`, those that are read with it: each
    /// follows the one before in memory or by a [link](Self::link), and lies in the next slot. They are as
    /// many as the window has room for, and are being read from then on.
    pub fn read_ahead(&mut self, slot: u32, pages: &mut Vec<u32>) {
        let plan = self.ahead.plan(self.unused.pages);
        let first = pages.len();
        let mut last = pages.last().copied();
        for ahead in 1..=plan.pages {
            let follows = |page: &u32| {
                self.states.get(*page as usize) == Some(&(PageState::PagedOut as u8))
                    && slot.checked_add(ahead) == self.slot(*page)
            };
            let neighbours = last.map(|last| [self.before[last as usize], last.saturating_add(1)]);
            last = neighbours.and_then(|neighbours| neighbours.into_iter().find(follows));
            let Some(page) = last else { break };
            pages.push(page);
        }
        let count = (pages.len() - first) as u32;
        for (left, page) in (0..count).rev().zip(&pages[first..]) {
            let state = match left < plan.unmapped {
                true => PageState::ReadingAhead,
                false => PageState::Reading,
            };
            self.begin_read(*page, state);
        }
        self.ahead.read(count);
    }

    /// Takes those pages that are worth a read before the guest touches them, of `pages` that one request has
    /// read from the paging disk: at most [`READ_CLUSTER_PAGES`], which are being read from then on. The list
    /// has only these afterwards.
    ///
    /// A guest that reads one page is about to touch it. Of several pages, some are of its read-ahead: as
    /// many as the window has room for are taken, beside the first.
    pub fn read_moved(&mut self, pages: &mut Vec<u32>) {
        let moved = pages.len() as u32;
        let (most, unmapped) = match moved {
            0 | 1 => (moved, 0),
            _ => match self.ahead.plan(self.unused.pages) {
                Plan { pages: 0, .. } => (0, 0),
                Plan { pages, unmapped } => (pages + 1, unmapped),
            },
        };
        pages.truncate(most as usize);
        pages.retain(|page| {
            // A request may name a page twice, and the guest may have touched it since.
            let is_left = self.state(*page) == PageState::PagedOut;
            if is_left {
                self.begin_read(*page, PageState::Reading);
            }
            is_left
        });
        for page in pages.iter().rev().take(unmapped as usize) {
            self.states[*page as usize] = PageState::ReadingAhead as u8;
        }
        self.ahead.read((pages.len() as u32).saturating_sub(1));
    }

    /// Records that `slot` was read for `page`, and returns the step that the page needs. It keeps its
    /// reference to the slot.
    pub fn read_done(&mut self, page: u32, slot: u32) -> ReadDone {
        let state = self.state(page);
        if self.slot(page) != Some(slot) {
            return ReadDone::Drop;
        }
        match state {
            PageState::Reading => {
                self.reading -= 1;
                self.push_resident(page);
                ReadDone::Map
            }
            PageState::ReadingAhead => {
                self.reading -= 1;
                self.states[page as usize] = PageState::ReadAhead as u8;
                push(&mut self.unused, &mut self.before, &mut self.after, page);
                ReadDone::Keep
            }
            _ => ReadDone::Drop,
        }
    }

    /// Takes the oldest pages that were read ahead and not touched, if there are more than may be. They are
    /// paged out. The caller removes them from memory before it lets a touch be recorded.
    pub fn take_unused(&mut self, taken: &mut Vec<u32>) {
        while self.unused.pages > UNUSED_PAGES_MAX.min(self.second_chance_pages() / 2) {
            let page = self.unused.first;
            self.unlink(page);
            self.page_out(page);
            self.ahead.unused();
            taken.push(page);
        }
    }

    /// Returns whether pages should leave the FIFO or memory: [`ResidentSet::trim`] or
    /// [`ResidentSet::take_for_writing`] is due.
    pub fn needs_eviction(&self) -> bool {
        self.is_over_limit()
            || self.resident.pages > self.limit - self.second_chance_pages() + TRIM_SLACK_PAGES
    }

    /// Takes the oldest pages out of the FIFO while it is longer than its part of the limit, at most `most`,
    /// and puts them into the second-chance list. The caller unmaps them before it lets a touch be recorded.
    pub fn trim(&mut self, most: u32, trimmed: &mut Vec<u32>) {
        let wanted = self.limit - self.second_chance_pages();
        for _ in 0..most {
            if self.resident.pages <= wanted {
                break;
            }
            let page = self.resident.first;
            self.unlink(page);
            self.states[page as usize] = PageState::SecondChance as u8;
            push(&mut self.second_chance, &mut self.before, &mut self.after, page);
            trimmed.push(page);
        }
    }

    /// Takes the oldest pages of the second-chance list for writing, if more pages are in memory than may be:
    /// as many as there are, at most `most`, so that writes are long. A page whose content is written stays
    /// in [`PageState::Writing`] until [`ResidentSet::written`] or [`ResidentSet::not_written`], or until it
    /// is touched.
    pub fn take_for_writing(&mut self, most: u32, taken: &mut Vec<u32>) {
        if !self.is_over_limit() {
            return;
        }
        for _ in 0..most.min(self.second_chance.pages) {
            let page = self.second_chance.first;
            self.unlink(page);
            self.states[page as usize] = PageState::Writing as u8;
            self.writing += 1;
            taken.push(page);
        }
    }

    /// Records the place of a page's content. Returns whether the page has left memory: not if it was touched
    /// or released since [`ResidentSet::take_for_writing`], or if its former slot was.
    ///
    /// # Panics
    /// If the page has a former slot, and the content is elsewhere: the slot's reference would be lost.
    pub fn written(&mut self, page: u32, content: Content) -> bool {
        if self.state(page) != PageState::Writing {
            return false;
        }
        let slot = match content {
            Content::Zero => None,
            Content::Slot(slot) | Content::Unchanged(slot) => Some(slot),
        };
        let former = self.slot(page);
        if matches!(content, Content::Unchanged(_)) {
            if former != slot {
                self.not_written(&[page]);
                return false;
            }
        } else {
            assert_eq!(former, None, "page {page} leaves its former slot");
        }
        self.writing -= 1;
        match slot {
            Some(slot) => {
                self.slots[page as usize] = slot + 1;
                self.page_out(page);
            }
            None => self.states[page as usize] = PageState::Zero as u8,
        }
        true
    }

    /// Puts pages that could not be written back to the old end of the second-chance list, in their order.
    pub fn not_written(&mut self, pages: &[u32]) {
        for &page in pages.iter().rev() {
            if self.state(page) != PageState::Writing {
                continue;
            }
            self.writing -= 1;
            self.states[page as usize] = PageState::SecondChance as u8;
            let list = &mut self.second_chance;
            self.before[page as usize] = NONE;
            self.after[page as usize] = list.first;
            match list.first {
                NONE => list.last = page,
                first => self.before[first as usize] = page,
            }
            list.first = page;
            list.pages += 1;
        }
    }

    /// Makes a page zero, whatever its state: the guest does not use it. Returns the slot that it had.
    pub fn release(&mut self, page: u32) -> Option<u32> {
        match self.state(page) {
            // Memory of a page that was never used is not touched.
            PageState::Zero => return None,
            PageState::Resident | PageState::SecondChance | PageState::ReadAhead => self.unlink(page),
            PageState::Writing => self.writing -= 1,
            PageState::PagedOut => self.leave_paged_out(page),
            PageState::Reading | PageState::ReadingAhead => self.reading -= 1,
        }
        self.states[page as usize] = PageState::Zero as u8;
        self.take_slot(page)
    }

    /// Replaces the content of a page, whatever its state, by that of `slot`. The caller has removed the page
    /// from memory. Returns the slot that it had.
    pub fn replace(&mut self, page: u32, slot: u32) -> Option<u32> {
        let before = self.release(page);
        self.slots[page as usize] = slot + 1;
        self.page_out(page);
        before
    }

    /// Returns whether more pages are in memory than may be, without those that are on their way out.
    fn is_over_limit(&self) -> bool {
        self.resident.pages + self.second_chance.pages + self.unused.pages + self.reading > self.limit
    }

    /// Returns the length of the second-chance list from which on its pages are written.
    fn second_chance_pages(&self) -> u32 {
        (self.limit / SECOND_CHANCE_DIVISOR).max(WRITE_CLUSTER_PAGES.min(self.limit / 2))
    }

    fn is_image_slot(&self, slot: u32) -> bool {
        slot >= self.image_slots
    }

    fn is_in_image(&self, page: u32) -> bool {
        self.slot(page).is_some_and(|slot| self.is_image_slot(slot))
    }

    fn begin_read(&mut self, page: u32, state: PageState) {
        self.leave_paged_out(page);
        self.reading += 1;
        self.states[page as usize] = state as u8;
    }

    /// Counts a page, whose slot is set, as paged out.
    fn page_out(&mut self, page: u32) {
        self.paged_out += 1;
        self.in_images += u32::from(self.is_in_image(page));
        self.states[page as usize] = PageState::PagedOut as u8;
        self.before[page as usize] = NONE;
    }

    fn leave_paged_out(&mut self, page: u32) {
        self.paged_out -= 1;
        self.in_images -= u32::from(self.is_in_image(page));
    }

    fn take_slot(&mut self, page: u32) -> Option<u32> {
        let slot = self.slot(page)?;
        self.slots[page as usize] = 0;
        Some(slot)
    }

    fn push_resident(&mut self, page: u32) {
        self.states[page as usize] = PageState::Resident as u8;
        push(&mut self.resident, &mut self.before, &mut self.after, page);
    }

    /// Takes a page out of the list of its state.
    fn unlink(&mut self, page: u32) {
        let list = match self.state(page) {
            PageState::Resident => &mut self.resident,
            PageState::ReadAhead => &mut self.unused,
            _ => &mut self.second_chance,
        };
        let (before, after) = (self.before[page as usize], self.after[page as usize]);
        match before {
            NONE => list.first = after,
            before => self.after[before as usize] = after,
        }
        match after {
            NONE => list.last = before,
            after => self.before[after as usize] = before,
        }
        list.pages -= 1;
    }
}

/// Appends a page to a list.
fn push(list: &mut List, before: &mut [u32], after: &mut [u32], page: u32) {
    before[page as usize] = list.last;
    after[page as usize] = NONE;
    match list.last {
        NONE => list.first = page,
        last => after[last as usize] = page,
    }
    list.last = page;
    list.pages += 1;
}

#[cfg(test)]
mod tests;
