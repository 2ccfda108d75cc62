//! Encoding of diffs, vector times and messages about merged pages.
//!
//! ```text
//! diff     page u32, word u16, old u64, new u64                      22 bytes, little endian, as all
//! stamp    a u64 for each node of the layout
//! message  page u32, round u64, kind u8, detail u8, sequence u64     22 bytes, and a stamp
//! ```
//!
//! Fields that a kind does not use are 0.

use super::{Diff, Level, MAX_SHARERS, MergeMessage, MergeOp, VectorTime};
use crate::{Malformed, NodeId, Page, wire_kinds};

wire_kinds! {
    /// Kind of a [`MergeMessage`]: its [`MergeOp`].
    enum MergeOpKind {
        /// Kind of [`MergeOp::Propose`].
        Propose = 1,
        /// Kind of [`MergeOp::Offer`].
        Offer = 2,
        /// Kind of [`MergeOp::Accept`].
        Accept = 3,
        /// Kind of [`MergeOp::Refuse`].
        Refuse = 4,
        /// Kind of [`MergeOp::Begin`].
        Begin = 5,
        /// Kind of [`MergeOp::Withdraw`].
        Withdraw = 6,
        /// Kind of [`MergeOp::Leave`].
        Leave = 7,
        /// Kind of [`MergeOp::Loaded`].
        Loaded = 8,
        /// Kind of [`MergeOp::Kept`].
        Kept = 9,
        /// Kind of [`MergeOp::Drop`].
        Drop = 10,
        /// Kind of [`MergeOp::Dropped`].
        Dropped = 11,
        /// Kind of [`MergeOp::Settled`].
        Settled = 12,
        /// Kind of [`MergeOp::Left`].
        Left = 13,
    }
}

/// Length of an encoded [`Diff`], bytes.
pub const DIFF_BYTES: usize = 22;
/// Length of an encoded [`MergeMessage`] without its stamp, bytes.
pub const MERGE_MESSAGE_BYTES: usize = 22;
/// Words of a page.
const WORDS: u16 = 512;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"))
}

impl Diff {
    /// Encodes the diff.
    pub fn encode(&self) -> [u8; DIFF_BYTES] {
        let mut out = [0; DIFF_BYTES];
        out[0..4].copy_from_slice(&self.page.0.to_le_bytes());
        out[4..6].copy_from_slice(&self.word.to_le_bytes());
        out[6..14].copy_from_slice(&self.old.to_le_bytes());
        out[14..22].copy_from_slice(&self.new.to_le_bytes());
        out
    }

    /// Decodes a diff.
    ///
    /// # Errors
    /// [`Malformed`] if a page has no such word.
    pub fn decode(bytes: &[u8; DIFF_BYTES]) -> Result<Self, Malformed> {
        let word = u16::from_le_bytes([bytes[4], bytes[5]]);
        let diff = Self {
            page: Page(u32_at(bytes, 0)),
            word,
            old: u64_at(bytes, 6),
            new: u64_at(bytes, 14),
        };
        (word < WORDS).then_some(diff).ok_or(Malformed)
    }
}

impl VectorTime {
    /// Encodes the entries of `nodes` nodes into the first `8 * nodes` bytes.
    pub fn encode(&self, nodes: u16, out: &mut [u8]) {
        for (node, place) in (0..nodes).zip(out.chunks_exact_mut(8)) {
            place.copy_from_slice(&self.of(NodeId(node)).to_le_bytes());
        }
    }

    /// Decodes a vector time of as many entries as the bytes have.
    ///
    /// # Errors
    /// [`Malformed`] for more than [`MAX_SHARERS`] nodes, or a part of an entry.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let nodes = bytes.len() / 8;
        if !bytes.len().is_multiple_of(8) || nodes > usize::from(MAX_SHARERS) {
            return Err(Malformed);
        }
        let mut stamp = Self::default();
        for node in 0..nodes {
            stamp.set(node, u64_at(bytes, node * 8));
        }
        Ok(stamp)
    }
}

impl MergeMessage {
    /// Encodes the message without its stamp.
    pub fn encode(&self) -> [u8; MERGE_MESSAGE_BYTES] {
        let (kind, detail, sequence) = match self.op {
            MergeOp::Propose(level) => (MergeOpKind::Propose, level.0, 0),
            MergeOp::Offer(level) => (MergeOpKind::Offer, level.0, 0),
            MergeOp::Accept { is_loaded, sequence } => (MergeOpKind::Accept, u8::from(is_loaded), sequence),
            MergeOp::Refuse => (MergeOpKind::Refuse, 0, 0),
            MergeOp::Begin => (MergeOpKind::Begin, 0, 0),
            MergeOp::Withdraw => (MergeOpKind::Withdraw, 0, 0),
            MergeOp::Leave => (MergeOpKind::Leave, 0, 0),
            MergeOp::Loaded { is_loaded, sequence } => (MergeOpKind::Loaded, u8::from(is_loaded), sequence),
            MergeOp::Kept => (MergeOpKind::Kept, 0, 0),
            MergeOp::Drop => (MergeOpKind::Drop, 0, 0),
            MergeOp::Dropped => (MergeOpKind::Dropped, 0, 0),
            MergeOp::Settled => (MergeOpKind::Settled, 0, 0),
            MergeOp::Left => (MergeOpKind::Left, 0, 0),
        };
        let mut out = [0; MERGE_MESSAGE_BYTES];
        out[0..4].copy_from_slice(&self.page.0.to_le_bytes());
        out[4..12].copy_from_slice(&self.round.to_le_bytes());
        out[12] = kind.byte();
        out[13] = detail;
        out[14..22].copy_from_slice(&sequence.to_le_bytes());
        out
    }

    /// Decodes a message whose stamp was decoded before.
    ///
    /// # Errors
    /// [`Malformed`] if no message has this encoding.
    pub fn decode(bytes: &[u8; MERGE_MESSAGE_BYTES], stamp: VectorTime) -> Result<Self, Malformed> {
        let (detail, sequence) = (bytes[13], u64_at(bytes, 14));
        let is_loaded = detail != 0;
        let level = Level(detail);
        let op = match MergeOpKind::from_byte(bytes[12]).ok_or(Malformed)? {
            MergeOpKind::Propose | MergeOpKind::Offer if !(1..=5).contains(&detail) => return Err(Malformed),
            MergeOpKind::Propose => MergeOp::Propose(level),
            MergeOpKind::Offer => MergeOp::Offer(level),
            MergeOpKind::Accept => MergeOp::Accept { is_loaded, sequence },
            MergeOpKind::Refuse => MergeOp::Refuse,
            MergeOpKind::Begin => MergeOp::Begin,
            MergeOpKind::Withdraw => MergeOp::Withdraw,
            MergeOpKind::Leave => MergeOp::Leave,
            MergeOpKind::Loaded => MergeOp::Loaded { is_loaded, sequence },
            MergeOpKind::Kept => MergeOp::Kept,
            MergeOpKind::Drop => MergeOp::Drop,
            MergeOpKind::Dropped => MergeOp::Dropped,
            MergeOpKind::Settled => MergeOp::Settled,
            MergeOpKind::Left => MergeOp::Left,
        };
        let message = Self {
            stamp,
            page: Page(u32_at(bytes, 0)),
            round: u64_at(bytes, 4),
            op,
        };
        // Each message has one encoding. Comparing the bytes also checks the unused fields.
        (message.encode() == *bytes).then_some(message).ok_or(Malformed)
    }
}
