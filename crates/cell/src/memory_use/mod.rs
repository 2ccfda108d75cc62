//! What running VMs take of the host's memory, from the kernel's own accounting and nothing else.
//!
//! [`smaps`] parses what the kernel says of a mapping and [`classify`] tells what the mapping is; [`process`],
//! [`page_cache`] and [`host`] read; [`account`] adds up. [`read`] does all of it for VMs of the registry. Every page is
//! counted once: one that several processes map is divided among them (the kernel's *proportional set size*).

pub mod account;
pub mod classify;
pub mod host;
pub mod page_cache;
pub mod process;
mod read;
pub mod smaps;
#[cfg(test)]
mod tests;

pub use account::{MemoryUse, VmMemory};
pub use read::{read, read_one};
