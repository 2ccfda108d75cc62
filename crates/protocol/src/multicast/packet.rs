//! Packets on the links between cells, and the trees along which they go.

use serde::{Deserialize, Serialize};

use crate::CellId;

/// A cell in a tree. A tree is a list with each cell before the cells below it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Hop {
    /// The cell, in one of its lives.
    pub cell: CellId,
    /// Number of the next list entries that are below this cell.
    pub below: u16,
}

/// Packet on a link.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Packet<M> {
    /// A message over the source's own link to the receiver.
    Direct {
        /// Sequence number of the message, for this source and this receiver.
        number: u64,
        /// Whether this is the first message over this link.
        begins: bool,
        /// The sender has received all messages of the receiver below this number.
        heard: u64,
        /// Message that the cells handle.
        body: M,
    },
    /// A message that a source or a relay forwards along a tree.
    Relayed {
        /// The source of the message.
        source: CellId,
        /// Sequence number, as in [`Packet::Direct`].
        number: u64,
        /// The tree below the receiver, with the sequence number for each cell.
        below: Vec<(Hop, u64)>,
        /// Whether the relay gathers replies. A cell without support for packets of replies omits it.
        #[serde(default)]
        gathers: bool,
        /// Message that the cells handle.
        body: M,
    },
    /// A confirmation as in [`Packet::Direct`], without a message.
    Heard {
        /// The sender has received all messages of the receiver below this number.
        heard: u64,
    },
    /// Replies to a message that came by a relay: of the sender, and of cells below it.
    Replies {
        /// The source of the message.
        source: CellId,
        /// Sequence number of the message for the sender of this packet.
        number: u64,
        /// Replies of the cells below the sender and of the sender, equal ones together.
        replies: Vec<Gathered<M>>,
        /// Whether a relay has to forward them at once.
        at_once: bool,
        /// Whether these are the last replies of the sender and of the cells below it.
        last: bool,
    },
    /// A relay reports that the receiver's message did not reach these cells, for lack of a link.
    Unreached {
        /// The cells, in no order.
        cells: Vec<CellId>,
    },
}

/// A reply that several cells have sent.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Gathered<M> {
    /// The reply.
    pub body: M,
    /// The cells that have sent it. Each has received all messages of the source below the number beside it.
    pub cells: Vec<(CellId, u64)>,
}
