//! Another node's frames as a lane reads them, for `fuzz/`: classes, blocks, stamps, and messages about merged pages in pieces.
//!
//! Compiled under `cfg(fuzzing)` only, which `scripts/fuzz.sh` sets.

use coherence::merged::{Batch, VectorTime};
use coherence::{MESSAGE_BYTES, Malformed, Message, NodeId};

use crate::frame::{DiscardFrame, DriverKind, FrameClass, OrderedFrame, classify};
use crate::merging::{MergePayload, Reassembly, StampTracker, batch, message, unnumbered};
use crate::page_server::discarding;

/// Reads one node's frames, for so many nodes, of which the reader is node 0 and the sender node 1.
#[derive(Debug)]
pub struct FrameReader {
    fragments: Reassembly,
    stamps: StampTracker,
    nodes: usize,
}

/// What a frame is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FrameRead {
    /// A message of an engine, and the number of the sender's batches that it comes after.
    Message(Message, Option<u32>),
    /// The frames that say the same, once a message about merged pages is complete.
    Reassembly(Option<Vec<u8>>),
    /// What later messages come after.
    Stamp,
    /// About pages that are forgotten: the frame that says the same of the first page and the mask.
    Block([u8; MESSAGE_BYTES]),
    /// The sender ends.
    End,
}

impl FrameReader {
    /// No frame has come.
    pub fn new(nodes: usize) -> Self {
        Self {
            fragments: Reassembly::new(),
            stamps: StampTracker::new([1, 0], nodes),
            nodes,
        }
    }

    /// Reads the next frame.
    ///
    /// # Errors
    /// If no node sends it: the lane leaves its sender.
    pub fn read(&mut self, frame: &[u8; MESSAGE_BYTES]) -> Result<FrameRead, &'static str> {
        let malformed = |_: Malformed| "malformed";
        Ok(match classify(frame).map_err(malformed)? {
            FrameClass::End => FrameRead::End,
            FrameClass::Discards(kind) => {
                let kind = match kind {
                    DiscardFrame::Request => DriverKind::Discard,
                    DiscardFrame::Done => DriverKind::Discarded,
                };
                let block = discarding::block_of(frame);
                FrameRead::Block(discarding::frame(kind, block, 0))
            }
            FrameClass::Ordered(OrderedFrame::Stamp) => {
                self.stamps.receive(frame, &VectorTime::default())?;
                FrameRead::Stamp
            }
            FrameClass::Ordered(OrderedFrame::Fragment) => {
                let payload = self.fragments.add(frame, self.nodes)?;
                FrameRead::Reassembly(payload.map(|payload| match payload {
                    MergePayload::Batch(stamp, changes) => {
                        let (from, changes) = (NodeId(0), &changes[..]);
                        batch(&Batch { from, stamp, changes }, self.nodes)
                    }
                    MergePayload::Message(message, page) => message(&message, page.as_deref(), self.nodes),
                }))
            }
            FrameClass::Ordered(OrderedFrame::Message) => {
                let (number, frame) = unnumbered(frame);
                let message = Message::decode(&frame).map_err(malformed)?;
                FrameRead::Message(message, number.map(|(number, _)| number))
            }
        })
    }
}
