//! Page-based distributed shared memory: Ivy's improved protocol (Li and Hudak) as vNUMA uses it (Chapman and
//! Heiser, USENIX '09, sections 2.2 and 3.1).
//!
//! The protocol is a state machine without I/O, clock, threads or allocation.
//!
//! - [`Engine`]: state of one node for one stripe of pages. It takes faults and messages, and returns a list
//!   of [`Effect`]s: messages to send, and rights to grant and revoke. The driver performs them in order.
//! - [`Layout`]: the nodes, and the manager of each page.
//! - [`Message`]: a message between engines, 16 bytes, with or without the page's bytes.
//!
//! Invariants of each page:
//!
//! 1. Processors of one node may write the page, or those of any number of nodes may read it.
//! 2. A read returns the last write.
//! 3. One node owns the page, or one message carries its ownership. The owner's *copyset* names every other
//!    node with a copy.
//! 4. Every fault is answered, if links deliver and processors use the pages that they are granted.
//!
//! `docs/design/coherence.md` draws the states and messages and proves the invariants.

mod counters;
mod engine;
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
pub use layout::{Layout, LayoutError, ManagedRange};
pub use message::{Body, KIND_AT, Kind, MESSAGE_BYTES, Malformed, Message, Payload};
pub use node::{MAX_NODES, NodeId, Nodes};
pub use page::{Access, Data, Page, Right, Want};
pub use protocol_error::ProtocolError;
