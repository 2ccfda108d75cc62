//! A client's view of the cells on its host: files, connections and messages.
//!
//! - [`files`]: the directory of each cell, its lock, its plan and its incarnation number;
//! - [`interface`]: requests to a cell, and its responses;
//! - [`cpus`]: CPUs that cells lend, their loads and run queues;
//! - [`windows`]: times in which VMs that span cells run in all of them;
//! - [`client`]: a connection to a cell;
//! - [`guard`]: a request to a cell's guard, and its response;
//! - [`admission`]: requests for places by users who do not own the cluster;
//! - [`user_vms`]: root's records of those users' VMs.
//!
//! `cell::cluster` is the server.

pub mod admission;
pub mod client;
pub mod cpus;
pub mod files;
pub mod guard;
pub mod interface;
pub mod regions;
pub mod user_vms;
pub mod windows;
