//! Origins of pages that a disk fills from images.
//!
//! A disk announces a read, and reports its end. Whole pages of memory that it has filled from whole pages of
//! an image get that place as their origin. An origin is a hint: the page is compared with the image before
//! it leaves memory in its favour.

use std::ops::Range;
use std::sync::Arc;

use diskstore::disk::{Origin, Segments, Store};

use super::{Paging, State};
use crate::sharing::{ImageId, ReadPart, Run, Source, cut};

/// Greatest number of parts of a read whose origins are kept. A guest makes as many as it likes.
const PARTS_MAX: usize = 256;
/// Pages whose origins are recorded under one hold of the lock: 1 MiB.
const RECORD_PAGES: u64 = 256;

/// Origins of one queue's reads.
pub struct PageOrigins {
    paging: Arc<Paging>,
    /// The image of each of the disk's files, if it has no writer and may be shared.
    images: Vec<Option<ImageId>>,
    /// Parts of reads in flight, by the token of the request: the first page of each, and its origin.
    reads: Vec<Vec<(u64, Run)>>,
}

impl Clone for PageOrigins {
    /// Returns the origins of another queue of the same disk, without reads.
    fn clone(&self) -> Self {
        Self {
            paging: self.paging.clone(),
            images: self.images.clone(),
            reads: Vec::new(),
        }
    }
}

impl PageOrigins {
    /// Returns the origins of a disk; none if it has no images that may be shared.
    pub fn new(paging: &Arc<Paging>, store: &dyn Store) -> Option<Self> {
        let (files, bases) = (store.files(), store.bases());
        let image = |index: usize| {
            let file = files.get(index).filter(|_| bases.contains(&index))?;
            ImageId::try_from(paging.store.images().find(file)?).ok()
        };
        let images: Vec<_> = (0..files.len()).map(image).collect();
        images.iter().any(Option::is_some).then(|| Self {
            paging: paging.clone(),
            images,
            reads: Vec::new(),
        })
    }

    /// Keeps the origins of a read that begins.
    pub fn begin(&mut self, token: usize, store: &dyn Store, offset: u64, into: &Segments) {
        if self.reads.len() <= token {
            self.reads.resize_with(token + 1, Vec::new);
        }
        let pieces = into
            .iovecs()
            .iter()
            .map(|piece| (piece.iov_base as u64, piece.iov_len as u64));
        let source = |at, bytes| match store.origin(at, bytes) {
            Origin::Base { file, offset, bytes } => match self.images.get(file).copied().flatten() {
                Some(image) => Source::Image { image, offset, bytes },
                None => Source::Other { bytes },
            },
            Origin::Other { bytes } => Source::Other { bytes },
        };
        let parts = cut(pieces, offset, source, |host| self.paging.memory.pages_from(host));
        let shared = parts.into_iter().filter_map(|part| match part {
            ReadPart::Share { page, run, .. } => Some((page, run)),
            ReadPart::Copy { .. } => None,
        });
        self.reads[token] = shared.take(PARTS_MAX).collect();
    }

    /// Records the origins of a read that has ended, if it has filled its memory.
    pub fn end(&mut self, token: usize, is_filled: bool) {
        let parts = self.reads.get_mut(token).map(std::mem::take).unwrap_or_default();
        for (page, run) in parts.into_iter().filter(|_| is_filled) {
            self.paging.set_origins(page, run);
        }
    }

    /// Forgets the reads in flight.
    pub fn clear(&mut self) {
        self.reads.clear();
    }
}

impl Paging {
    /// Records the origin of the pages from `page` on.
    fn set_origins(&self, page: u64, run: Run) {
        for hold in holds(run.pages) {
            let State { set, slots, .. } = &mut *self.state();
            for index in hold {
                let slot = slots.images().slot(run.image.into(), run.first + index);
                let (Some(slot), Ok(page)) = (slot, u32::try_from(page + index)) else {
                    continue;
                };
                if let Some(former) = set.set_origin(page, slot) {
                    slots.release(former);
                }
            }
        }
    }
}

/// Divides the pages of a run into those that are recorded under one hold of the lock.
pub(super) fn holds(pages: u64) -> impl Iterator<Item = Range<u64>> {
    let starts = (0..pages).step_by(RECORD_PAGES as usize);
    starts.map(move |start| start..pages.min(start + RECORD_PAGES))
}
