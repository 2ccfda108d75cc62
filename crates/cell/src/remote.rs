//! Parts of a VM on other hosts of its cluster.
//!
//! ```text
//! VM's monitor (home) ── command of this program ──► cell ──► `part` ──► part's monitor ── place ──► its cell
//!        │                                                              │      │
//!        ├──── control: orders, reports, beats ─────────────────────────┘      └── shard, in the cell's CPUs
//!        │                                                                           │
//!        └── connected sockets for the home's shards      links ═══════════════ one for each pair of shards,
//!                                                         lanes ═══════════════ two for each lane of each pair
//! ```
//!
//! - [`talk`]: what is said over these connections; [`connections`]: how they are made and taken;
//! - [`lanes`]: the memory that two hosts share, which lanes use beside their connections;
//! - [`clock`]: rounds that tell what the other host's time-stamp counter reads, and what follows for the
//!   guest's;
//! - [`guest_processor`]: the processor that the guest finds on all of them;
//! - [`part`]: the home's side; [`monitor`]: the part's, a process of its own, so that a cell's death ends no
//!   VM;
//! - [`launch`]: the command by which a part's monitor is started.
//!
//! Whoever of the two monitors dies, falls silent or ends the control connection ends the VM on both hosts:
//! each side then ends its own shards and gives back its own places, and asks nobody.

pub mod clock;
pub mod connections;
pub mod guest_processor;
pub mod lanes;
pub mod launch;
pub mod monitor;
pub mod part;
pub mod talk;
