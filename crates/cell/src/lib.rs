//! The monitor of VMs and the process of a cell: starts shards, and serves their consoles, controls and
//! places.
//!
//! [`monitor`] is the monitor's process: it holds the client's lease ([`registry::lease`]) and a thread for
//! each VM, and enters each VM in the [`registry`]. [`open`] opens a VM's files, by
//! [`opener`] where they are another user's. [`vm`] runs its shard
//! ([`programs`], [`link`]), or its shards ([`spanning`]), through every reboot. Other threads reach a VM by
//! its [`handle`], and clients by [`console`] and [`control`]. [`frozen`] is a VM from which others resume,
//! [`snapshot`] such a VM in a directory, and [`template`] one from which VMs start warm. [`cluster`] has the
//! cells under one name space, and [`remote`] the parts of a VM on other hosts.

mod adoption;
mod affinity;
pub mod cluster;
mod cmdline;
mod coherence;
pub mod console;
pub mod control;
pub mod control_group;
mod core_scheduling;
pub mod ending;
pub mod frozen;
pub mod handle;
mod identity;
mod left;
pub mod link;
mod mapped_files;
mod memory_nodes;
mod memory_watch;
pub mod monitor;
mod oom;
pub mod open;
pub mod opener;
mod pidfd;
mod process_title;
pub mod programs;
pub mod reboot;
mod recorder;
pub mod remote;
mod scan;
mod scheduler;
mod secondary_shards;
mod shard_log;
mod shard_process;
pub mod share_group;
pub mod snapshot;
mod socket;
pub mod spanning;
pub mod subnet_card;
pub mod template;
mod text;
mod vcpu_statistics;
pub mod vm;
