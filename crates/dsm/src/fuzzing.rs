//! Messages of other nodes about merged pages, as a lane assembles them, for `fuzz/`.
//!
//! Compiled under `cfg(fuzzing)` only, which `scripts/fuzz.sh` sets.

use coherence::merged::Batch;
use coherence::{MESSAGE_BYTES, NodeId};

use crate::merging::{Pieces, Said, batch, saying};

/// Assembles one node's messages from its frames, for so many nodes.
#[derive(Debug)]
pub struct Assembler {
    pieces: Pieces,
    nodes: usize,
}

impl Assembler {
    /// No frame has come.
    pub fn new(nodes: usize) -> Self {
        let pieces = Pieces::new();
        Self { pieces, nodes }
    }

    /// The frames that say the same, once a message is complete.
    ///
    /// # Errors
    /// If the frames are no message.
    pub fn add(&mut self, frame: &[u8; MESSAGE_BYTES]) -> Result<Option<Vec<u8>>, &'static str> {
        let said = self.pieces.add(frame, self.nodes)?;
        Ok(said.map(|said| match said {
            Said::Batch(stamp, changes) => {
                let (from, changes) = (NodeId(0), &changes[..]);
                batch(&Batch { from, stamp, changes }, self.nodes)
            }
            Said::Saying(message, page) => saying(&message, page.as_deref(), self.nodes),
        }))
    }
}
