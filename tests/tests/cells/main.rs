//! Risk: a cell's process, a keeper or a shard that dies, hangs or lies takes more with it than the design
//! says, or a resource of a cell is lost or used twice.
//!
//! The guests are a few instructions, which any KVM runs, and most halt at once. Cells, keepers and shards
//! are real, but for shards that lie (`lies`). Each test has a runtime directory of its own.

mod clones;
mod cpu_moves;
mod gangs;
mod lent_cpus;
mod lies;
mod pages;
mod promises;
mod regions;
mod reservations;
mod scan;
mod spanning_gangs;
mod stops;
mod top;
mod two_cells;

use two_cells::{BY_COMMAND, Cells, END_LIMIT, NAME, SMALL, SOON, as_pid};
