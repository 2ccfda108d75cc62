//! One memory over several nodes, kept coherent page by page: the improved Ivy protocol (Li and Hudak) as vNUMA uses it
//! (Chapman and Heiser, USENIX '09, sections 2.2 and 3.1), as a state machine without I/O, clock, threads or allocation.
//!
//! - [`Engine`]: what one node knows of the pages of one stripe. Faults and messages go in; a list of
//!   [`Effect`]s comes out: messages to send, and rights to give and take. The driver performs them in the order of the list.
//! - [`Layout`]: which nodes there are, and which of them *manages* which pages.
//! - [`Message`]: what engines say to one another, 16 bytes each, some with the page beside them.
//!
//! What holds at any time, for each page:
//!
//! 1. Processors of one node may write it, or those of any number of nodes may read it.
//! 2. Who may read it reads what was last written.
//! 3. One node owns it, or its ownership is in one message. The owner's *copyset* has every other node with a copy.
//! 4. Every fault is answered, if links deliver and processors use what they are granted.
//!
//! `docs/design/coherence.md` draws the states and messages and says why this holds.

mod counters;
mod engine;
#[cfg(test)]
mod every_order;
mod kinds;
mod layout;
mod manager;
pub mod merged;
mod message;
mod migratory;
mod node;
mod page;
mod protocol_error;
mod state;

pub use counters::Counters;
pub use engine::{DiscardOutcome, EFFECTS_MAX, Effect, Engine, FaultOutcome};
pub use layout::{ManagedRange, Layout, LayoutError};
pub use message::{Body, KIND_AT, Kind, MESSAGE_BYTES, Malformed, Message, Payload};
pub use node::{MAX_NODES, NodeId, Nodes};
pub use page::{Access, Data, Page, Right, Want};
pub use protocol_error::ProtocolError;
