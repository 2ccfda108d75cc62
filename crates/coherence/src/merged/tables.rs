//! Which pages of the guest are its page tables, from the CR3s of its CPUs.
//!
//! A guest is hostile: tables may lead in circles, to themselves, out of RAM. Each page is looked at once for each level, levels
//! fall at each step, and the number of pages is bounded.

use super::page_set::PageSet;
use super::{Entry, Level, Words};
use crate::Page;

/// Entries of a table.
const ENTRIES: usize = 512;
/// Parents that are named of a suspect page.
const PARENTS: usize = 4;

/// The walks of one node, with their room. Long mode only: 4 or 5 levels.
#[derive(Clone, Debug)]
pub struct Tables {
    seen: PageSet,
    top: Level,
}

/// What a page is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Found {
    /// The levels on which it is a table: bit n for level n.
    pub levels: u8,
    /// The first tables that lead to it, the nearest to a root first.
    pub parents: [Option<Page>; PARENTS],
}

/// The walk has not seen everything.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Unclear {
    /// There are more tables than there is room for.
    TooMany,
    /// A table is on another node.
    Elsewhere(Page),
}

impl Found {
    /// Its level, if it has exactly one. A page with several maps itself; such a one is not merged.
    pub fn level(&self) -> Option<Level> {
        let level = u8::try_from(self.levels.trailing_zeros()).expect("eight at most");
        (self.levels.count_ones() == 1).then_some(Level(level))
    }

    fn add_parent(&mut self, parent: Page) {
        if self.parents.contains(&Some(parent)) {
            return;
        }
        if let Some(free) = self.parents.iter_mut().find(|place| place.is_none()) {
            *free = Some(parent);
        }
    }
}

impl Tables {
    /// For at most `limit` tables. `five` levels if the guest has CR4.LA57.
    pub fn new(limit: usize, five: bool) -> Self {
        Self {
            seen: PageSet::new(limit),
            top: Level(if five { 5 } else { 4 }),
        }
    }

    /// The level of roots.
    pub fn top(&self) -> Level {
        self.top
    }

    /// The page that a CR3 names. Its other bits (PCID or cache bits, LAM, "do not flush") count for nothing.
    pub fn root(cr3: u64) -> Option<Page> {
        u32::try_from(Entry(cr3).frame()).ok().map(Page)
    }

    /// Finds all tables; [`Tables::levels`] and [`Tables::pages`] tell of them afterwards.
    ///
    /// # Errors
    /// If there are more than there is room for, or one is on another node; what was found until then stays.
    pub fn walk(&mut self, cr3s: &[u64], memory: &impl Words) -> Result<(), Unclear> {
        self.visit(cr3s, memory, |_, _, _| {})
    }

    /// The levels on which a page was a table in the last walk: bit n for level n.
    pub fn levels(&self, page: Page) -> u8 {
        self.seen.get(page)
    }

    /// The tables of the last walk, roots first.
    pub fn pages(&self) -> &[Page] {
        self.seen.pages()
    }

    /// Whether a page is a table, and what leads to it.
    ///
    /// # Errors
    /// As [`Tables::walk`]. A suspect that can't be cleared up stays as it is.
    pub fn suspect(
        &mut self,
        suspect: Page,
        cr3s: &[u64],
        memory: &impl Words,
    ) -> Result<Option<Found>, Unclear> {
        let mut found = Found {
            levels: 0,
            parents: [None; PARENTS],
        };
        self.visit(cr3s, memory, |parent, page, _| {
            if page == suspect {
                found.add_parent(parent);
            }
        })?;
        found.levels = self.levels(suspect);
        Ok((found.levels != 0).then_some(found))
    }

    /// Level by level, from the roots down. `edge` hears of each entry that leads from a table to a table of the level below.
    fn visit(
        &mut self,
        cr3s: &[u64],
        memory: &impl Words,
        mut edge: impl FnMut(Page, Page, Level),
    ) -> Result<(), Unclear> {
        self.seen.clear();
        for root in cr3s.iter().filter_map(|cr3| Self::root(*cr3)) {
            if memory.is_ram(root) && !self.seen.add(root, 1 << self.top.0) {
                return Err(Unclear::TooMany);
            }
        }
        let mut unclear = None;
        for level in (2..=self.top.0).rev().map(Level) {
            // What this level adds is of the level below: no more of this one comes.
            for at in 0..self.seen.pages().len() {
                let table = self.seen.pages()[at];
                if self.seen.get(table) & (1 << level.0) == 0 {
                    continue;
                }
                if !memory.is_here(table) {
                    unclear = Some(Unclear::Elsewhere(table));
                    continue;
                }
                for word in 0..ENTRIES {
                    let Some(next) = Entry(memory.load(table, word)).table(level) else {
                        continue;
                    };
                    if !memory.is_ram(next) {
                        continue;
                    }
                    if !self.seen.add(next, 1 << (level.0 - 1)) {
                        return Err(Unclear::TooMany);
                    }
                    edge(table, next, level);
                }
            }
        }
        unclear.map_or(Ok(()), Err)
    }
}
