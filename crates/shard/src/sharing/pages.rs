//! What the pages of a VM's memory are, beside plain: the record, of which [`super::Mapper`] makes mappings.

use std::fs::File;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use super::extents::{Extents, Run};

pub use shard_api::saved::PAGE_BYTES;

/// A region of RAM.
pub(super) struct Part {
    /// Address in this process.
    pub host: u64,
    /// Number of its first guest page; its page in the memory file has the same number.
    pub first: u64,
    pub pages: u64,
    pub file: RawFd,
}

impl Part {
    /// Its guest pages.
    pub fn range(&self) -> Range<u64> {
        self.first..self.first + self.pages
    }
}

/// What guest pages stand for.
#[derive(Default)]
pub(super) struct Pages {
    /// Pages that are mappings now.
    pub mapped: Extents,
    /// Copies made since the background last took stock.
    pub fresh: Extents,
    /// Older copies, which the background works through.
    pub copies: Extents,
    /// Copies that were found unchanged and are to be replaced next.
    pub chosen: Extents,
    /// Copies in runs that are too short to be worth it while there is plenty of memory.
    pub short: Extents,
    /// The memory's file is frozen ([`super::Frozen`]): it and what is below are mapped privately, and never
    /// changed.
    pub frozen: bool,
    /// What was written between two freezings, oldest first. Their numbers in `mapped` follow those of the
    /// images.
    pub layers: Vec<Arc<File>>,
}

impl Pages {
    /// These pages are no copies any more.
    pub fn forget(&mut self, range: Range<u64>) {
        for copies in [
            &mut self.fresh,
            &mut self.copies,
            &mut self.chosen,
            &mut self.short,
        ] {
            copies.remove(range.clone());
        }
    }

    /// These pages are copies of `run` now.
    pub fn remember(&mut self, at: u64, run: Run) {
        self.forget(at..at + run.pages);
        self.fresh.insert(at, run);
    }

    /// All copies that are remembered.
    pub fn candidates(&self) -> u64 {
        self.fresh.pages() + self.copies.pages() + self.chosen.pages() + self.short.pages()
    }
}
