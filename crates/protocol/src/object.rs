//! Messages to an object that moves between cells (a vCPU, say): each is delivered once, in the order of its sender, to
//! whoever has the object then.
//!
//! 1. A sender numbers its messages to an object and sends each again until it was taken. The object carries with it, for
//!    each sender, how many it has taken. So neither a doubled packet nor a move delivers one twice.
//! 2. Only the owner moves an object, in two phases: the offer has its state, and from then on the owner delivers nothing;
//!    when the other side says that it has it, the owner gives it away (that is the commit), and only then, or when the
//!    owner is dead, does the other side use it. If the other side is dead, the owner goes on. Nobody waits for a third.
//! 3. Each move makes the object's version higher. A cell never takes a version that it has had.
//! 4. A directory knows the owners. It is spread over the cells by a hash of the object's name; each part is rebuilt, when
//!    a cell died, from what all that are left say (a census). Until all have, it does not say that an object is lost.
//! 5. A claim on an object is made by its owner, and by who gave it away until the new owner's claim has been noted, so
//!    that one of both is in every census. An earlier owner's claim may be in it too. So a complete directory that knows of
//!    no version above one that was left is certain that the object is lost.
//!
//! [`Node`] is one cell's part in all of this. What the order of things could break is checked by trying every order
//! (`tests`).

mod directory;
mod holdings;
mod node;
mod outbox;
#[cfg(any(test, feature = "stories"))]
pub mod stories;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use crate::CellId;

pub use node::Node;

/// The name of an object, unique in a cluster.
pub type ObjectId = u64;

/// How many messages of each sender an object has taken.
pub type Taken = BTreeMap<CellId, u64>;

/// Who has an object. Of two claims the one with the higher version holds.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Claim {
    /// The object.
    pub object: ObjectId,
    /// Counts its moves.
    pub version: u64,
    /// `None`, in the directory's answer: nobody has it, nor will.
    pub owner: Option<CellId>,
}

/// What cells send one another. `M` is a message's body, `S` an object's state.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Packet<M, S> {
    /// To the owner: the sender's message of this number.
    Message {
        /// To whom.
        object: ObjectId,
        /// Counts the sender's messages to this object, from 0.
        number: u64,
        /// The version that the directory told the sender of.
        version: u64,
        /// What it says.
        body: M,
    },
    /// To the sender: the object has taken its messages below this number.
    Taken {
        /// The object.
        object: ObjectId,
        /// One more than the last message taken.
        below: u64,
    },
    /// To the sender of a message with this version: it was here and is no longer.
    NotHere {
        /// The object.
        object: ObjectId,
        /// As in the message.
        version: u64,
        /// To whom it was given, if that is still remembered.
        given: Option<Claim>,
        /// If not: the directory of this round, or a later one, knows.
        round: u64,
    },
    /// To the directory: who has it? Answered when a version above this one is known, or it is certain that there is none.
    Find {
        /// The object.
        object: ObjectId,
        /// Of the members that the sender knows.
        round: u64,
        /// The version that the sender knows of.
        above: u64,
    },
    /// The directory's answer. Without an owner nobody has it, nor will.
    Found(Claim),
    /// To the directory.
    Claim(u64, Claim),
    /// The directory's receipt for a claim in this round.
    Noted(u64, Claim),
    /// To the directory: all claims of a cell in its part, in this round.
    Census(u64, Vec<Claim>),
    /// The receipt.
    CensusNoted(u64),
    /// To the next owner: the object as it is.
    Offer {
        /// The object.
        object: ObjectId,
        /// Its version there.
        version: u64,
        /// What it has taken.
        taken: Taken,
        /// Everything else.
        state: S,
    },
    /// To the owner: the offer has come.
    Ready(ObjectId, u64),
    /// To the next owner: this version is yours.
    Yours(ObjectId, u64),
    /// To the one before: no need to remember, the directory has noted it in this round.
    Mine(ObjectId, u64, u64),
}

/// What is to be done.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Effect<M, S> {
    /// Send a packet; to this cell itself too.
    Send(CellId, Packet<M, S>),
    /// The object, which this cell has, takes a message.
    Deliver {
        /// The object.
        object: ObjectId,
        /// Who sent it.
        from: CellId,
        /// What it says.
        body: M,
    },
    /// An object has come. It runs here from now on.
    Activate {
        /// The object.
        object: ObjectId,
        /// Its state when it was offered.
        state: S,
    },
    /// An object that was offered stays. It runs on.
    Resume(ObjectId),
    /// An object that was offered is gone from here.
    Release(ObjectId),
    /// A message that this cell sent has been taken.
    Done {
        /// The object.
        object: ObjectId,
        /// The message's number.
        number: u64,
    },
    /// An object to which this cell has sent is lost or has ended. No later message to it is taken; that of this number and
    /// those after it were not, as far as is known.
    Gone {
        /// The object.
        object: ObjectId,
        /// Of the first message without a receipt.
        number: u64,
    },
}

/// The cells that are alive, as agreed. Each change has a number.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Members {
    /// Counts the changes.
    pub round: u64,
    /// Who is alive.
    pub live: BTreeSet<CellId>,
}

impl Members {
    /// Whose part of the directory the object is in: the one with the highest hash of both (rendezvous hashing), so that a
    /// death moves only what the dead had. `None` if nobody is alive.
    pub fn home(&self, object: ObjectId) -> Option<CellId> {
        self.live.iter().copied().max_by_key(|cell| {
            let name = u64::from(cell.number) << 32 | u64::from(cell.life);
            mix(mix(object) ^ name)
        })
    }
}

/// A bijection that spreads (splitmix64).
fn mix(value: u64) -> u64 {
    let mut value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}
