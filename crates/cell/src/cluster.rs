//! Several cells that run VMs under one name space: a process for each, nothing but messages between them.
//!
//! - [`state`]: the decisions and replies of a cell, without I/O;
//! - [`admission`]: places for other users of the host;
//! - [`addresses`]: the addresses that the cluster's file names;
//! - [`routes`]: multicast trees between cells;
//! - [`limits`]: time limits of cells and monitors;
//! - [`peer_table`]: peer table and local failure detection;
//! - [`link`]: channels between two cells; [`hosts`]: connections to other hosts; [`callers`]: bounds on
//!   callers;
//! - [`membership`]: agreement by an etcd on the live cells of several hosts;
//! - [`invitation`]: the join of a further host;
//! - [`lost`]: the end of VMs whose host has lost its membership;
//! - [`serve`]: the process of one cell;
//! - [`adoption_table`]: the decisions of that process about the VMs that it adopts;
//! - [`guard`] starts it again when it dies, as [`guard::lives`] and [`guard::trials`] decide;
//! - [`reservation`]: a VM's place in a cell, held by its monitor, which outlives the cell's process.
//!
//! [`registry::cluster`] has the cells' files, the requests to a cell, and the client.

pub mod addresses;
pub mod admission;
pub mod adoption_table;
pub mod callers;
pub mod commands;
pub mod guard;
pub mod hosts;
pub mod invitation;
pub mod limits;
pub mod link;
pub mod lost;
pub mod membership;
pub mod peer_table;
pub mod protocols;
pub mod reservation;
pub mod routes;
pub mod serve;
pub mod state;
