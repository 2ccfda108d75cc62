//! Vector time of merged pages: the number of batches of each node that happened before a message.

use crate::NodeId;

/// Largest number of nodes that merge pages.
pub const MAX_SHARERS: u16 = 16;

/// Vector clock: the number of batches of each node that the sender of a message had applied, counted from 1.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct VectorTime([u64; MAX_SHARERS as usize]);

impl VectorTime {
    /// Returns the number of batches of a node.
    pub fn of(&self, node: NodeId) -> u64 {
        self.0[usize::from(node.0)]
    }

    /// Returns the vector time with another number of batches of a node.
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

    /// Returns whether a node at `self` has applied all batches that happened before `other`.
    pub fn covers(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(mine, theirs)| mine >= theirs)
    }

    /// Returns whether a batch is the next one of its sender, and all batches that happened before it are
    /// applied.
    pub(super) fn awaits(&self, from: NodeId, batch: &Self) -> bool {
        let mut before = *batch;
        let number = &mut before.0[usize::from(from.0)];
        let is_next = *number == self.of(from) + 1;
        *number = 0;
        is_next && self.covers(&before)
    }
}
