//! Node numbers and sets of nodes.

use std::fmt;

/// Largest number of nodes. A set of them is one word of 64 bits.
pub const MAX_NODES: u16 = 64;

/// Number of a node, from 0 to [`MAX_NODES`] - 1.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct NodeId(pub u16);

impl fmt::Display for NodeId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.0)
    }
}

/// A set of nodes.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Nodes(pub u64);

impl Nodes {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns the nodes from 0 to `count` - 1.
    pub fn first(count: u16) -> Self {
        match count {
            MAX_NODES.. => Self(u64::MAX),
            _ => Self((1 << count) - 1),
        }
    }

    fn bit(node: NodeId) -> u64 {
        1_u64.checked_shl(u32::from(node.0)).unwrap_or(0)
    }

    /// Returns whether the set contains the node.
    pub fn has(self, node: NodeId) -> bool {
        self.0 & Self::bit(node) != 0
    }

    /// Returns the set with the node.
    #[must_use]
    pub fn with(self, node: NodeId) -> Self {
        Self(self.0 | Self::bit(node))
    }

    /// Returns the set without the node.
    #[must_use]
    pub fn without(self, node: NodeId) -> Self {
        Self(self.0 & !Self::bit(node))
    }

    /// Returns whether the set is a subset of `others`.
    pub fn is_within(self, others: Self) -> bool {
        self.0 & !others.0 == 0
    }

    /// Returns whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of nodes in the set.
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Iterates over the nodes in ascending order.
    pub fn iter(self) -> impl Iterator<Item = NodeId> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let node = NodeId(u16::try_from(left.trailing_zeros()).expect("64 at most"));
            (left != 0).then(|| {
                left &= left - 1;
                node
            })
        })
    }
}
