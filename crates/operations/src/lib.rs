//! Operations on running VMs and on cells, which the command and the API offer alike.
//!
//! [`guest`] reaches the agent of a VM, [`cells`] acts on the cells of this host, [`memory`] measures what VMs take of it. A
//! [`Failure`] says what failed and what helps; the command prints it, and the API makes a problem document of it.

pub mod cells;
mod failure;
pub mod guest;
pub mod memory;

pub use failure::{Failure, Kind};
