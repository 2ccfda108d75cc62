//! CPUs of a guest as small programs, with the hardware's TLBs, paging-structure caches, accessed and dirty
//! bits.

use crate::merged::Entry;

/// Words of a page in this world.
pub const WORDS: usize = 2;

/// A word of memory.
pub type At = (u32, usize);

/// A translation: indices of the entries from the root.
pub type Va = &'static [usize];

/// An instruction of a CPU, or an event without access to memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Op {
    /// Waits until the word is 0 and makes it 1, in one locked instruction.
    Acquire(At),
    /// Stores a value to the word.
    Set(At, u64),
    /// Adds one, locked.
    Add(At),
    /// Exchanges with 0, locked; the old value goes into the register.
    Take(At),
    /// Waits until the word has this value.
    Await(At, u64),
    /// Continues if the word has this value, else skips that many instructions.
    IfIs(At, u64, usize),
    /// Continues if the register's entry is not dirty, else skips that many instructions.
    IfClean(usize),
    /// Interrupts a CPU.
    Interrupt(usize),
    /// Loads CR3, which empties the caches of translations.
    Load(u32),
    /// Empties the caches of translations.
    Flush,
    /// Accesses memory through the tables. A fault skips that many instructions, or is an error
    /// (`usize::MAX`).
    Touch { va: Va, writes: bool, fault: usize },
    /// From here on an access to the frame is an error.
    Free(u64),
    /// From here on writes to the frame must not be lost.
    Cleaned(u64),
    /// Drops the frame's contents as clean.
    Discard(u64),
    /// Enters a section in which only one CPU may be.
    Enter,
    /// Leaves that section.
    Exit,
    /// Counts one of several CPUs that may succeed only once.
    Win,
}

/// A translation that a TLB has.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Cached {
    pub frame: u64,
    pub writes: bool,
    pub is_dirty: bool,
}

/// State of a CPU except its program.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Cpu {
    pub node: usize,
    pub at: usize,
    /// Position in the interrupt handler.
    pub handler: Option<usize>,
    pub is_interrupted: bool,
    /// The CPU has left the guest to send an interrupt.
    pub is_out: bool,
    pub register: u64,
    pub cr3: Option<u32>,
    pub tlb: Vec<(Va, Cached)>,
    /// Paging-structure caches: tables that the first indices of a translation lead to.
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

/// Returns an entry that points to a table.
pub fn table(page: u32) -> u64 {
    u64::from(page) << 12 | Entry::PRESENT | Entry::WRITABLE | Entry::ACCESSED
}

/// Returns an entry that maps a frame for writing.
pub fn maps(frame: u64) -> u64 {
    frame << 12 | Entry::PRESENT | Entry::WRITABLE
}
