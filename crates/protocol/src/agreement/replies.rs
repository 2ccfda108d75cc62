//! Pending replies to a request of this cell, with the relays that bring them.

use std::collections::{BTreeMap, BTreeSet};

use crate::CellId;
use crate::multicast::LATE_TICKS;

/// The replies that are missing to one request, votes or receipts.
///
/// Each cell counts once, however often its reply arrives. A cell receives the request again over its link if
/// its branch of the tree may have lost the reply.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Replies {
    missing: BTreeSet<CellId>,
    /// The first cell of the branch of each cell whose reply a relay gathers.
    branches: BTreeMap<CellId, CellId>,
    /// Since the request.
    ticks: u8,
}

impl Replies {
    /// Returns the replies of these cells.
    pub(super) fn of(cells: impl IntoIterator<Item = CellId>) -> Self {
        Self {
            missing: cells.into_iter().collect(),
            ..Self::default()
        }
    }

    pub(super) fn are_complete(&self) -> bool {
        self.missing.is_empty()
    }

    pub(super) fn missing(&self) -> impl Iterator<Item = CellId> + '_ {
        self.missing.iter().copied()
    }

    /// Records that relays gather replies: each cell with the first cell of its branch.
    pub(super) fn gathered(&mut self, branches: BTreeMap<CellId, CellId>) {
        let missing = &self.missing;
        self.branches = branches;
        self.branches.retain(|cell, _| missing.contains(cell));
    }

    /// Records that the request goes to one more cell, over its link.
    pub(super) fn add(&mut self, cell: CellId) {
        self.missing.insert(cell);
        self.branches.remove(&cell);
    }

    /// Records a reply. Returns false if it was not missing.
    pub(super) fn come(&mut self, cell: CellId) -> bool {
        self.branches.remove(&cell);
        self.missing.remove(&cell)
    }

    /// A cell is dead. Returns the cells to ask again: those of its branch.
    pub(super) fn dead(&mut self, cell: CellId) -> Vec<CellId> {
        self.missing.remove(&cell);
        // A relay has replied, maybe, before it dies with the replies of others.
        let first = self.branches.remove(&cell).unwrap_or(cell);
        self.ask_again(|branch| branch == first)
    }

    /// Whether ticks have to come.
    pub(super) fn needs_tick(&self) -> bool {
        !self.branches.is_empty()
    }

    /// A tick has passed. Returns the cells to ask again: all whose replies relays should have brought by
    /// now.
    pub(super) fn tick(&mut self) -> Vec<CellId> {
        if !self.needs_tick() {
            return Vec::new();
        }
        self.ticks += 1;
        if self.ticks < LATE_TICKS {
            return Vec::new();
        }
        self.ask_again(|_| true)
    }

    fn ask_again(&mut self, is_lost: impl Fn(CellId) -> bool) -> Vec<CellId> {
        let lost = self.branches.iter().filter(|(_, first)| is_lost(**first));
        let lost: Vec<CellId> = lost.map(|(cell, _)| *cell).collect();
        for cell in &lost {
            self.branches.remove(cell);
        }
        lost
    }
}
