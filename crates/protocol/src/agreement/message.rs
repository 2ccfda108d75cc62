//! Messages between two cells about the table.

use serde::{Deserialize, Serialize};

use super::CellNumber;
use crate::CellId;

/// Message between two cells.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Message<K, V> {
    /// First message on every link, in both directions.
    Hello {
        /// The sender's entries.
        mine: Vec<(K, V)>,
        /// The receiver's entries, as far as the sender knows them.
        yours: Vec<(K, V)>,
    },
    /// First phase of a claim: requests the receiver's vote.
    Ask {
        /// Number of the claim among the sender's.
        claim: u64,
        /// Key that is claimed.
        key: K,
    },
    /// Reply to [`Message::Ask`].
    Vote {
        /// Number of the claim, as in [`Message::Ask`].
        claim: u64,
        /// In a vote against the claim, the owner of the key or the preferred claimer; none in a vote for the
        /// claim.
        against: Option<CellNumber>,
    },
    /// Second phase of a claim: its outcome.
    Settle {
        /// Number of the claim, as in [`Message::Ask`].
        claim: u64,
        /// Key that was claimed.
        key: K,
        /// The entry's value, if every cell voted for the claim.
        value: Option<V>,
    },
    /// The sender has changed or removed an entry of its own.
    Change {
        /// Number of the change among the sender's.
        change: u64,
        /// Key of the entry.
        key: K,
        /// The new value; none if the entry was removed.
        value: Option<V>,
    },
    /// Confirms that the sender has received a change.
    Receipt {
        /// Number of the change, as in [`Message::Change`] and [`Message::Forget`].
        change: u64,
    },
    /// Nothing runs any more that a dead cell's entries name. Confirmed by [`Message::Receipt`].
    Forget {
        /// Number of the change among the sender's.
        change: u64,
        /// The dead cell, and its last life that the sender knows to be dead.
        cell: CellId,
    },
    /// Requests a reply again, which may have been lost with a relay.
    Again(Request),
}

/// A request to which all cells reply.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// A claim, by its number as in [`Message::Ask`].
    Claim(u64),
    /// A change, by its number as in [`Message::Change`].
    Change(u64),
}

impl<K, V> Message<K, V> {
    /// Returns the request that this message makes, if it requests replies.
    pub fn request(&self) -> Option<Request> {
        match self {
            Self::Ask { claim, .. } => Some(Request::Claim(*claim)),
            Self::Change { change, .. } | Self::Forget { change, .. } => Some(Request::Change(*change)),
            Self::Hello { .. }
            | Self::Vote { .. }
            | Self::Settle { .. }
            | Self::Receipt { .. }
            | Self::Again(_) => None,
        }
    }
}
