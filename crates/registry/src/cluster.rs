//! How a client finds a cell of its host and asks it.
//!
//! - [`files`]: the directory of each cell, its lock, its plan and its count of lives;
//! - [`interface`]: requests to a cell, and its answers;
//! - [`client`]: a connection to a cell;
//! - [`guard`]: a request to a cell's guard, and its answer.
//!
//! `cell::cluster` is the server.

pub mod client;
pub mod files;
pub mod guard;
pub mod interface;
