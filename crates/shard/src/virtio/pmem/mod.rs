//! Persistent memory (Virtio 1.2, section 5.19): a file mapped into the guest, above its RAM.
//!
//! A file that keeps the guest's writes is mapped shared and synced when the driver flushes; another is
//! mapped privately: every VM shares the host's page cache until it writes, and its writes are gone when it
//! ends. A read-only one's memory slot refuses them: virtio has no way to tell the driver, so a guest that
//! writes all the same finds nothing changed. The machine gives KVM the region [`Pmem::region`] in a slot of
//! its own.

mod device;
mod handler;
mod mapping;
mod metrics;
mod syscalls;
#[cfg(test)]
mod tests;

pub use device::Pmem;
#[cfg(fuzzing)]
pub(crate) use device::bare;
pub use mapping::{PmemRegion, Writes, region_bytes};
pub use syscalls::SYSCALLS;
