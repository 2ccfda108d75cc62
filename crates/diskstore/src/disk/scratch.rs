//! A temporary overlay: a VM's own writes over a disk that is never written.
//!
//! ```text
//!   0                                  size, rounded up to 64 KiB
//!   +----------------------------------+----------------------------+
//!   | written blocks at their offsets, | a bit for each block:      |
//!   | holes elsewhere                  | 1 = the block is here      |
//!   +----------------------------------+----------------------------+
//! ```
//!
//! The file has no name, so it is gone with the last process that has it open. The bitmap is in the file so
//! that the VM's next shard finds it after a reboot ([`BlockMap`]). A write beyond the [`SpaceBudget`] fails.
//! Blocks lie at their own offsets, so a range in one file is an [`Extent`] of it, served like a raw disk.
//! qcow2 would need a table look-up and an allocation for each cluster.
//!
//! A copy of such a file ([`copy_scratch`]) under the temporary overlay of another VM is a base like any
//! other. A clone sees its parent's writes until the copy; neither sees the other's later writes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use locks::IgnorePoison;

use super::block_map::BlockMap;
use super::raw::{hole, punch, read_all, write_all, zero};
use super::space_budget::SpaceBudget;
use super::{Extent, Origin, Segments, Store, SyncState};

/// Unit of copying up: the page size, so that a bit has the same meaning on every file system.
const BLOCK_BYTES: u64 = 4096;
const BITMAP_ALIGN_BYTES: u64 = 64 << 10;
/// Bytes per copy where the kernel does not copy.
const COPY_BYTES: usize = 256 << 10;

/// Creates the nameless file of an overlay for a disk of `size` bytes in `directory`.
pub(super) fn create(directory: &Path, size: u64) -> io::Result<File> {
    let file = nameless_file(directory)?;
    file.set_len(bitmap_offset(size) + BlockMap::bytes(blocks(size)))?;
    Ok(file)
}

/// Creates an empty file without a name in `directory`: it is gone with the last process that has it open.
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
        // Some file systems have no nameless files.
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

/// Copies a file that is not written now, such as the temporary overlay of a paused VM, to the empty file
/// `to`. Holes of `from` are holes in `to`; where the file system can share space between files, nothing is
/// copied.
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

/// Returns the first run of data from `at` on in a file of `bytes` bytes.
pub(super) fn data_from(file: &File, at: u64, bytes: u64) -> io::Result<Option<(u64, u64)>> {
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
        // SAFETY: the two offsets are live local variables.
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
                // Files of two file systems, or of one that can't copy, are copied by this process.
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

fn blocks(size: u64) -> u64 {
    size.div_ceil(BLOCK_BYTES)
}

/// A disk with its own writes above another.
pub(super) struct ScratchStore {
    file: File,
    here: BlockMap,
    space: SpaceBudget,
    sync_state: SyncState,
    lower: Arc<dyn Store>,
    size: u64,
    /// Whether the file is a base, which is not written again.
    frozen: bool,
    /// Held shared while whole blocks are added, exclusively while blocks are completed from the lower disk,
    /// so that completing a block can't undo a write of another queue to it. Not needed for present blocks:
    /// they stay present.
    filling: RwLock<()>,
}

impl ScratchStore {
    /// Creates a disk of the overlay `file` over `lower`; `frozen` if it is never written again. Its written
    /// blocks take at most `limit` bytes, if there is a limit.
    pub fn new(file: File, lower: Arc<dyn Store>, frozen: bool, limit: Option<u64>) -> io::Result<Self> {
        let size = lower.size();
        let blocks = blocks(size);
        if file.metadata()?.len() != bitmap_offset(size) + BlockMap::bytes(blocks) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the scratch file is of another disk",
            ));
        }
        let here = BlockMap::read(&file, bitmap_offset(size), blocks)?;
        let space = SpaceBudget::new(limit, here.count(0, blocks) * BLOCK_BYTES);
        Ok(Self {
            file,
            here,
            space,
            sync_state: SyncState::default(),
            lower,
            size,
            frozen,
            filling: RwLock::new(()),
        })
    }

    /// Completes the block at `offset` from the lower disk unless it is present. `filling` is held
    /// exclusively.
    fn fill(&self, offset: u64) -> io::Result<()> {
        let block = offset / BLOCK_BYTES;
        if self.here.get(block) {
            return Ok(());
        }
        let start = block * BLOCK_BYTES;
        let mut content = [0_u8; BLOCK_BYTES as usize];
        let mut segments = Segments::new();
        let bytes = BLOCK_BYTES.min(self.size - start) as usize;
        // SAFETY: `content` lives until the read below has ended.
        unsafe { segments.push(content.as_mut_ptr(), bytes) };
        self.lower.read(&segments, start)?;
        self.space.check_file_system(&self.file, BLOCK_BYTES)?;
        self.space.take(BLOCK_BYTES)?;
        let filled = self.file.write_all_at(&content[..bytes], start);
        let added = filled.and_then(|()| self.here.set(&self.file, block, block + 1));
        self.keep(BLOCK_BYTES, added)
    }

    /// Returns the space of blocks that were not added.
    fn keep(&self, taken: u64, added: io::Result<u64>) -> io::Result<()> {
        let added_bytes = added.as_ref().map_or(0, |added| added * BLOCK_BYTES);
        self.space.give_back(taken - added_bytes);
        added.map(drop)
    }

    /// Runs `write` on a range with its edge blocks complete, then marks all its blocks present. `is_data`:
    /// it takes space of the file system, unlike zeroes.
    fn update(
        &self,
        offset: u64,
        bytes: u64,
        is_data: bool,
        write: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let end = offset + bytes;
        let (first, last) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        if self.here.run(first, last) == (true, last) {
            if is_data {
                self.check_space_again(offset, bytes)?;
            }
            return write();
        }
        let whole =
            offset.is_multiple_of(BLOCK_BYTES) && (end.is_multiple_of(BLOCK_BYTES) || end == self.size);
        let (_shared, _exclusive);
        if whole {
            _shared = self.filling.read().ignore_poison();
        } else {
            _exclusive = self.filling.write().ignore_poison();
            self.fill(offset)?;
            self.fill(end - 1)?;
        }
        let taken = (last - first - self.here.count(first, last)) * BLOCK_BYTES;
        if is_data {
            self.space.check_file_system(&self.file, bytes)?;
        }
        self.space.take(taken)?;
        let added = write().and_then(|()| self.here.set(&self.file, first, last));
        self.keep(taken, added)
    }

    /// Checks for space for data in present blocks: they may be holes, of zeroes or discarded.
    fn check_space_again(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.space.check_file_system(&self.file, bytes).or_else(|full| {
            let has_room = hole(&self.file, offset, bytes) == (false, bytes);
            if has_room { Ok(()) } else { Err(full) }
        })
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
            let (here, to) = self.here.run(at / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
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
        self.update(offset, from.bytes(), true, || write_all(&self.file, from, offset))
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        // Frees the overlay's own data. The lower data stays visible: a discarded range may read as anything.
        let start = offset.next_multiple_of(BLOCK_BYTES);
        let end = (offset + bytes) / BLOCK_BYTES * BLOCK_BYTES;
        if start < end {
            // A file system without holes keeps the space.
            let _ = punch(&self.file, start, end - start);
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, bytes: u64, _unmap: bool) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.update(offset, bytes, false, || zero(&self.file, offset, bytes, true))
    }

    fn write_back(&self) -> io::Result<Option<usize>> {
        // A nameless file does not survive a crash of the host, so nothing is synced.
        Ok(None)
    }

    fn sync_state(&self) -> &SyncState {
        &self.sync_state
    }

    fn files(&self) -> Vec<BorrowedFd<'_>> {
        let mut files = vec![self.file.as_fd()];
        files.extend(self.lower.files());
        files
    }

    fn extent(&self, offset: u64, bytes: u64) -> Option<Extent> {
        let last = (offset + bytes).div_ceil(BLOCK_BYTES);
        match self.here.run(offset / BLOCK_BYTES, last) {
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
        let (here, to) = self.here.run(offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
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
