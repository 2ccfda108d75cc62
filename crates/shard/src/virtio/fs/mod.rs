//! The file system device (Virtio 1.2, section 5.11): a shared folder.
//!
//! The device knows no files. It sends each request of the guest as one packet to the folder's process
//! (`folders`), and writes the process's reply into the guest's buffers. The guest and the process may both
//! be hostile: lengths are checked on both sides, each request gets an id of the device's own, and a reply to
//! no request is dropped. When the process ends, every request gets EIO.

mod device;
mod handler;
mod in_flight;
mod metrics;
mod receiver;
mod syscalls;
#[cfg(test)]
mod tests;

pub use device::Fs;
#[cfg(fuzzing)]
pub(crate) use device::bare;
pub use syscalls::SYSCALLS;
