//! Persistent memory (Virtio 1.2, section 5.19): a file mapped into the guest, above its RAM.
//!
//! A file that keeps the guest's writes is mapped shared and synced when the driver flushes. Another file is
//! mapped privately: every VM shares the host's page cache until it writes, and its writes are lost when it
//! ends. A read-only region's memory slot refuses writes. Virtio can't report this to the driver, so that a
//! guest that writes finds nothing changed. A shared region that a VM only reads is mapped shared and
//! read-only ([`Writes::ReadOnly`]). The machine passes the region ([`Pmem::region`]) to KVM in a slot of its
//! own.

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
