//! A temporary overlay: a VM's own writes over a disk that nobody writes.
//!
//! ```text
//!   0                                  size, rounded up to 64 KiB
//!   +----------------------------------+----------------------------+
//!   | written blocks at their offsets, | a bit for each block:      |
//!   | holes elsewhere                  | 1 = the block is here      |
//!   +----------------------------------+----------------------------+
//! ```
//!
//! The file has no name: it is gone with the last process that has it open. The bitmap is in the file so that the
//! next shard of the same VM (a reboot, a crash) finds it. Blocks sit at their own offsets, so a range in one file is
//! an [`Extent`] of it, served like a raw disk. qcow2 would do, at a table look-up and an allocation for each cluster.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::raw::{punch, read_all, write_all, zero};
use super::{Extent, Origin, Segments, Store};

/// Unit of copying up; the page size, so that a bit means the same on every file system.
const BLOCK_BYTES: u64 = 4096;
const BITMAP_ALIGN_BYTES: u64 = 64 << 10;

/// Makes the nameless file of an overlay for a disk of `size` bytes in `directory`.
pub(super) fn create(directory: &Path, size: u64) -> io::Result<File> {
    let open = |flags| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .mode(0o600)
            .open(directory)
    };
    let file = match open(libc::O_TMPFILE | libc::O_CLOEXEC) {
        // Not every file system has nameless files.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            let path = directory.join(format!(".scratch-{}-{:p}", std::process::id(), &size));
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)?;
            std::fs::remove_file(&path)?;
            file
        }
        result => result?,
    };
    file.set_len(bitmap_offset(size) + bitmap_bytes(size))?;
    Ok(file)
}

fn bitmap_offset(size: u64) -> u64 {
    size.next_multiple_of(BITMAP_ALIGN_BYTES)
}

fn bitmap_bytes(size: u64) -> u64 {
    size.div_ceil(BLOCK_BYTES).div_ceil(64) * 8
}

/// A disk with its own writes above another.
pub(super) struct ScratchStore {
    file: File,
    bitmap: Bitmap,
    lower: Arc<dyn Store>,
    size: u64,
    /// Held shared while whole blocks appear, exclusively while blocks are completed from below, so that completing a
    /// block cannot undo a write of another queue to it. Not needed for blocks that are present: they stay so.
    filling: RwLock<()>,
}

impl ScratchStore {
    pub fn new(file: File, lower: Arc<dyn Store>) -> io::Result<Self> {
        let size = lower.size();
        if file.metadata()?.len() != bitmap_offset(size) + bitmap_bytes(size) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the scratch file is of another disk",
            ));
        }
        let bitmap = Bitmap::map(&file, bitmap_offset(size), size.div_ceil(BLOCK_BYTES))?;
        Ok(Self {
            file,
            bitmap,
            lower,
            size,
            filling: RwLock::new(()),
        })
    }

    /// Completes the block at `offset` from below, unless it is present. `filling` is held exclusively.
    fn fill(&self, offset: u64) -> io::Result<()> {
        let block = offset / BLOCK_BYTES;
        if self.bitmap.get(block) {
            return Ok(());
        }
        let start = block * BLOCK_BYTES;
        let mut content = [0_u8; BLOCK_BYTES as usize];
        let mut segments = Segments::new();
        let bytes = BLOCK_BYTES.min(self.size - start) as usize;
        // SAFETY: `content` lives until the read below has ended.
        unsafe { segments.push(content.as_mut_ptr(), bytes) };
        self.lower.read(&segments, start)?;
        self.file.write_all_at(&content[..bytes], start)?;
        self.bitmap.set(block);
        Ok(())
    }

    /// Runs `write` on a range with its edge blocks complete, then marks all its blocks present.
    fn update(&self, offset: u64, bytes: u64, write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let end = offset + bytes;
        let (first, last) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        if self.bitmap.run(first, last) == (true, last) {
            return write();
        }
        let whole =
            offset.is_multiple_of(BLOCK_BYTES) && (end.is_multiple_of(BLOCK_BYTES) || end == self.size);
        let (_shared, _exclusive);
        if whole {
            _shared = self.filling.read().unwrap_or_else(PoisonError::into_inner);
        } else {
            _exclusive = self.filling.write().unwrap_or_else(PoisonError::into_inner);
            self.fill(offset)?;
            self.fill(end - 1)?;
        }
        write()?;
        (first..last).for_each(|block| self.bitmap.set(block));
        Ok(())
    }
}

impl Store for ScratchStore {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, into: &Segments, offset: u64) -> io::Result<()> {
        let end = offset + into.bytes();
        let mut at = offset;
        while at < end {
            let (here, to) = self.bitmap.run(at / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            let bytes = (to * BLOCK_BYTES).min(end) - at;
            let part = into.part(at - offset, bytes);
            if here {
                read_all(&self.file, &part, at)?;
            } else {
                self.lower.read(&part, at)?;
            }
            at += bytes;
        }
        Ok(())
    }

    fn write(&self, from: &Segments, offset: u64) -> io::Result<()> {
        self.update(offset, from.bytes(), || write_all(&self.file, from, offset))
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        // Frees what is here. What is below stays visible: a discarded range may read as anything.
        let start = offset.next_multiple_of(BLOCK_BYTES);
        let end = (offset + bytes) / BLOCK_BYTES * BLOCK_BYTES;
        if start < end {
            // A file system without holes only keeps the space.
            let _ = punch(&self.file, start, end - start);
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, bytes: u64, _unmap: bool) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.update(offset, bytes, || zero(&self.file, offset, bytes, true))
    }

    fn write_back(&self) -> io::Result<Option<usize>> {
        // Nothing of a nameless file survives the host, so nothing is synced.
        Ok(None)
    }

    fn files(&self) -> Vec<BorrowedFd<'_>> {
        let mut files = vec![self.file.as_fd()];
        files.extend(self.lower.files());
        files
    }

    fn extent(&self, offset: u64, bytes: u64) -> Option<Extent> {
        let last = (offset + bytes).div_ceil(BLOCK_BYTES);
        match self.bitmap.run(offset / BLOCK_BYTES, last) {
            (true, end) if end == last => Some(Extent { file: 0 }),
            (false, end) if end == last => self.lower.extent(offset, bytes).map(|extent| Extent {
                file: extent.file + 1,
            }),
            _ => None,
        }
    }

    fn bases(&self) -> Vec<usize> {
        self.lower.bases().into_iter().map(|file| file + 1).collect()
    }

    fn origin(&self, offset: u64, bytes: u64) -> Origin {
        let end = offset + bytes;
        let (here, to) = self.bitmap.run(offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        let bytes = (to * BLOCK_BYTES).min(end) - offset;
        if here {
            Origin::Other { bytes }
        } else {
            self.lower.origin(offset, bytes).behind(1)
        }
    }
}

/// Bits in a shared mapping of the file, set and never cleared.
struct Bitmap {
    start: *mut libc::c_void,
    words: usize,
    blocks: u64,
}

// SAFETY: the mapping is only accessed as atomics, and unmapped only by `drop`.
unsafe impl Send for Bitmap {}
// SAFETY: as above.
unsafe impl Sync for Bitmap {}

impl Bitmap {
    fn map(file: &File, offset: u64, blocks: u64) -> io::Result<Self> {
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let words = usize::try_from(blocks.div_ceil(64)).map_err(invalid)?;
        let offset = i64::try_from(offset).map_err(invalid)?;
        // SAFETY: a new shared mapping of a file of our own; nothing else is at the place the kernel chooses. Only
        // holders of this nameless file could shrink it, and none does.
        let start = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(
                std::ptr::null_mut(),
                words * 8,
                access,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start, words, blocks })
    }

    fn word(&self, index: u64) -> &AtomicU64 {
        assert!(index < self.words as u64, "block outside the disk");
        // SAFETY: inside the mapping, aligned, and accessed as an atomic by all.
        unsafe { &*self.start.cast::<AtomicU64>().add(index as usize) }
    }

    fn get(&self, block: u64) -> bool {
        self.word(block / 64).load(Ordering::Acquire) >> (block % 64) & 1 == 1
    }

    fn set(&self, block: u64) {
        self.word(block / 64)
            .fetch_or(1 << (block % 64), Ordering::Release);
    }

    /// Whether block `first` is set, and where (`end` at most) the run of blocks like it ends.
    fn run(&self, first: u64, end: u64) -> (bool, u64) {
        let end = end.min(self.blocks);
        let value = first < end && self.get(first);
        let mut block = first;
        while block < end {
            let word = self.word(block / 64).load(Ordering::Acquire);
            let differs = if value { !word } else { word } >> (block % 64);
            if differs != 0 {
                return (value, (block + u64::from(differs.trailing_zeros())).min(end));
            }
            block = (block / 64 + 1) * 64;
        }
        (value, end)
    }
}

impl Drop for Bitmap {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `map`; no reference to it outlives `self`.
        unsafe { libc::munmap(self.start, self.words * 8) };
    }
}
