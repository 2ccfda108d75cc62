//! Which batches of changes a message comes after: a vector clock with a place for each node.

use crate::NodeId;

/// So many nodes at most can merge pages.
pub const MAX_SHARERS: u16 = 16;

/// How many batches of each node had been applied where a message comes from, counted from 1.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct VectorTime([u64; MAX_SHARERS as usize]);

impl VectorTime {
    /// Batches of that node.
    pub fn of(&self, node: NodeId) -> u64 {
        self.0[usize::from(node.0)]
    }

    /// The same, but with so many batches of that node.
    #[must_use]
    pub fn with(mut self, node: NodeId, count: u64) -> Self {
        self.set(usize::from(node.0), count);
        self
    }

    pub(super) fn set(&mut self, node: usize, count: u64) {
        self.0[node] = count;
    }

    pub(super) fn add_one(&mut self, node: NodeId) -> u64 {
        let place = &mut self.0[usize::from(node.0)];
        *place += 1;
        *place
    }

    /// Whether who is at `self` has applied all that `other` came after.
    pub fn covers(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(mine, theirs)| mine >= theirs)
    }

    /// Whether a batch is the next of its source here, and all that it came after has been applied.
    pub(super) fn awaits(&self, from: NodeId, batch: &Self) -> bool {
        let mut before = *batch;
        let number = &mut before.0[usize::from(from.0)];
        let is_next = *number == self.of(from) + 1;
        *number = 0;
        is_next && self.covers(&before)
    }
}
