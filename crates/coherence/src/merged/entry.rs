//! An entry of a page table with 4 or 5 levels: its bits (Intel SDM, volume 3, 5.5; AMD APM, volume 2, 5.3),
//! the bits that the monitor presets, and the merge of two nodes' changes.

use crate::Page;

/// Level of a table: 1 for what Linux calls a PTE table, 4 or 5 for a root.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Level(pub u8);

/// A page-table entry as the hardware reads it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Entry(pub u64);

/// Returns the root table that a CR3 names. The other bits (PCID or cache bits, LAM, "do not flush") are
/// ignored.
pub fn root(cr3: u64) -> Option<Page> {
    u32::try_from(Entry(cr3).frame()).ok().map(Page)
}

impl Entry {
    /// Present: the entry translates.
    pub const PRESENT: u64 = 1 << 0;
    /// Bit of a writable entry.
    pub const WRITABLE: u64 = 1 << 1;
    /// Accessed. The hardware sets it before it caches the translation.
    pub const ACCESSED: u64 = 1 << 5;
    /// Dirty: the hardware has written through the entry. Defined only where translation ends.
    pub const DIRTY: u64 = 1 << 6;
    /// Large page on levels 2 and 3; reserved from level 4 up; another meaning on level 1.
    pub const LARGE: u64 = 1 << 7;
    /// Bits that the hardware sets by itself.
    pub const BY_HARDWARE: u64 = Self::ACCESSED | Self::DIRTY;
    const FRAME: u64 = 0x000f_ffff_ffff_f000;

    /// Returns whether the entry translates.
    pub fn is_present(self) -> bool {
        self.0 & Self::PRESENT != 0
    }

    /// Returns whether translation ends at the entry.
    pub fn is_leaf(self, level: Level) -> bool {
        level.0 <= 1 || (level.0 <= 3 && self.0 & Self::LARGE != 0)
    }

    /// Returns the page number in guest-physical memory that the entry points to.
    pub fn frame(self) -> u64 {
        (self.0 & Self::FRAME) >> 12
    }

    /// Returns the next table, if the entry names one.
    pub fn table(self, level: Level) -> Option<Page> {
        let leads_on = self.is_present() && !self.is_leaf(level) && !self.is_misplaced(level);
        leads_on
            .then(|| u32::try_from(self.frame()).ok().map(Page))
            .flatten()
    }

    /// Returns whether the entry faults with a reserved bit. No guest has such entries at this level, so the
    /// page may no longer be a table.
    pub fn is_misplaced(self, level: Level) -> bool {
        self.is_present() && level.0 >= 4 && self.0 & Self::LARGE != 0
    }

    /// Returns the entry as the monitor presets it before a CPU of another node may use it: accessed, and
    /// dirty where it is writable.
    ///
    /// It is never dirty without being writable: with shadow stacks that has another meaning.
    #[must_use]
    pub fn preset(self, level: Level) -> Self {
        if !self.is_present() {
            return self;
        }
        let writes = self.is_leaf(level) && self.0 & Self::WRITABLE != 0;
        Self(self.0 | Self::ACCESSED | if writes { Self::DIRTY } else { 0 })
    }

    /// Returns the entry without the bits that the hardware sets.
    fn key(self) -> u64 {
        self.0 & !Self::BY_HARDWARE
    }

    /// Merges a remote change from `old` to `new` into `mine`. Returns the entry, and whether it conflicts:
    /// both nodes changed it, which the guest's locks prevent, and no order of the writes explains it.
    ///
    /// Bits that only the hardware sets are joined. Of two other changes the same one wins on every node, in
    /// any order of arrival: an entry that is not present, else the smaller one.
    #[must_use]
    pub fn merge(old: Self, new: Self, mine: Self) -> (Self, bool) {
        if mine == old || mine == new {
            return (new, false);
        }
        let same = |a: Self, b: Self| a.key() == b.key();
        let hardware = Self(mine.0 & Self::BY_HARDWARE);
        if same(mine, old) {
            // The hardware marked the entry here; the other node replaced, marked or cleaned it.
            let result = if same(new, mine) {
                Self(new.0 | hardware.0)
            } else {
                new
            };
            return (result, false);
        }
        if same(new, old) {
            // The other node's hardware marked the entry; this node changed it.
            return (mine, false);
        }
        if same(new, mine) {
            return (Self(new.0 | hardware.0), false);
        }
        let rank = |entry: Self| (entry.is_present(), entry.key());
        (if rank(mine) < rank(new) { mine } else { new }, true)
    }
}
