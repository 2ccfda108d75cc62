//! Sharing for a disk's queues: maps the parts of a read that can be shared, and leaves the rest to the
//! queue.

use std::io;
use std::sync::Arc;

use diskstore::disk::{Origin, Segments, Store};
use policy::sharing::SharingMode;

use super::extents::ImageId;
use super::fates::Fate;
use super::mapper::{MapTime, Mapped, Mapper};
use super::pages::PAGE_BYTES;
use super::pressure_monitor::PressureMonitor;
use super::read_parts::{ReadPart, Source, cut};
use crate::launch::Share;

/// Sharing of one disk. Cloned for each queue.
#[derive(Clone)]
pub struct DiskSharing {
    /// Map of the VM's pages.
    pub mapper: Arc<Mapper>,
    /// Inputs of the adaptive rule.
    pub pressure: Arc<PressureMonitor>,
    /// Sharing mode of the VM file.
    pub share: Share,
    /// The image of each of the disk's files that has no writer.
    pub images: Vec<Option<ImageId>>,
}

impl DiskSharing {
    /// Serves a read by mappings if that is the mode now; `None` leaves the read to the caller, which copies.
    pub fn read(&self, store: &dyn Store, offset: u64, into: &Segments) -> Option<io::Result<()>> {
        let SharingMode::AtRead { run_pages_min } = self.mode() else {
            return None;
        };
        let parts = self.cut(store, offset, into);
        let worth =
            |part: &ReadPart| matches!(part, ReadPart::Share { run, .. } if run.pages >= run_pages_min);
        if !parts.iter().any(worth) {
            return None;
        }
        for part in &parts {
            let served = match part {
                part if worth(part) => self.map(store, offset, into, part),
                part => self.copy(store, offset, into, part),
            };
            if served.is_err() {
                return Some(served);
            }
        }
        Some(Ok(()))
    }

    /// Prepares for a read that is about to be copied, and records the origin of its bytes.
    ///
    /// # Errors
    /// Fails if the host has no memory for it.
    pub fn before_copy(&self, store: &dyn Store, offset: u64, into: &Segments) -> io::Result<()> {
        if self.share == Share::Never {
            return Ok(());
        }
        let parts = self.cut(store, offset, into);
        self.mapper.before_copy(&parts)?;
        self.note_unaligned(into, &parts);
        Ok(())
    }

    /// Records the guest pages of those bytes of an image that are no whole pages of it.
    fn note_unaligned(&self, into: &Segments, parts: &[ReadPart]) {
        let unaligned = parts.iter().filter_map(|part| match *part {
            ReadPart::Copy {
                start,
                bytes,
                of_image: true,
            } => Some(into.part(start, bytes)),
            _ => None,
        });
        for piece in unaligned.flat_map(|part| part.iovecs().to_vec()) {
            let (start, bytes) = (piece.iov_base as u64, piece.iov_len as u64);
            let Some((first, in_ram)) = self.mapper.page_at(start).filter(|_| bytes > 0) else {
                continue;
            };
            let count = (start % PAGE_BYTES + bytes).div_ceil(PAGE_BYTES).min(in_ram);
            let mut pages = self.mapper.pages();
            for page in first..first + count {
                pages.fates.set(page, Fate::Unaligned);
            }
        }
    }

    fn mode(&self) -> SharingMode {
        // A disk has one base in nearly every case; of several, the first decides.
        let first = self.images.iter().flatten().next();
        first.map_or(SharingMode::Remember, |image| {
            self.pressure.mode(self.share, *image)
        })
    }

    fn cut(&self, store: &dyn Store, offset: u64, into: &Segments) -> Vec<ReadPart> {
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
        cut(pieces, offset, source, |host| self.mapper.page_at(host))
    }

    fn map(&self, store: &dyn Store, offset: u64, into: &Segments, part: &ReadPart) -> io::Result<()> {
        let ReadPart::Share { page, run, .. } = *part else {
            return Ok(());
        };
        let counter = &self.mapper.metrics.mapped_at_read;
        let mapped = self
            .mapper
            .map(&mut self.mapper.pages(), page, run, MapTime::AtRead, counter)?;
        match mapped {
            Mapped::Yes => Ok(()),
            Mapped::AtLimit => self.copy(store, offset, into, part),
        }
    }

    fn copy(&self, store: &dyn Store, offset: u64, into: &Segments, part: &ReadPart) -> io::Result<()> {
        let (start, bytes) = match *part {
            ReadPart::Copy { start, bytes, .. } => (start, bytes),
            ReadPart::Share { start, run, .. } => (start, run.pages * PAGE_BYTES),
        };
        store.read(&into.part(start, bytes), offset + start)?;
        let mapper = &self.mapper;
        mapper.remember(&mut mapper.pages(), std::slice::from_ref(part));
        self.note_unaligned(into, std::slice::from_ref(part));
        Ok(())
    }
}
