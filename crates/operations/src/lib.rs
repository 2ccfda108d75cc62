//! Operations on running VMs and on cells, shared by the command and the API.
//!
//! [`guest`] connects to the agent of a VM, [`placement`] orders moves and limits of its vCPUs, [`cells`]
//! acts on the cells of this host, [`networks`] lists the networks of a user's VMs, [`memory`] measures VMs'
//! use of the host's memory, [`page_use`] one VM's by page, and [`usage`] what cells, VMs and vCPUs make of
//! its CPUs and memory over time. A [`Failure`] has a cause and a help; the command prints it, and the API
//! returns it as a problem document.

pub mod cells;
mod failure;
pub mod guest;
pub mod memory;
pub mod networks;
pub mod page_use;
pub mod placement;
pub mod regions;
pub mod usage;

pub use failure::{Failure, Kind};
