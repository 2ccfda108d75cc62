//! Merged pages of one node, each with its *twin* (TreadMarks): the words as all nodes know them. The
//! difference is a diff.
//!
//! Pages are ordered roots first. Words are collected in that order and sent in the reverse one. A receiver
//! that applies them one by one never has a parent that is newer than its child; a walk would otherwise find
//! the child's former contents.

use super::{AtomicPageWords, Entry, Level, VectorTime};
use crate::{NodeId, Page};

/// A word that a node changed.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Diff {
    /// Page number.
    pub page: Page,
    /// Index of the word.
    pub word: u16,
    /// Value that all nodes knew.
    pub old: u64,
    /// New value.
    pub new: u64,
}

/// Diffs of one collection, for all other nodes. They are applied in order, as a whole.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Node that made the diffs.
    pub from: NodeId,
    /// Vector time of the batch. The sender's own entry is the number of the batch.
    pub stamp: VectorTime,
    /// Diffs, children first.
    pub diffs: &'a [Diff],
}

/// Counters of merging.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Merges {
    /// Words sent.
    pub sent: u64,
    /// Words applied.
    pub applied: u64,
    /// Words that two nodes had changed. A guest with correct locks has none.
    pub conflicts: u64,
    /// Words in which the accessed or dirty bit was preset.
    pub preset: u64,
    /// Pages that joined.
    pub joined: u64,
    /// Pages that left.
    pub left: u64,
}

/// How the accessed bit is kept coherent.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Accessed {
    /// The monitor presets it. Correct for every guest, also for one that takes a clear bit as proof that no
    /// TLB has the entry. Pages never look idle.
    Preset,
    /// The bit is sent like any change, so that pages age. For guests that flush whatever the bit says, as
    /// Linux does.
    Sent,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Twin<const WORDS: usize> {
    page: Page,
    level: Level,
    round: u64,
    /// Words of merged tables one level up that point here.
    links: u32,
    is_open: bool,
    /// The page looks less like a table than before.
    is_doubtful: bool,
    /// The page was requested to leave. Its own links are not counted.
    is_detached: bool,
    words: Box<[u64; WORDS]>,
}

/// Twins of the merged pages; the module has their order.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Twins<const WORDS: usize> {
    top: Level,
    accessed: Accessed,
    twins: Vec<Twin<WORDS>>,
    room: Vec<Box<[u64; WORDS]>>,
    pub(super) merges: Merges,
}

impl<const WORDS: usize> Twins<WORDS> {
    pub(super) fn new(limit: usize, top: Level, accessed: Accessed) -> Self {
        Self {
            top,
            accessed,
            twins: Vec::with_capacity(limit),
            room: vec![Box::new([0; WORDS]); limit],
            merges: Merges::default(),
        }
    }

    fn position(&self, page: Page) -> Option<usize> {
        self.twins.iter().position(|twin| twin.page == page)
    }

    pub(super) fn has_room(&self) -> bool {
        !self.room.is_empty()
    }

    /// Returns the round of a merged page.
    pub(super) fn round(&self, page: Page) -> Option<u64> {
        self.position(page).map(|at| self.twins[at].round)
    }

    pub(super) fn len(&self) -> usize {
        self.twins.len()
    }

    pub(super) fn is_open(&self, page: Page) -> bool {
        self.position(page).is_some_and(|at| self.twins[at].is_open)
    }

    pub(super) fn set_open(&mut self, page: Page) {
        if let Some(at) = self.position(page) {
            self.twins[at].is_open = true;
        }
    }

    /// Returns how many words of merged tables of the level above point to the page. Detached tables are not
    /// counted.
    pub(super) fn links(&self, page: Page, level: Level) -> u32 {
        let above = Level(level.0 + 1);
        let leads = |word: &&u64| Entry(**word).table(above) == Some(page);
        let words = self
            .twins
            .iter()
            .filter(|twin| twin.level == above && !twin.is_detached)
            .flat_map(|twin| twin.words.iter());
        u32::try_from(words.filter(leads).count()).expect("a few pages")
    }

    /// Returns the level of a page under the merged tables that point to it, if they agree.
    pub(super) fn level_below(&self, page: Page) -> Option<Level> {
        let mut levels = (1..self.top.0)
            .map(Level)
            .filter(|level| self.links(page, *level) > 0);
        let level = levels.next()?;
        levels.next().is_none().then_some(level)
    }

    fn preset(&self, entry: Entry, level: Level) -> Entry {
        let wanted = entry.preset(level);
        match self.accessed {
            Accessed::Preset => wanted,
            Accessed::Sent => Entry(wanted.0 & !Entry::ACCESSED | entry.0 & Entry::ACCESSED),
        }
    }

    /// Presets a word in memory and returns it, while the guest may change it.
    fn settle(&mut self, page: Page, level: Level, word: usize, memory: &mut impl AtomicPageWords) -> u64 {
        let mut found = memory.load(page, word);
        loop {
            let wanted = self.preset(Entry(found), level).0;
            if wanted == found {
                return found;
            }
            // Not a plain OR: the guest may just have cleared the entry or made it read-only, where the bits
            // have another meaning.
            match memory.compare_exchange(page, word, found, wanted) {
                Ok(()) => {
                    self.merges.preset += 1;
                    return wanted;
                }
                Err(instead) => found = instead,
            }
        }
    }

    /// Takes a page's twin from memory. No CPU of any node may write the page until all nodes have done this.
    /// The caller has checked [`Twins::has_room`].
    pub(super) fn insert(&mut self, page: Page, level: Level, round: u64, memory: &mut impl AtomicPageWords) {
        let mut words = self.room.pop().expect("looked for");
        for word in 0..WORDS {
            words[word] = self.settle(page, level, word, memory);
        }
        self.merges.joined += 1;
        let twin = Twin {
            page,
            level,
            round,
            links: self.links(page, level),
            is_open: false,
            is_doubtful: false,
            is_detached: false,
            words,
        };
        let at = self.twins.partition_point(|other| other.level >= level);
        self.twins.insert(at, twin);
        for word in 0..WORDS {
            self.link(at, Entry(self.twins[at].words[word]), level, 1);
        }
    }

    /// Drops a page's twin.
    pub(super) fn remove(&mut self, page: Page) {
        let Some(at) = self.position(page) else { return };
        self.unlink(at);
        self.merges.left += 1;
        let mut twin = self.twins.remove(at);
        twin.words.fill(0);
        self.room.push(twin.words);
    }

    /// Counts a link that an entry adds (`by` is 1) or removes (-1).
    fn link(&mut self, at: usize, entry: Entry, level: Level, by: i32) {
        if self.twins[at].is_detached {
            return;
        }
        let Some(next) = entry.table(level) else { return };
        if let Some(at) = self.position(next) {
            let twin = &mut self.twins[at];
            if twin.level.0 + 1 == level.0 {
                twin.links = twin.links.checked_add_signed(by).expect("every link was counted");
            }
        }
    }

    /// Appends the diffs of the page at this index; callers begin with the roots. A page that this node's
    /// CPUs have not had open has none: if it was withdrawn, its bytes may be other contents already.
    pub(super) fn collect(&mut self, at: usize, memory: &mut impl AtomicPageWords, out: &mut Vec<Diff>) {
        if !self.twins[at].is_open {
            return;
        }
        let (page, level) = (self.twins[at].page, self.twins[at].level);
        if memory.has(page, &self.twins[at].words[..]) {
            return;
        }
        for word in 0..WORDS {
            let old = self.twins[at].words[word];
            if memory.load(page, word) == old {
                continue;
            }
            let new = self.settle(page, level, word, memory);
            if new == old {
                continue;
            }
            let lost = level == self.top && Entry(old).is_present() && !Entry(new).is_present();
            let strays = level.0 > 1 && Self::strays(Entry(new), level, memory);
            self.twins[at].is_doubtful |= lost || strays;
            self.twins[at].words[word] = new;
            self.link(at, Entry(old), level, -1);
            self.link(at, Entry(new), level, 1);
            self.merges.sent += 1;
            let word = u16::try_from(word).expect("a page has 512");
            out.push(Diff { page, word, old, new });
        }
    }

    /// Returns whether no page table has such an entry.
    fn strays(entry: Entry, level: Level, memory: &impl AtomicPageWords) -> bool {
        let leaves_ram = || {
            let leads_on = entry.is_present() && !entry.is_leaf(level);
            leads_on && !entry.table(level).is_some_and(|next| memory.is_ram(next))
        };
        entry.is_misplaced(level) || leaves_ram()
    }

    /// Applies one word of another node. This node's own later change remains a diff.
    pub(super) fn apply(&mut self, diff: &Diff, memory: &mut impl AtomicPageWords) {
        let (page, word) = (diff.page, usize::from(diff.word));
        let Some(at) = self.position(page) else { return };
        let level = self.twins[at].level;
        let before = Entry(self.twins[at].words[word]);
        let (after, was_changed) = Entry::merge(Entry(diff.old), Entry(diff.new), before);
        let mut found = memory.load(page, word);
        let is_changed = loop {
            let (wanted, is_changed) = Entry::merge(before, after, Entry(found));
            if wanted.0 == found {
                break is_changed;
            }
            match memory.compare_exchange(page, word, found, wanted.0) {
                Ok(()) => break is_changed,
                Err(instead) => found = instead,
            }
        };
        self.twins[at].words[word] = after.0;
        self.link(at, before, level, -1);
        self.link(at, after, level, 1);
        self.merges.applied += 1;
        self.merges.conflicts += u64::from(was_changed || is_changed);
    }

    /// Returns, once, a page that may no longer be a table: no merged table points to it, or its contents
    /// make that doubtful. From then on its own links are not counted, as a guest may free a tree by cutting
    /// it off at the top. No table points to a root; vCPUs that have it loaded are counted elsewhere.
    pub(super) fn next_detached(&mut self) -> Option<(Page, u64)> {
        let top = self.top;
        let is_detached = |twin: &Twin<WORDS>| twin.is_doubtful || (twin.links == 0 && twin.level != top);
        let at = self
            .twins
            .iter()
            .position(|twin| !twin.is_detached && is_detached(twin))?;
        self.unlink(at);
        self.twins[at].is_detached = true;
        Some((self.twins[at].page, self.twins[at].round))
    }

    /// Removes the links of a page.
    fn unlink(&mut self, at: usize) {
        let level = self.twins[at].level;
        for word in 0..WORDS {
            self.link(at, Entry(self.twins[at].words[word]), level, -1);
        }
    }
}
