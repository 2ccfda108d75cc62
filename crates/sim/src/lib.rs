//! A cluster in virtual time. The cells are the real ones ([`cell::cluster::state`], [`protocol::agreement`],
//! `policy::placement`); the links, the processes' lives and the VMs' monitors around them are simulated,
//! single-threaded, from a seed, so that a run that fails can be run again.
//!
//! - [`machine`]: the cells of a machine and the costs of messages between them;
//! - [`queue`]: events in the order of their times;
//! - [`world`]: cells, links, monitors; their events, and the rules that hold;
//! - [`story`]: random faults and requests;
//! - [`adoption`]: the VMs of one cell: keepers, the cell's processes, its guard;
//! - [`scheduling`]: CPUs, run queues and vCPUs, under the drivers of `policy::cpu`;
//! - [`trace`]: the steps before an error.

pub mod adoption;
pub mod chance;
pub mod etcd;
pub mod machine;
pub mod queue;
pub mod scheduling;
pub mod story;
pub mod trace;
pub mod world;

/// Virtual time, nanoseconds.
pub type Time = u64;
/// One second of virtual time.
pub const SECOND: Time = 1_000_000_000;
/// One millisecond of virtual time.
pub const MILLISECOND: Time = 1_000_000;

/// A duration of the product in virtual time.
pub const fn nanos(time: std::time::Duration) -> Time {
    time.as_nanos() as Time
}
