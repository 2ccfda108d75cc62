//! One memory over several nodes, kept coherent page by page: the improved Ivy protocol (Li and Hudak) as vNUMA uses it
//! (Chapman and Heiser, USENIX '09, sections 2.2 and 3.1), as a state machine without I/O, clock, threads or allocation.
//!
//! - [`Engine`]: what one node knows of the pages of one stripe. Faults and messages go in; messages to send and rights
//!   to give and take come out, as calls of [`Effects`] in the order in which they are to be done.
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
//! `docs/coherence.md` draws the states and messages and says why this holds.

mod counters;
mod engine;
#[cfg(test)]
mod every_order;
mod layout;
mod manager;
pub mod merged;
mod message;
mod migratory;
mod node;
mod page;
mod refusal;
mod state;

pub use counters::Counters;
pub use engine::{Discarded, Effects, Engine, Faulted};
pub use layout::{Home, Layout, LayoutError};
pub use message::{Body, Bytes, MESSAGE_BYTES, Malformed, Message};
pub use node::{MAX_NODES, NodeId, Nodes};
pub use page::{Access, Contents, Page, Right, Want};
pub use refusal::Refusal;
