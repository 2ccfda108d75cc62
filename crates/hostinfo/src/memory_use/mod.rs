//! Host memory of running VMs, by the kernel's own accounting alone.
//!
//! [`smaps`] parses a process's mappings, and [`classify`] sorts them by kind. [`process`], [`page_cache`]
//! and [`host`] read the kernel's figures, and [`account`] adds them up. [`read()`] does all of it for VMs of
//! the registry ([`registry::vms`]). Each page is counted once: a page that several processes map is divided
//! among them (the kernel's *proportional set size*). `mirrorball mem`, `mirrorball run` and the API's
//! metrics call it.

pub mod account;
pub mod classify;
pub mod host;
pub mod numa_maps;
pub mod page_cache;
pub mod process;
mod read;
pub mod smaps;
#[cfg(test)]
mod tests;

pub use account::{GatewayMemory, MemoryUse, VmMemory};
pub(crate) use classify::GUEST_MEMORY;
pub use process::own_memory;
pub use read::{read, read_one};
