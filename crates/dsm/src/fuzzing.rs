//! Decoding of another node's frames for `fuzz/`: classes, blocks, stamps and fragments of merge payloads.
//!
//! Compiled only with `cfg(fuzzing)`, which `scripts/fuzz.sh` sets.

use coherence::merged::{Batch, VectorTime};
use coherence::{MESSAGE_BYTES, Malformed, Message, NodeId};

use crate::frame::{DiscardFrame, DriverKind, FrameClass, OrderedFrame, classify};
use crate::merging::{MergePayload, Reassembly, StampTracker, batch, message, unnumbered};
use crate::page_server::discarding;

/// Reads the frames of node 1 at node 0, of `nodes` nodes.
#[derive(Debug)]
pub struct FrameReader {
    fragments: Reassembly,
    stamps: StampTracker,
    nodes: usize,
}

/// A decoded frame.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FrameRead {
    /// A message of an engine, and the number of the sender's batches that precede it.
    Message(Message, Option<u32>),
    /// The same payload encoded again, once its last fragment has arrived.
    Fragment(Option<Vec<u8>>),
    /// Predecessors of later messages.
    Stamp,
    /// A frame about discarded pages, encoded again from its block.
    Block([u8; MESSAGE_BYTES]),
    /// The sender ends.
    End,
}

impl FrameReader {
    /// Creates a reader before the first frame.
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
    /// If no node sends it: the page server ends with an error.
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
                FrameRead::Fragment(payload.map(|payload| match payload {
                    MergePayload::Batch(stamp, diffs) => {
                        let (from, diffs) = (NodeId(0), &diffs[..]);
                        batch(&Batch { from, stamp, diffs }, self.nodes)
                    }
                    MergePayload::Message(merge, page) => message(&merge, page.as_deref(), self.nodes),
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
