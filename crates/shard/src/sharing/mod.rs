//! One copy in memory of pages that several VMs read from the same image (Disco, SOSP '97, sections 4.2.5 and
//! 4.3.3).
//!
//! The host's page cache is the global buffer cache. A guest page that holds a page of a base image is
//! replaced by a private mapping of the image's file. All VMs that do so have the same page of memory, and
//! the first write gives the writer its own copy (the kernel's copy on write). There are two modes. *At the
//! read*, the guest's buffer is mapped instead of filled. *Deferred*, the buffer is filled and its origin
//! recorded; later, while the VM is paused, a page that still equals the image is replaced. Pages of unknown
//! origin are never scanned, unless the VM asks that the host's kernel do it ([`Mapper::begin_scan`]).
//!
//! Invariants:
//! * A guest page is either plain (page g of the VM's memory file at offset g) or maps an image's page.
//!   [`Extents`] records the mapped pages, and matches the process's mappings whenever its lock is free.
//! * A page of the memory file under a mapping is a hole: no content is stored twice.
//! * Only files without a writer are images, as [`diskstore::disk::Store::origin`] reports. Files of shared
//!   folders have none while they are leased (`leases`), and their pages become plain memory again before a
//!   lease ends.
//! * At the limit of mappings, pages are copied and counted, and the VM continues.

mod background;
mod disk;
mod extents;
mod fates;
mod folder;
mod frozen;
mod lease_watch;
mod leases;
mod mapper;
mod mapping;
mod metrics;
mod page_cache;
mod page_map;
mod pagemap;
mod pages;
mod pressure_monitor;
mod read_parts;
mod syscalls;
#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

pub use background::Background;
pub use disk::DiskSharing;
pub use extents::{Extents, ImageId, NOTHING, Run};
pub use folder::FolderSharing;
pub use frozen::{Frozen, seal, sealable_file};
pub use mapper::Mapper;
pub use mapping::Advice;
pub use metrics::Metrics;
pub use pages::PAGE_BYTES;
pub use pressure_monitor::PressureMonitor;
pub(crate) use read_parts::{ReadPart, Source, cut};
pub use shard_api::saved::{FrozenMap, ImageName};
pub use syscalls::{LEASE_COMMANDS, SYSCALLS};

/// Page sharing of a VM.
#[derive(Clone)]
pub struct Sharing {
    /// The mapping of guest pages to images' pages.
    pub mapper: Arc<Mapper>,
    /// Inputs of the adaptive rule for the images.
    pub pressure: Arc<PressureMonitor>,
}
