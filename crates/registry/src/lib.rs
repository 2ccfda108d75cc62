//! Registry of a user's running VMs and cells, and the protocols by which clients reach them.
//!
//! | module | holds |
//! | --- | --- |
//! | [`runtime`] | the directory that contains all files of running VMs and cells |
//! | [`vms`] | the entries of VMs: a locked directory and a record for each |
//! | [`share_group`] | the names of share groups, which records and clones carry |
//! | [`monitor`], [`lease`] | the messages on the lease, and the client's end of it |
//! | [`console`] | the first byte on a VM's console socket |
//! | [`control`] | requests to a running VM, and their answers |
//! | [`kill`] | the end of a VM whose process may not answer |
//! | [`json_line`] | a message as a line of JSON, with the versions that its sender speaks |
//! | [`subnet`] | requests to the gateway of a user's subnet, and its responses |
//! | [`idempotency`] | results of requests with an id, for clients that repeat one |
//! | [`update`] | changes to the host resources of a running VM |
//! | [`cluster`] | the directories of cells, requests to a cell, and its responses |
//!
//! Clients are the command, `mirrorball-api`, and the monitors of other VMs. Servers are in `crates/cell`,
//! which depends on this crate; this crate depends on no server. It never opens a VM's files, starts no
//! shard, and links neither KVM nor guest memory.
//!
//! Liveness is always a lock in the file system. A crashed process releases its locks, so every entry with a
//! free lock is stale. All files are private to their user.

pub mod cluster;
pub mod console;
pub mod control;
pub mod idempotency;
pub mod journal;
pub mod json_line;
pub mod kill;
pub mod lease;
pub mod monitor;
pub mod peer;
pub mod runtime;
pub mod share_group;
pub mod subnet;
pub mod update;
pub mod vms;
