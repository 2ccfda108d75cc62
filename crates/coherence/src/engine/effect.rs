//! Effects: actions that an event of the engine requires of its driver.
//!
//! Each entry point of [`crate::Engine`] takes one event and appends effects to a list of the caller's. The
//! engine never calls its driver. The driver performs the effects, then passes the next event. It keeps these
//! rules:
//!
//! 1. **Order.** It performs the effects of an event in the order of the list, each completely before the
//!    next one. An owner that gives a page away appends [`Effect::Restrict`] before the [`Effect::Send`] that
//!    carries the page. So no processor can write the page after its bytes were read, and the receiver sees
//!    every write.
//! 2. **Before the next event.** It performs all effects of an event before it passes another event of the
//!    same engine. The engine's state already includes them: [`crate::Engine::is_alone`] and
//!    [`crate::Engine::is_absent`] describe the node only when the list is empty.
//! 3. **Received bytes.** The bytes that came with a message stay where they were received until the effects
//!    of that message are performed. [`Effect::Store`], [`Effect::MapPrefetched`] and a grant of
//!    [`Data::Received`] refer to the message of the last [`crate::Engine::receive`] alone.
//! 4. **Sent bytes.** A message that carries the page carries the bytes at the time of [`Effect::Send`]. A
//!    driver that queues the message copies them first: the page may change, or be gone, after the next
//!    effect.
//! 5. **No answer.** No effect has a result that the engine waits for. A driver that can't perform one ends
//!    the node.
//!
//! A refused message ([`crate::ProtocolError`]) appends nothing. An event appends at most [`EFFECTS_MAX`]
//! effects, so a list with that capacity, emptied after each event, never allocates.

use crate::{Data, MAX_NODES, Message, NodeId, Page, Right};

/// The most effects of one event: an owner revokes its own right, discards the page, then replies to every
/// other node and transfers the ownership.
pub const EFFECTS_MAX: usize = MAX_NODES as usize + 4;

/// One action of the driver.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Effect {
    /// Send a message once and without loss. One that [carries the page](Message::carries_page) goes with its
    /// bytes.
    Send {
        /// Node that receives the message.
        to: NodeId,
        /// Message, which goes by the control stream or the bulk stream.
        message: Message,
    },
    /// Revoke rights. Afterwards no processor of this node can use more than `to`, and everything that one
    /// wrote to the page has reached its bytes.
    Restrict {
        /// Page that loses rights on this node.
        page: Page,
        /// The right that remains.
        to: Right,
    },
    /// Keep the bytes that came with the message as the page's. No right comes with them. A grant with
    /// [`Data::Local`] follows, when other nodes have given up their copies.
    Store {
        /// Page to which the bytes belong.
        page: Page,
    },
    /// Map the page, and wake every thread that waits for it. A thread that needs a higher right faults
    /// again. The page is *held* until [`crate::Engine::used`].
    Grant {
        /// Page that this node may use now.
        page: Page,
        /// Right that it grants.
        right: Right,
        /// Source of the bytes.
        contents: Data,
    },
    /// The page is fresh: no processor anywhere can use it. Discard what this node has in its place, then
    /// wake every thread that waits for it: they fault again.
    Forget {
        /// Page whose content is discarded.
        page: Page,
    },
    /// Map the page for reading, with the bytes that came with the message. No thread waits for it, and it is
    /// not held.
    MapPrefetched {
        /// Page that a prefetch has brought.
        page: Page,
    },
}

impl Effect {
    /// Returns the page that the effect is about.
    pub fn page(&self) -> Page {
        match *self {
            Self::Send { message, .. } => message.page,
            Self::Restrict { page, .. }
            | Self::Store { page }
            | Self::Grant { page, .. }
            | Self::Forget { page }
            | Self::MapPrefetched { page } => page,
        }
    }
}
