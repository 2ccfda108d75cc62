//! Merged pages: page tables of the guest that all nodes write at once, with the diffs of each node sent to
//! the others.
//!
//! Nested paging treats a page walk as a write to the guest's page table. Under [`crate::Engine`] a table
//! therefore bounces between nodes that only translate. x86 lets a CPU use a stale translation until it
//! invalidates it, so a node's copy of a table may be as old as its TLBs.
//! `docs/design/coherence-tables.md` has the argument, its demands on the guest, and what is not proved.
//!
//! - [`Merger`]: state of one node: the merged pages, the candidates, the diffs, and the pages that join and
//!   leave.
//! - [`AtomicPageWords`]: the guest's memory, accessed in atomic words of 8 bytes.
//!
//! Rules for the driver (the tests break each of them once):
//!
//! 1. Some messages let the receiver's CPUs learn what the sender's CPUs did: a page, its ownership, the
//!    acknowledgement of an invalidation, an interrupt, an access to a device, a migrating vCPU. Before such
//!    a message the driver revokes the right or stops the CPU, then calls [`Merger::collect`]. It sends the
//!    message with [`Merger::stamp`] once [`Merger::may_send`] returns true.
//! 2. The driver handles such a message once [`Merger::is_ready`] returns true.
//! 3. A page joins only through [`Merger::propose`]. This node's CPUs may use it from [`Hooks::open`] to
//!    [`Hooks::close`].
//!
//! [`crate::Engine`] returns a list of effects. A merger calls its driver during an event instead: it reads
//! and writes the guest's tables, and what it reads after [`Hooks::close`] or [`Hooks::store`] depends on
//! them.

mod entry;
mod exchange;
mod memory;
#[cfg(test)]
mod tests;
mod twins;
mod vector_time;
mod wire;

pub use entry::{Entry, Level, root};
pub use exchange::{Hooks, MergeMessage, MergeOp, Merger, Proposal, Ticket};
pub use memory::AtomicPageWords;
pub use twins::{Accessed, Batch, Diff, Merges};
pub use vector_time::{MAX_SHARERS, VectorTime};
pub use wire::{DIFF_BYTES, MERGE_MESSAGE_BYTES};
