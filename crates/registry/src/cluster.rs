//! How a client finds a cell of its host and asks it.
//!
//! - [`files`]: the directory of each cell, its lock, its plan and its count of lives;
//! - [`interface`]: requests to a cell, and its answers;
//! - [`client`]: a connection to a cell;
//! - [`guard`]: a request to a cell's guard, and its answer;
//! - [`admission`]: how users whose cluster it is not ask it for places;
//! - [`user_vms`]: what root keeps of their VMs.
//!
//! `cell::cluster` is the server.

pub mod admission;
pub mod client;
pub mod files;
pub mod guard;
pub mod interface;
pub mod user_vms;
