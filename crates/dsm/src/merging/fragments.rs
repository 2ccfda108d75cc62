//! Encoding of batches and messages about merged pages, in fragments of one frame each on the control stream.
//! They need no stream of their own.
//!
//! ```text
//! payload    length u32, kind u8, stamp u64 for each node, and then by kind     little endian
//! fragment   4 bytes of it, the kind of frame, 11 bytes of it
//! ```

use coherence::merged::{Batch, DIFF_BYTES, Diff, MERGE_MESSAGE_BYTES, MergeMessage, VectorTime};
use coherence::wire_kinds;

use super::LIMIT;
use crate::PAGE_LEN;
use crate::batches::SHARERS_MAX;
use crate::frame::{DriverKind, FRAME_BYTES, Frame, KIND_AT};

wire_kinds! {
    /// Kind of a reassembled payload.
    pub enum PayloadKind {
        /// Kind of [`MergePayload::Batch`].
        Batch = 1,
        /// Kind of [`MergePayload::Message`].
        Message = 2,
    }
}

/// Bytes of a frame that are not its kind.
const FRAGMENT_BYTES: usize = FRAME_BYTES - 1;
/// Bytes of the length before the payload.
const LENGTH_BYTES: usize = 4;
/// Larger than any payload: all words of all pages.
const LONGEST: usize = LIMIT * 512 * DIFF_BYTES + 4 * PAGE_LEN;
const MALFORMED: &str = "it sent a malformed message about merged pages";

/// A reassembled payload.
#[derive(Debug)]
pub enum MergePayload {
    /// A batch of diffs and its vector time.
    Batch(VectorTime, Vec<Diff>),
    /// A message about a page, with the page's bytes if they are attached.
    Message(MergeMessage, Option<Box<[u8; PAGE_LEN]>>),
}

impl MergePayload {
    /// Returns the vector time; for a batch with its own number.
    pub fn stamp(&self) -> &VectorTime {
        match self {
            Self::Batch(stamp, _) => stamp,
            Self::Message(message, _) => &message.stamp,
        }
    }
}

/// Fragments of one node until the payload is complete.
#[derive(Debug)]
pub struct Reassembly(Vec<u8>);

impl Reassembly {
    pub fn new() -> Self {
        Self(Vec::with_capacity(PAGE_LEN))
    }

    /// Adds a fragment of a node. Returns the payload if the fragment is its last one.
    ///
    /// # Errors
    /// If the payload is malformed.
    pub fn add(&mut self, frame: &Frame, nodes: usize) -> Result<Option<MergePayload>, &'static str> {
        self.0.extend_from_slice(&frame[..KIND_AT]);
        self.0.extend_from_slice(&frame[KIND_AT + 1..]);
        let length = match self.0.first_chunk::<LENGTH_BYTES>() {
            Some(length) => u32::from_le_bytes(*length) as usize,
            None => return Ok(None),
        };
        if length > LONGEST {
            return Err("it sent a message about merged pages that is too long");
        }
        if self.0.len() < LENGTH_BYTES + length {
            return Ok(None);
        }
        let payload = decode(&self.0[LENGTH_BYTES..][..length], nodes);
        self.0.clear();
        payload.map(Some)
    }
}

fn decode(payload: &[u8], nodes: usize) -> Result<MergePayload, &'static str> {
    let (&kind, rest) = payload.split_first().ok_or(MALFORMED)?;
    let (stamp, rest) = rest.split_at_checked(8 * nodes).ok_or(MALFORMED)?;
    let stamp = VectorTime::decode(stamp).map_err(|_| MALFORMED)?;
    match PayloadKind::from_byte(kind).ok_or(MALFORMED)? {
        PayloadKind::Batch => {
            let (diffs, []) = rest.as_chunks::<DIFF_BYTES>() else {
                return Err(MALFORMED);
            };
            let diffs: Result<Vec<_>, _> = diffs.iter().map(Diff::decode).collect();
            Ok(MergePayload::Batch(stamp, diffs.map_err(|_| MALFORMED)?))
        }
        PayloadKind::Message => {
            let (message, page) = rest.split_first_chunk::<MERGE_MESSAGE_BYTES>().ok_or(MALFORMED)?;
            let message = MergeMessage::decode(message, stamp).map_err(|_| MALFORMED)?;
            let page = match (message.op.carries_page(), page) {
                (false, []) => None,
                (true, page) => Some(Box::new(page.try_into().map_err(|_| MALFORMED)?)),
                _ => return Err(MALFORMED),
            };
            Ok(MergePayload::Message(message, page))
        }
    }
}

/// Encodes a batch in fragments.
pub fn batch(batch: &Batch<'_>, nodes: usize) -> Vec<u8> {
    let diffs: Vec<u8> = batch.diffs.iter().flat_map(Diff::encode).collect();
    fragments(
        PayloadKind::Batch,
        &[stamp(&batch.stamp, nodes, &mut [0; 8 * SHARERS_MAX]), &diffs],
    )
}

/// Encodes a message in fragments, with the page's bytes if they are attached.
pub fn message(message: &MergeMessage, page: Option<&[u8; PAGE_LEN]>, nodes: usize) -> Vec<u8> {
    let page = page.map_or(&[][..], |page| &page[..]);
    let head = message.encode();
    fragments(
        PayloadKind::Message,
        &[
            stamp(&message.stamp, nodes, &mut [0; 8 * SHARERS_MAX]),
            &head,
            page,
        ],
    )
}

fn stamp<'a>(stamp: &VectorTime, nodes: usize, room: &'a mut [u8; 8 * SHARERS_MAX]) -> &'a [u8] {
    stamp.encode(nodes as u16, room);
    &room[..8 * nodes]
}

pub fn fragments(kind: PayloadKind, parts: &[&[u8]]) -> Vec<u8> {
    let length = 1 + parts.iter().map(|part| part.len()).sum::<usize>();
    let mut whole = Vec::with_capacity(LENGTH_BYTES + length);
    whole.extend_from_slice(&(length as u32).to_le_bytes());
    whole.push(kind.byte());
    for part in parts {
        whole.extend_from_slice(part);
    }
    let mut frames = Vec::with_capacity(whole.len().div_ceil(FRAGMENT_BYTES) * FRAME_BYTES);
    for fragment in whole.chunks(FRAGMENT_BYTES) {
        let mut frame = [0; FRAME_BYTES];
        let (before, after) = fragment.split_at(fragment.len().min(KIND_AT));
        frame[..before.len()].copy_from_slice(before);
        frame[KIND_AT] = DriverKind::Fragment.byte();
        frame[KIND_AT + 1..][..after.len()].copy_from_slice(after);
        frames.extend_from_slice(&frame);
    }
    frames
}
