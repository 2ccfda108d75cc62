//! Block device (Virtio 1.2, section 5.2).
//!
//! What it promises: a request is answered once, with its status byte, unless the chain has no place for one;
//! data goes straight between guest memory and the disk's files; each queue has a thread of its own and one
//! interrupt for a batch; a completed flush makes every completed write durable, and a driver that does not
//! negotiate flush gets every write made durable; a reset returns when no I/O touches guest memory any more.
//! A write that finds no room on the host fails or, if the disk's policy is to pause, is answered when there
//! is room.
//!
//! A request outside the disk, of unknown type or with addresses outside memory fails alone (IOERR, UNSUPP).
//! A chain that is broken as a chain (a loop, no status byte, readable after writable) stops the device.

mod device;
mod handler;
mod metrics;
mod request;
mod syscalls;
mod waiting;

#[cfg(test)]
mod tests;

pub use device::Block;
#[cfg(fuzzing)]
pub(crate) use device::bare;
pub use metrics::{Metrics, Snapshot};
pub use syscalls::SYSCALLS;
pub use waiting::FullDisks;
