//! Block device (Virtio 1.2, section 5.2).
//!
//! Guarantees:
//! * A request is completed once, with its status byte, unless the chain has no place for one.
//! * Data move directly between guest memory and the disk's files.
//! * Each queue has a thread and one interrupt for a batch.
//! * A completed flush makes every completed write durable. Every write of a driver that does not negotiate
//!   flush is made durable.
//! * A reset returns once no I/O accesses guest memory.
//! * A write that finds no room on the host fails or, if the disk's policy is to pause, is completed once
//!   there is room.
//! * A driver that resumes on a disk of another size than it has read gets a configuration interrupt.
//! * A disk serves at most the requests and bytes per second of its limits, in the long run.
//!
//! A virtual paging disk ([`Block::paging`]) has a handler of its own: its data are references to slots of
//! the VM's paging file, and no file is written for a page that is there already.
//!
//! A request outside the disk, of unknown type or with addresses outside memory fails alone (IOERR, UNSUPP).
//! A chain that is broken as a chain (a loop, no status byte, readable after writable) stops the device.

mod device;
mod handler;
mod limiter;
mod metrics;
mod paging_disk;
mod request;
mod syscalls;
mod waiting;

#[cfg(test)]
mod tests;

pub use device::Block;
#[cfg(fuzzing)]
pub(crate) use device::bare;
pub use handler::ReadOrigins;
pub use limiter::{DiskLimiter, DiskLimiters};
pub use metrics::{Metrics, Snapshot};
pub use syscalls::SYSCALLS;
pub use waiting::FullDisks;
