//! States of a page of a [`ResidentSet`](super::resident_set::ResidentSet), and the steps that it needs.

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
    /// In a slot, which is being read to be mapped.
    Reading,
    /// In a slot, which is being read ahead.
    ReadingAhead,
    /// In memory, unmapped, and in a slot with the same content: it was read ahead, and not touched since.
    ReadAhead,
}

impl PageState {
    pub(super) const ALL: [Self; 8] = [
        Self::Zero,
        Self::Resident,
        Self::SecondChance,
        Self::Writing,
        Self::PagedOut,
        Self::Reading,
        Self::ReadingAhead,
        Self::ReadAhead,
    ];
}

/// Reason why a touched page is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cached {
    /// It had its second chance.
    SecondChance,
    /// It was read ahead.
    ReadAhead,
    /// The kernel unmapped it, or another thread has mapped it meanwhile.
    Resident,
}

/// Step that makes a touched page accessible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// A page of zeroes has to be mapped.
    MapZero,
    /// The page is in memory and has to be mapped.
    MapCached(Cached),
    /// The slot has to be read, then `ResidentSet::read_done` called.
    Read {
        /// Slot of the page.
        slot: u32,
    },
    /// The page is being read by another thread, which maps it.
    Wait,
}

/// Step that a page needs whose slot was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadDone {
    /// The page is resident now, and has to be mapped.
    Map,
    /// The page was read ahead: it has to be put into memory, unmapped. No thread waits for it.
    Keep,
    /// The page was released or replaced meanwhile. Threads that wait for it have to touch it again.
    Drop,
}

/// Content of a page that leaves memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeroes.
    Zero,
    /// That of a new slot.
    Slot(u32),
    /// That of this slot, which was its former slot when both were compared.
    Unchanged(u32),
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
    /// Pages in memory that were read ahead, and not touched since.
    pub read_ahead: u32,
    /// Pages in slots only, those of images among them.
    pub paged_out: u32,
    /// Those of them that an image has.
    pub in_images: u32,
    /// Greatest number of pages in memory.
    pub limit: u32,
}

impl Counts {
    /// Returns the number of pages in memory, or on their way into it.
    pub fn in_memory(&self) -> u32 {
        self.resident + self.second_chance + self.writing + self.reading + self.read_ahead
    }
}
