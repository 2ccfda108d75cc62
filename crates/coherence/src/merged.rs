//! Page tables of the guest as *merged* pages: writable on all nodes at once, with the changes of each sent to the others.
//!
//! Nested paging takes the walk of a guest's page table for a write to it, so under [`crate::Engine`] tables bounce between nodes
//! that only translate. x86 lets a CPU use a stale translation until it is told to invalidate it, so a node's copy of a table may
//! be as old as its TLBs. `docs/design/coherence-tables.md` has the argument, what it asks of the guest, and what is not proved.
//!
//! - [`Merger`]: one node's part: which pages are merged, which could be, what changed in them, who has heard of it, how pages join and leave.
//! - [`AtomicPageWords`]: the guest's memory as the driver lends it, in atomic words of 8 bytes.
//!
//! The rules that the driver keeps (each broken once by the tests):
//!
//! 1. Before a message by which one node's CPUs may learn what another's did (a page or its ownership, the acknowledgement of an
//!    invalidation, an interrupt, an access to a device, a vCPU that moves): take the right away or stop the CPU, then
//!    [`Merger::collect`], then send once [`Merger::may_send`] says so, with [`Merger::stamp`].
//! 2. Such a message is acted on when [`Merger::is_ready`] says so.
//! 3. A page joins only through [`Merger::propose`]; it is open to this node's CPUs from [`Hooks::open`] to [`Hooks::close`].
//!
//! Unlike [`crate::Engine`], which returns a list of effects, a merger calls its driver during an event: it reads and writes the
//! guest's tables, and what it reads after [`Hooks::close`] or [`Hooks::store`] depends on these having been done.

mod entry;
mod exchange;
mod memory;
mod vector_time;
#[cfg(test)]
mod tests;
mod twins;
mod wire;

pub use entry::{Entry, Level, root};
pub use exchange::{Hooks, MergeMessage, MergeOp, Merger, Proposal, Ticket};
pub use memory::AtomicPageWords;
pub use vector_time::{MAX_SHARERS, VectorTime};
pub use twins::{Accessed, Batch, Diff, Merges};
pub use wire::{DIFF_BYTES, MERGE_MESSAGE_BYTES};
