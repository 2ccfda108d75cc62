//! Record of a VM's pages that are not plain memory. [`super::Mapper`] turns it into mappings.

use std::fs::File;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use super::extents::{Extents, Run};
use super::fates::{Fate, Fates};

pub use page::PAGE_BYTES;

/// Continuous range of guest memory, in this process and in the memory file.
pub(super) struct RamRegion {
    /// Address in this process.
    pub host: u64,
    /// Number of its first guest page; its page in the memory file has the same number.
    pub first: u64,
    pub pages: u64,
    pub file: RawFd,
}

impl RamRegion {
    /// Returns its guest pages.
    pub fn range(&self) -> Range<u64> {
        self.first..self.first + self.pages
    }
}

/// Record of the images' pages that guest pages map or copy.
#[derive(Default)]
pub(super) struct Pages {
    /// Pages that are mappings now.
    pub mapped: Extents,
    /// Copies made since the last round of the background thread.
    pub fresh: Extents,
    /// Older copies, which the background thread processes.
    pub copies: Extents,
    /// Copies that were found unchanged and are replaced next.
    pub chosen: Extents,
    /// Copies in runs that are too short to be replaced while there is plenty of memory.
    pub short: Extents,
    /// Pages into which the kernel and the initramfs were loaded. They may have been overwritten.
    pub loaded: Extents,
    /// Outcome of the last read of a page that is no copy any more.
    pub fates: Fates,
    /// Whether the memory's file is frozen ([`super::Frozen`]), or empty, as the memory is in no file
    /// ([`super::Mapper::begin_scan`]). It and the layers are then mapped privately, and never changed.
    pub frozen: bool,
    /// Files of the writes between two freezes, oldest first. Their numbers in `mapped` follow those of the
    /// images.
    pub layers: Vec<Arc<File>>,
}

impl Pages {
    /// Records that these pages are no copies.
    pub fn forget(&mut self, range: Range<u64>) {
        for copies in [
            &mut self.fresh,
            &mut self.copies,
            &mut self.chosen,
            &mut self.short,
        ] {
            copies.remove(range.clone());
        }
        self.fates.clear(range);
    }

    /// Records that a page is no unchanged copy.
    pub fn resolve(&mut self, page: u64, fate: Fate) {
        self.forget(page..page + 1);
        self.fates.set(page, fate);
    }

    /// Records that these pages are copies of `run`.
    pub fn remember(&mut self, at: u64, run: Run) {
        self.forget(at..at + run.pages);
        self.fresh.insert(at, run);
    }

    /// Returns the number of all recorded copies.
    pub fn candidates(&self) -> u64 {
        self.fresh.pages() + self.copies.pages() + self.chosen.pages() + self.short.pages()
    }
}
