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
//!
//! A copy of such a file ([`copy_scratch`]) under the temporary overlay of another VM is a base like any other: a clone
//! sees what its parent had written, and neither sees what the other writes.

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
/// Copied at once where the kernel does not copy.
const COPY_BYTES: usize = 256 << 10;

/// Makes the nameless file of an overlay for a disk of `size` bytes in `directory`.
pub(super) fn create(directory: &Path, size: u64) -> io::Result<File> {
    let file = nameless_file(directory)?;
    file.set_len(bitmap_offset(size) + bitmap_bytes(size))?;
    Ok(file)
}

/// Makes an empty file without a name in `directory`: it is gone with the last process that has it open.
pub fn nameless_file(directory: &Path) -> io::Result<File> {
    let open = |flags| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .mode(0o600)
            .open(directory)
    };
    match open(libc::O_TMPFILE | libc::O_CLOEXEC) {
        // Not every file system has nameless files.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            static COUNT: AtomicU64 = AtomicU64::new(0);
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = directory.join(format!(".scratch-{}-{number}", std::process::id()));
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)?;
            std::fs::remove_file(&path)?;
            Ok(file)
        }
        result => result,
    }
}

/// Copies a file that nobody writes now, as the temporary overlay of a VM that stands still, to the empty file `to`. Space that `from` does not take `to`
/// does not take either; where the file system can share it between files, nothing is copied.
pub fn copy_scratch(from: &File, to: &File) -> io::Result<()> {
    let bytes = from.metadata()?.len();
    to.set_len(bytes)?;
    let mut at = 0;
    while let Some((start, end)) = data_from(from, at, bytes)? {
        copy_range(from, to, start, end)?;
        at = end;
    }
    Ok(())
}

/// The first run of data from `at` on in a file of `bytes` bytes.
fn data_from(file: &File, at: u64, bytes: u64) -> io::Result<Option<(u64, u64)>> {
    let seek = |at: u64, whence| {
        // SAFETY: takes no pointers.
        let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, whence) };
        u64::try_from(found).map_err(|_| io::Error::last_os_error())
    };
    if at >= bytes {
        return Ok(None);
    }
    match seek(at, libc::SEEK_DATA) {
        Ok(start) => Ok(Some((start, seek(start, libc::SEEK_HOLE)?.min(bytes)))),
        // Only a hole is left.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

fn copy_range(from: &File, to: &File, start: u64, end: u64) -> io::Result<()> {
    let (mut source, mut target) = (start as libc::off64_t, start as libc::off64_t);
    while (source as u64) < end {
        let left = (end - source as u64) as usize;
        // SAFETY: the two offsets are live variables of ours.
        let copied = unsafe {
            libc::copy_file_range(
                from.as_raw_fd(),
                &mut source,
                to.as_raw_fd(),
                &mut target,
                left,
                0,
            )
        };
        match copied {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            1.. => {}
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                // Files of two file systems, or one that can't: through this process.
                _ => return copy_bytes(from, to, source as u64, end),
            },
        }
    }
    Ok(())
}

fn copy_bytes(from: &File, to: &File, start: u64, end: u64) -> io::Result<()> {
    let mut buffer = vec![0; COPY_BYTES];
    let mut at = start;
    while at < end {
        let bytes = (end - at).min(COPY_BYTES as u64) as usize;
        from.read_exact_at(&mut buffer[..bytes], at)?;
        to.write_all_at(&buffer[..bytes], at)?;
        at += bytes as u64;
    }
    Ok(())
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
    /// Nobody writes the file any more: it is a base.
    frozen: bool,
    /// Held shared while whole blocks appear, exclusively while blocks are completed from below, so that completing a
    /// block cannot undo a write of another queue to it. Not needed for blocks that are present: they stay so.
    filling: RwLock<()>,
}

impl ScratchStore {
    /// A disk of the overlay `file` over `lower`; `frozen` if nobody writes it any more.
    pub fn new(file: File, lower: Arc<dyn Store>, frozen: bool) -> io::Result<Self> {
        let size = lower.size();
        if file.metadata()?.len() != bitmap_offset(size) + bitmap_bytes(size) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the scratch file is of another disk",
            ));
        }
        let bitmap = Bitmap::map(&file, bitmap_offset(size), size.div_ceil(BLOCK_BYTES), !frozen)?;
        Ok(Self {
            file,
            bitmap,
            lower,
            size,
            frozen,
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
        let own = self.frozen.then_some(0);
        let lower = self.lower.bases().into_iter().map(|file| file + 1);
        own.into_iter().chain(lower).collect()
    }

    fn origin(&self, offset: u64, bytes: u64) -> Origin {
        let end = offset + bytes;
        let (here, to) = self.bitmap.run(offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        let bytes = (to * BLOCK_BYTES).min(end) - offset;
        if here && self.frozen {
            let file = 0;
            Origin::Base { file, offset, bytes }
        } else if here {
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
    /// Maps the bitmap; one that is not `writable` is never set a bit in.
    fn map(file: &File, offset: u64, blocks: u64, writable: bool) -> io::Result<Self> {
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let words = usize::try_from(blocks.div_ceil(64)).map_err(invalid)?;
        let offset = i64::try_from(offset).map_err(invalid)?;
        // SAFETY: a new shared mapping of a file of our own; nothing else is at the place the kernel chooses. Only
        // holders of this nameless file could shrink it, and none does.
        let start = unsafe {
            let access = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
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
