//! The monitor of one cell: starts shards, keeps the registry of VMs, serves their consoles and controls.
//!
//! [`monitor`] is the process: it holds the command's [`lease`] and a thread for each VM. [`open`] opens a VM's files,
//! [`vm`] runs its shard ([`spawn`], [`link`]), or its shards ([`spanning`]), through every reboot, [`handle`] is what others have of it, [`frozen`] is one that others go on from, [`snapshot`] such a one in a directory, [`registry`] says which VMs run, [`console`] and
//! [`control`] are what other commands reach of one. [`memory_use`] says what they take of the host's memory, [`topology`]
//! what the host is made of, [`measure`] what messages cost on it; [`known`] is all of that. [`cluster`] is several cells under one name space, [`remote`] what of a VM is on other hosts.

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
pub mod known;
pub mod lease;
pub mod link;
mod mapped_files;
pub mod measure;
pub mod memory_use;
pub mod monitor;
pub mod nodes;
pub mod open;
mod parts;
mod reboot;
pub mod registry;
pub mod remote;
pub mod runtime;
mod shard_limits;
mod shard_log;
mod shard_process;
pub mod share_group;
pub mod snapshot;
pub mod spanning;
pub mod spawn;
mod text;
pub mod topology;
pub mod vm;
