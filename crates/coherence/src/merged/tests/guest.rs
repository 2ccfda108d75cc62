//! A guest's CPUs, as small programs, and what hardware does for them: TLBs, paging-structure caches, accessed and dirty bits.

use crate::merged::Entry;

/// Words of a page in this world.
pub const WORDS: usize = 2;

/// A word of memory.
pub type At = (u32, usize);

/// A translation: entries of the tables on the way, from the root.
pub type Va = &'static [usize];

/// What a CPU does next. Each is one instruction, or nothing at all to memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Op {
    /// Waits until the word is 0 and makes it 1, in one locked instruction.
    Acquire(At),
    /// Stores.
    Set(At, u64),
    /// Adds one, locked.
    Add(At),
    /// Exchanges with 0, locked; what was there goes into the register.
    Take(At),
    /// Waits until the word is this.
    Await(At, u64),
    /// Goes on with the next if the word is this, else leaves so many out.
    IfIs(At, u64, usize),
    /// Goes on with the next if the register's entry is not dirty, else leaves so many out.
    IfClean(usize),
    /// Interrupts a CPU.
    Interrupt(usize),
    /// Loads CR3, which empties the caches of translations.
    Load(u32),
    /// Empties the caches of translations.
    Flush,
    /// Uses memory through the tables; a fault leaves so many out, or is wrong (`usize::MAX`).
    Touch { va: Va, writes: bool, fault: usize },
    /// From here on nobody may use the frame.
    Free(u64),
    /// From here on writes to the frame are news.
    Cleaned(u64),
    /// The frame's contents are dropped, as they are not news.
    Discard(u64),
    /// Something that only one CPU may be in.
    Enter,
    /// Out of it.
    Exit,
    /// One of several CPUs has done what only one was to do.
    Win,
}

/// A translation that a TLB has.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Cached {
    pub frame: u64,
    pub writes: bool,
    pub is_dirty: bool,
}

/// What a CPU has beside its program.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Cpu {
    pub node: usize,
    pub at: usize,
    /// Where it is in the handler of an interrupt.
    pub handler: Option<usize>,
    pub is_interrupted: bool,
    /// It has left the guest to send an interrupt.
    pub is_out: bool,
    pub register: u64,
    pub cr3: Option<u32>,
    pub tlb: Vec<(Va, Cached)>,
    /// Paging-structure caches: what the first entries of a translation lead to.
    pub walks: Vec<(Va, u32)>,
}

impl Cpu {
    pub fn new(node: usize, cr3: Option<u32>) -> Self {
        Self {
            node,
            at: 0,
            handler: None,
            is_interrupted: false,
            is_out: false,
            register: 0,
            cr3,
            tlb: Vec::new(),
            walks: Vec::new(),
        }
    }

    pub fn flush(&mut self) {
        self.tlb.clear();
        self.walks.clear();
    }
}

/// An entry that leads to a table.
pub fn table(page: u32) -> u64 {
    u64::from(page) << 12 | Entry::PRESENT | Entry::WRITABLE | Entry::ACCESSED
}

/// An entry that maps a frame, for writing.
pub fn maps(frame: u64) -> u64 {
    frame << 12 | Entry::PRESENT | Entry::WRITABLE
}
