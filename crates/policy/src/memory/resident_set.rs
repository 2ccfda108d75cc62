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
//!            read_done|  +-- touch -- Zero <--- written(None), zeroes only -+  |
//!                     |                                                        |
//!                   Reading <--------- touch, read_ahead -- PagedOut <---------+ written(Some(slot))
//! ```
//!
//! [`ResidentSet::release`] makes a page of any state [`PageState::Zero`], and [`ResidentSet::replace`]
//! [`PageState::PagedOut`]. A page is in exactly one state.
//! The set takes 9 bytes of memory for each page, is deterministic, and every operation but the scan for a
//! read-ahead takes constant time for each page that it returns.

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

/// Pages by which the FIFO outgrows its part of the limit before it is trimmed, so that pages are unmapped
/// together; ours.
const TRIM_SLACK_PAGES: u32 = 32;

/// End of a list.
const NONE: u32 = u32::MAX;

/// State of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageState {
    /// Not in memory, and no slot: its content is zero. All pages begin so.
    Zero,
    /// In memory and mapped, in the FIFO.
    Resident,
    /// In memory, unmapped, in the second-chance list.
    SecondChance,
    /// In memory, unmapped, while its content is copied to a slot.
    Writing,
    /// In a slot only.
    PagedOut,
    /// In a slot, which is being read.
    Reading,
}

/// Step that makes a touched page accessible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// A page of zeroes has to be mapped.
    MapZero,
    /// The page is in memory and has to be mapped. `saved_io` if it was unmapped by [`ResidentSet::trim`];
    /// otherwise the kernel unmapped it, or another thread has mapped it meanwhile.
    MapCached {
        /// Whether the page had its second chance.
        saved_io: bool,
    },
    /// The slot has to be read, then [`ResidentSet::read_done`] called.
    Read {
        /// Slot of the page.
        slot: u32,
    },
    /// The page is being read by another thread, which maps it.
    Wait,
}

/// Numbers of pages by state, and the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages in the FIFO.
    pub resident: u32,
    /// Pages in the second-chance list.
    pub second_chance: u32,
    /// Pages that are being written.
    pub writing: u32,
    /// Pages that are being read.
    pub reading: u32,
    /// Pages in slots only.
    pub paged_out: u32,
    /// Greatest number of pages in memory.
    pub limit: u32,
}

impl Counts {
    /// Returns the number of pages in memory, or on their way into it.
    pub fn in_memory(&self) -> u32 {
        self.resident + self.second_chance + self.writing + self.reading
    }
}

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
    before: Vec<u32>,
    /// The next page of the list; the slot of a page in one.
    after: Vec<u32>,
    resident: List,
    second_chance: List,
    writing: u32,
    reading: u32,
    paged_out: u32,
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
            resident: List::EMPTY,
            second_chance: List::EMPTY,
            writing: 0,
            reading: 0,
            paged_out: 0,
            limit: limit.max(1),
        }
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
            paged_out: self.paged_out,
            limit: self.limit,
        }
    }

    /// Sets the greatest number of pages in memory, at least one.
    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit.max(1);
    }

    /// Returns the state of a page.
    pub fn state(&self, page: u32) -> PageState {
        match self.states[page as usize] {
            0 => PageState::Zero,
            1 => PageState::Resident,
            2 => PageState::SecondChance,
            3 => PageState::Writing,
            4 => PageState::PagedOut,
            _ => PageState::Reading,
        }
    }

    /// Returns the slot of a page that is in one.
    pub fn slot(&self, page: u32) -> Option<u32> {
        matches!(self.state(page), PageState::PagedOut | PageState::Reading)
            .then(|| self.after[page as usize])
    }

    /// Returns whether the memory's file has the page.
    pub fn is_in_memory(&self, page: u32) -> bool {
        matches!(
            self.state(page),
            PageState::Resident | PageState::SecondChance | PageState::Writing
        )
    }

    /// Records that a page was touched while it was not mapped, and returns the step that it needs.
    pub fn touch(&mut self, page: u32) -> Touch {
        match self.state(page) {
            PageState::Zero => {
                self.push_resident(page);
                Touch::MapZero
            }
            PageState::Resident => Touch::MapCached { saved_io: false },
            PageState::SecondChance => {
                self.unlink(page);
                self.push_resident(page);
                Touch::MapCached { saved_io: true }
            }
            PageState::Writing => {
                self.writing -= 1;
                self.push_resident(page);
                Touch::MapCached { saved_io: true }
            }
            PageState::PagedOut => {
                self.begin_read(page);
                Touch::Read {
                    slot: self.after[page as usize],
                }
            }
            PageState::Reading => Touch::Wait,
        }
    }

    /// Returns the number of pages after `page`, which is being read from `slot`, that lie in the slots after
    /// it, at most `most`. They are being read from then on.
    pub fn read_ahead(&mut self, page: u32, slot: u32, most: u32) -> u32 {
        let follows = |ahead: &u32| {
            let next = page.checked_add(*ahead).filter(|next| *next < self.pages());
            next.is_some_and(|next| {
                self.state(next) == PageState::PagedOut
                    && slot.checked_add(*ahead) == Some(self.after[next as usize])
            })
        };
        let count = (1..=most).take_while(follows).count() as u32;
        for ahead in 1..=count {
            self.begin_read(page + ahead);
        }
        count
    }

    /// Records that `slot` was read for `page`, which was being read. Returns whether the page is resident
    /// now and has to be mapped; not if it was released meanwhile.
    pub fn read_done(&mut self, page: u32, slot: u32) -> bool {
        let is_wanted = self.state(page) == PageState::Reading && self.after[page as usize] == slot;
        if is_wanted {
            self.reading -= 1;
            self.push_resident(page);
        }
        is_wanted
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

    /// Records that the content of a page is in `slot`, or is zero if there is none. Returns whether the page
    /// has left memory: not if it was touched or released since [`ResidentSet::take_for_writing`].
    pub fn written(&mut self, page: u32, slot: Option<u32>) -> bool {
        if self.state(page) != PageState::Writing {
            return false;
        }
        self.writing -= 1;
        match slot {
            Some(slot) => {
                self.states[page as usize] = PageState::PagedOut as u8;
                self.after[page as usize] = slot;
                self.paged_out += 1;
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
        let slot = self.slot(page);
        match self.state(page) {
            PageState::Zero => {}
            PageState::Resident | PageState::SecondChance => self.unlink(page),
            PageState::Writing => self.writing -= 1,
            PageState::PagedOut => self.paged_out -= 1,
            PageState::Reading => self.reading -= 1,
        }
        self.states[page as usize] = PageState::Zero as u8;
        slot
    }

    /// Replaces the content of a page, whatever its state, by that of `slot`. The caller has removed the page
    /// from memory. Returns the slot that it had.
    pub fn replace(&mut self, page: u32, slot: u32) -> Option<u32> {
        let before = self.release(page);
        self.states[page as usize] = PageState::PagedOut as u8;
        self.after[page as usize] = slot;
        self.paged_out += 1;
        before
    }

    /// Returns whether more pages are in memory than may be, without those that are on their way out.
    fn is_over_limit(&self) -> bool {
        self.resident.pages + self.second_chance.pages + self.reading > self.limit
    }

    /// Returns the length of the second-chance list from which on its pages are written.
    fn second_chance_pages(&self) -> u32 {
        (self.limit / SECOND_CHANCE_DIVISOR).max(WRITE_CLUSTER_PAGES.min(self.limit / 2))
    }

    fn begin_read(&mut self, page: u32) {
        self.paged_out -= 1;
        self.reading += 1;
        self.states[page as usize] = PageState::Reading as u8;
    }

    fn push_resident(&mut self, page: u32) {
        self.states[page as usize] = PageState::Resident as u8;
        push(&mut self.resident, &mut self.before, &mut self.after, page);
    }

    /// Takes a page out of the list of its state.
    fn unlink(&mut self, page: u32) {
        let list = match self.state(page) {
            PageState::Resident => &mut self.resident,
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
