//! Parts of a VM on other hosts of its cluster.
//!
//! ```text
//! VM's monitor (home) ─ command of this program ─► cell ─► `part` ─► part's monitor ─ place ─► its cell
//!        │                                                           │      │
//!        ├──── control: orders, reports, heartbeats ─────────────────┘      └── shard, on the cell's CPUs
//!        │                                                                        │
//!        └── connected sockets for the home's shards      links ════════════ one for each pair of shards,
//!                                                         lanes ════════════ two for each lane of a pair
//! ```
//!
//! - [`protocol`]: the messages over these connections; [`connections`]: how they are made and accepted;
//! - [`shared_memory`]: the memory that two hosts share, which lanes use beside their connections;
//! - [`clock`]: rounds that measure the other host's time-stamp counter, and the steps of the guest's;
//! - [`guest_processor`]: the processor that the guest finds on all hosts;
//! - [`part`]: the home's side; [`monitor`]: the part's side, in a separate process, so that a cell's death
//!   ends no VM; `reports`: the shard's reports on their way from there to the home; `host`: actions of
//!   the part's monitor on its host; `host_requests`: the home's requests for these;
//! - [`launch`]: the command that starts a part's monitor.
//!
//! When either monitor dies, falls silent or ends the control connection, the VM ends on both hosts: each
//! side then ends its own shards and gives back its own places, without a request to the other.

pub mod clock;
pub mod connections;
pub mod guest_processor;
mod host;
mod host_requests;
pub mod launch;
pub mod monitor;
pub mod part;
pub mod protocol;
mod reports;
pub mod shared_memory;
