//! Images whose pages stand for pages of a VM that have left its memory.
//!
//! They are read by the host's page cache, which all VMs share: one copy in memory serves all, and one read
//! brings it back.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use nix::sys::stat::fstat;
use nix::unistd::{Whence, lseek};
use page::PAGE_BYTES;
use policy::memory::image_slots::ImageSlots;

/// An image without a writer: a base file of a disk.
#[derive(Debug)]
pub struct DiskImage {
    /// The file.
    pub file: File,
    /// Serial of the disk, for messages.
    pub disk: String,
}

impl DiskImage {
    /// Reads bytes at an offset, as `pread`.
    ///
    /// # Errors
    /// The host's error.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(&self.file, bytes, offset)
    }
}

impl fmt::Display for DiskImage {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(text, "an image of the disk {}", self.disk)
    }
}

/// The images of one VM.
#[derive(Debug, Default)]
pub struct Images {
    images: Vec<DiskImage>,
    slots: ImageSlots,
}

impl Images {
    /// Numbers the whole pages of images above the slots of a paging file.
    ///
    /// # Errors
    /// If the host does not report the length of one.
    pub fn new(file_slots: u32, images: Vec<DiskImage>) -> io::Result<Self> {
        let pages = images.iter().map(|image| {
            // Of a block device too. No other code uses the file's position.
            let bytes = lseek(&image.file, 0, Whence::SeekEnd)?;
            Ok(u64::try_from(bytes).unwrap_or(0) / PAGE_BYTES)
        });
        let pages: Vec<u64> = pages.collect::<io::Result<_>>()?;
        let slots = ImageSlots::new(file_slots, pages);
        Ok(Self { images, slots })
    }

    /// Returns the slots.
    pub fn slots(&self) -> &ImageSlots {
        &self.slots
    }

    /// Returns the image of a slot, and the offset of its page there; none for a slot of the paging file.
    pub fn place(&self, slot: u32) -> Option<(&DiskImage, u64)> {
        let (image, page) = self.slots.place(slot)?;
        Some((self.images.get(image)?, page * PAGE_BYTES))
    }

    /// Returns the number of the image that is the same file, however that was opened.
    pub fn find(&self, file: impl AsFd) -> Option<usize> {
        let same = fstat(file).ok()?;
        self.images.iter().position(|image| {
            fstat(&image.file).is_ok_and(|own| (own.st_dev, own.st_ino) == (same.st_dev, same.st_ino))
        })
    }
}
