//! One entry of a page table with 4 or 5 levels: its bits (Intel SDM, volume 3, 5.5; AMD APM, volume 2, 5.3), what the monitor
//! sets in it beforehand, and what becomes of it when two nodes have changed it.

use crate::Page;

/// How far a table is from the translation: 1 for what Linux calls a PTE table, 4 or 5 for a root.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Level(pub u8);

/// An entry as the hardware reads it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Entry(pub u64);

/// The table that a CR3 names. Its other bits (PCID or cache bits, LAM, "do not flush") count for nothing.
pub fn root(cr3: u64) -> Option<Page> {
    u32::try_from(Entry(cr3).frame()).ok().map(Page)
}

impl Entry {
    /// The entry translates.
    pub const PRESENT: u64 = 1 << 0;
    /// It allows writes.
    pub const WRITABLE: u64 = 1 << 1;
    /// Hardware has used it. Set before it is cached.
    pub const ACCESSED: u64 = 1 << 5;
    /// Hardware has written through it. Has a meaning only where translation ends.
    pub const DIRTY: u64 = 1 << 6;
    /// It maps a large page (levels 2 and 3); reserved from level 4 up; means something else on level 1.
    pub const LARGE: u64 = 1 << 7;
    /// What hardware sets by itself.
    pub const BY_HARDWARE: u64 = Self::ACCESSED | Self::DIRTY;
    const FRAME: u64 = 0x000f_ffff_ffff_f000;

    /// It translates.
    pub fn is_present(self) -> bool {
        self.0 & Self::PRESENT != 0
    }

    /// Translation ends here.
    pub fn is_leaf(self, level: Level) -> bool {
        level.0 <= 1 || (level.0 <= 3 && self.0 & Self::LARGE != 0)
    }

    /// Where it points: the number of a page in guest-physical memory.
    pub fn frame(self) -> u64 {
        (self.0 & Self::FRAME) >> 12
    }

    /// The next table, if it names one.
    pub fn table(self, level: Level) -> Option<Page> {
        let leads_on = self.is_present() && !self.is_leaf(level) && !self.is_misplaced(level);
        leads_on
            .then(|| u32::try_from(self.frame()).ok().map(Page))
            .flatten()
    }

    /// It faults with a reserved bit: no guest has such entries there, so the page may be none of its tables any more.
    pub fn is_misplaced(self, level: Level) -> bool {
        self.is_present() && level.0 >= 4 && self.0 & Self::LARGE != 0
    }

    /// As the monitor has it before any CPU of another node may use it: accessed, and dirty where it can be written through.
    ///
    /// Never dirty where it is not writable: with shadow stacks that means something else.
    #[must_use]
    pub fn preset(self, level: Level) -> Self {
        if !self.is_present() {
            return self;
        }
        let writes = self.is_leaf(level) && self.0 & Self::WRITABLE != 0;
        Self(self.0 | Self::ACCESSED | if writes { Self::DIRTY } else { 0 })
    }

    /// Without what hardware sets.
    fn key(self) -> u64 {
        self.0 & !Self::BY_HARDWARE
    }

    /// What `mine` becomes when another node has changed `old` into `new`, and whether both had changed it: then no order of the
    /// nodes' writes explains it, which the guest's own locks prevent.
    ///
    /// Where only bits that hardware sets differ, they are joined. Of two real changes the same one wins on every node, in whatever
    /// order they come: an entry that is not present, else the smaller.
    #[must_use]
    pub fn merge(old: Self, new: Self, mine: Self) -> (Self, bool) {
        if mine == old || mine == new {
            return (new, false);
        }
        let same = |a: Self, b: Self| a.key() == b.key();
        let hardware = Self(mine.0 & Self::BY_HARDWARE);
        if same(mine, old) {
            // Hardware marked here what the other node replaced, or marked or cleaned too.
            let result = if same(new, mine) {
                Self(new.0 | hardware.0)
            } else {
                new
            };
            return (result, false);
        }
        if same(new, old) {
            // The other way round.
            return (mine, false);
        }
        if same(new, mine) {
            return (Self(new.0 | hardware.0), false);
        }
        let rank = |entry: Self| (entry.is_present(), entry.key());
        (if rank(mine) < rank(new) { mine } else { new }, true)
    }
}
