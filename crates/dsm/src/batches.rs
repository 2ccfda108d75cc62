//! A vector time (`coherence::merged`) in little room: 32 bits for each node.

use coherence::NodeId;
use coherence::merged::VectorTime;
use serde::{Deserialize, Serialize};

/// Largest number of nodes with merged page tables: each has an entry in [`Batches`] and is sent every diff.
pub const SHARERS_MAX: usize = 8;
const _: () = assert!(SHARERS_MAX <= coherence::merged::MAX_SHARERS as usize);
/// Largest number of batches by which a message may be ahead of the applied ones. Streams and buffers hold
/// far fewer, and a sender that can't send blocks.
pub const AHEAD_MAX: u32 = 1 << 20;

/// Number of batches of each node that happened before a message, modulo 2^32.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Batches([u32; SHARERS_MAX]);

impl Batches {
    /// Returns the number of batches of a node; 0 for a number past the last node's.
    pub fn of(&self, node: usize) -> u32 {
        self.0.get(node).copied().unwrap_or(0)
    }

    /// Returns a vector time with batches of one node only.
    pub fn only(node: usize, count: u32) -> Self {
        let mut batches = Self::default();
        if let Some(place) = batches.0.get_mut(node) {
            *place = count;
        }
        batches
    }
}

impl From<&VectorTime> for Batches {
    fn from(stamp: &VectorTime) -> Self {
        let mut batches = Self::default();
        for (node, place) in (0..).zip(&mut batches.0) {
            *place = stamp.of(NodeId(node)) as u32;
        }
        batches
    }
}

/// Returns by how many batches `wanted` is ahead of `count`. Both may have wrapped.
pub fn ahead(count: u32, wanted: u32) -> u32 {
    let ahead = wanted.wrapping_sub(count);
    // A larger difference means that `wanted` is behind.
    if ahead <= u32::MAX / 2 { ahead } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn applied_batches_are_not_ahead_across_a_wrap() {
        for (count, wanted, expected) in [
            (0, 0, 0),
            (5, 3, 0),
            (3, 5, 2),
            (u32::MAX, 1, 2),
            (1, u32::MAX, 0),
            (0, u32::MAX / 2, u32::MAX / 2),
        ] {
            assert_eq!(ahead(count, wanted), expected, "{wanted} after {count}");
        }
    }

    #[test]
    fn stamp_keeps_each_nodes_number() {
        let stamp = VectorTime::default()
            .with(NodeId(0), 3)
            .with(NodeId(7), (1 << 32) + 9);
        let batches = Batches::from(&stamp);
        assert_eq!([0, 1, 7, 8].map(|node| batches.of(node)), [3, 0, 9, 0]);
        assert_eq!(Batches::only(7, 9).of(7), 9);
        assert_eq!(Batches::only(8, 9), Batches::default());
    }
}
