//! One copy in memory of what several VMs read from the same image (SOSP '97, sections 4.2.5 and 4.3.3).
//!
//! The host's page cache is the global buffer cache. A guest page that holds a page of a base image is laid
//! over with a private mapping of the image's file: every VM that does so has the same page of memory, and
//! the first write gives the writer its own copy (the kernel's copy on write). Two ways lead there. *At the
//! read* the guest's buffer is mapped instead of filled. *Deferred*, the buffer is filled as ever and its
//! origin remembered; later, with the VM held still, a page that still equals the image is replaced. Nothing
//! unknown is ever scanned.
//!
//! What holds:
//! * A guest page is either plain (page g of the VM's memory file at offset g) or stands for an image's page;
//!   what it stands for is in [`Extents`], which matches the process's mappings at every moment its lock is
//!   free.
//! * A page of the memory file under a mapping is a hole: nothing is kept twice.
//! * Only files that nobody writes are images. [`diskstore::disk::Store::origin`] says which.
//! * At the limit of mappings, pages are copied, that is counted, and the VM goes on.

mod background;
mod disk;
mod extents;
mod frozen;
mod mapper;
mod mapping;
mod metrics;
mod pagemap;
mod pages;
mod parts;
mod situation;
mod syscalls;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use background::Background;
pub use disk::DiskSharing;
pub use extents::{Extents, ImageId, NOTHING, Run};
pub use frozen::{Frozen, seal, sealable_file};
pub use mapper::Mapper;
pub use metrics::Metrics;
pub use pages::PAGE_BYTES;
pub use shard_api::saved::{FrozenMap, ImageName};
pub use situation::Situations;
pub use syscalls::SYSCALLS;

/// What a VM shares memory by.
#[derive(Clone)]
pub struct Sharing {
    /// Which pages of guest memory stand for images' pages.
    pub mapper: Arc<Mapper>,
    /// What the adaptive rule knows of the images.
    pub situations: Arc<Situations>,
}
