//! How changes, stamps and messages about merged pages are written down.
//!
//! ```text
//! change   page u32, word u16, old u64, new u64                      22 bytes, little endian, as all
//! stamp    a u64 for each node of the layout
//! saying   page u32, round u64, kind u8, detail u8, turn u64         22 bytes, and a stamp
//! ```
//!
//! What a kind has no use for is 0.

use super::{Change, Level, MAX_SHARERS, Say, Saying, VectorTime};
use crate::{Malformed, NodeId, Page, wire_kinds};

wire_kinds! {
    /// The kind of a [`Saying`]: which [`Say`] it has.
    enum SayKind {
        /// [`Say::Propose`].
        Propose = 1,
        /// [`Say::Offer`].
        Offer = 2,
        /// [`Say::Accept`].
        Accept = 3,
        /// [`Say::Refuse`].
        Refuse = 4,
        /// [`Say::Begin`].
        Begin = 5,
        /// [`Say::Withdraw`].
        Withdraw = 6,
        /// [`Say::Leave`].
        Leave = 7,
        /// [`Say::Loaded`].
        Loaded = 8,
        /// [`Say::Kept`].
        Kept = 9,
        /// [`Say::Drop`].
        Drop = 10,
        /// [`Say::Dropped`].
        Dropped = 11,
        /// [`Say::Settled`].
        Settled = 12,
        /// [`Say::Left`].
        Left = 13,
    }
}

/// Of a [`Change`], bytes.
pub const CHANGE_BYTES: usize = 22;
/// Of a [`Saying`] without its stamp, bytes.
pub const SAYING_BYTES: usize = 22;
/// Words of a page.
const WORDS: u16 = 512;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"))
}

impl Change {
    /// As bytes.
    pub fn encode(&self) -> [u8; CHANGE_BYTES] {
        let mut out = [0; CHANGE_BYTES];
        out[0..4].copy_from_slice(&self.page.0.to_le_bytes());
        out[4..6].copy_from_slice(&self.word.to_le_bytes());
        out[6..14].copy_from_slice(&self.old.to_le_bytes());
        out[14..22].copy_from_slice(&self.new.to_le_bytes());
        out
    }

    /// From bytes.
    ///
    /// # Errors
    /// If a page has no such word.
    pub fn decode(bytes: &[u8; CHANGE_BYTES]) -> Result<Self, Malformed> {
        let word = u16::from_le_bytes([bytes[4], bytes[5]]);
        let change = Self {
            page: Page(u32_at(bytes, 0)),
            word,
            old: u64_at(bytes, 6),
            new: u64_at(bytes, 14),
        };
        (word < WORDS).then_some(change).ok_or(Malformed)
    }
}

impl VectorTime {
    /// Writes it for so many nodes into the first `8 * nodes` bytes.
    pub fn encode(&self, nodes: u16, out: &mut [u8]) {
        for (node, place) in (0..nodes).zip(out.chunks_exact_mut(8)) {
            place.copy_from_slice(&self.of(NodeId(node)).to_le_bytes());
        }
    }

    /// From as many numbers as there are nodes.
    ///
    /// # Errors
    /// If those are more nodes than can merge pages, or part of a number.
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

impl Saying {
    /// As bytes, without the stamp.
    pub fn encode(&self) -> [u8; SAYING_BYTES] {
        let (kind, detail, turn) = match self.say {
            Say::Propose(level) => (SayKind::Propose, level.0, 0),
            Say::Offer(level) => (SayKind::Offer, level.0, 0),
            Say::Accept { is_loaded, turn } => (SayKind::Accept, u8::from(is_loaded), turn),
            Say::Refuse => (SayKind::Refuse, 0, 0),
            Say::Begin => (SayKind::Begin, 0, 0),
            Say::Withdraw => (SayKind::Withdraw, 0, 0),
            Say::Leave => (SayKind::Leave, 0, 0),
            Say::Loaded { is_loaded, turn } => (SayKind::Loaded, u8::from(is_loaded), turn),
            Say::Kept => (SayKind::Kept, 0, 0),
            Say::Drop => (SayKind::Drop, 0, 0),
            Say::Dropped => (SayKind::Dropped, 0, 0),
            Say::Settled => (SayKind::Settled, 0, 0),
            Say::Left => (SayKind::Left, 0, 0),
        };
        let mut out = [0; SAYING_BYTES];
        out[0..4].copy_from_slice(&self.page.0.to_le_bytes());
        out[4..12].copy_from_slice(&self.round.to_le_bytes());
        out[12] = kind.byte();
        out[13] = detail;
        out[14..22].copy_from_slice(&turn.to_le_bytes());
        out
    }

    /// From bytes, and the stamp that came with them.
    ///
    /// # Errors
    /// If no message is written like this.
    pub fn decode(bytes: &[u8; SAYING_BYTES], stamp: VectorTime) -> Result<Self, Malformed> {
        let (detail, turn) = (bytes[13], u64_at(bytes, 14));
        let is_loaded = detail != 0;
        let level = Level(detail);
        let say = match SayKind::from_byte(bytes[12]).ok_or(Malformed)? {
            SayKind::Propose | SayKind::Offer if !(1..=5).contains(&detail) => return Err(Malformed),
            SayKind::Propose => Say::Propose(level),
            SayKind::Offer => Say::Offer(level),
            SayKind::Accept => Say::Accept { is_loaded, turn },
            SayKind::Refuse => Say::Refuse,
            SayKind::Begin => Say::Begin,
            SayKind::Withdraw => Say::Withdraw,
            SayKind::Leave => Say::Leave,
            SayKind::Loaded => Say::Loaded { is_loaded, turn },
            SayKind::Kept => Say::Kept,
            SayKind::Drop => Say::Drop,
            SayKind::Dropped => Say::Dropped,
            SayKind::Settled => Say::Settled,
            SayKind::Left => Say::Left,
        };
        let saying = Self {
            stamp,
            page: Page(u32_at(bytes, 0)),
            round: u64_at(bytes, 4),
            say,
        };
        // One way to write each: also what has no meaning is checked.
        (saying.encode() == *bytes).then_some(saying).ok_or(Malformed)
    }
}
