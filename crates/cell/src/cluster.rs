//! Several cells that run VMs under one name space: a process for each, nothing but messages between them.
//!
//! - [`interface`]: what a cell can be asked;
//! - [`files`]: where a cluster is found, and who is who in it;
//! - [`state`]: what a cell decides and answers, without I/O;
//! - [`addresses`]: which addresses the cluster's file names;
//! - [`routes`]: by which cells a message to all goes;
//! - [`limits`]: how long they wait for one another;
//! - [`contacts`]: what a cell makes of one that is silent or gone;
//! - [`link`]: channels between two cells; [`hosts`]: connections to other hosts; [`callers`]: bounds on callers;
//! - [`membership`]: which cells of several hosts live, agreed on by an etcd;
//! - [`serve`]: the process of one cell; [`guard`] starts it again when it dies;
//! - [`client`]: asking a cell;
//! - [`tenure`]: a VM's place in a cell, held by its monitor, which outlives the cell's process.

pub mod addresses;
pub mod callers;
pub mod client;
pub mod contacts;
pub mod files;
pub mod guard;
pub mod hosts;
pub mod interface;
pub mod limits;
pub mod link;
pub mod membership;
pub mod routes;
pub mod serve;
pub mod state;
pub mod tenure;
