//! Bytes of a disk in any format, from open files.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::qcow2::Qcow2Store;
use super::raw::RawStore;
use super::scratch::ScratchStore;
use super::{Format, Segments};

/// Location of a range that is stored unchanged: in one file, at the same offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index among [`Store::files`].
    pub file: usize,
}

/// Source of the front of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Stored unchanged in a file that is never written while this disk is open.
    Base {
        /// Index among [`Store::files`]; one of [`Store::bases`].
        file: usize,
        /// Offset in that file. The range lies before the file's end, but its last page may not be whole.
        offset: u64,
        /// Length of the range, bytes.
        bytes: u64,
    },
    /// Another source: an overlay's own data, zeroes, compressed clusters, or a file written in place.
    Other {
        /// Length of the range, bytes.
        bytes: u64,
    },
}

impl Origin {
    /// Length of the described range.
    pub fn bytes(&self) -> u64 {
        match *self {
            Self::Base { bytes, .. } | Self::Other { bytes } => bytes,
        }
    }

    /// Returns the same with `files` other files before those that it counts.
    pub(super) fn behind(self, files: usize) -> Self {
        match self {
            Self::Base { file, offset, bytes } => Self::Base {
                file: file + files,
                offset,
                bytes,
            },
            other => other,
        }
    }
}

/// Whether a sync of a disk has ever failed.
///
/// Linux drops data that it could not write, and reports that once for each open file: the next sync succeeds
/// on any queue of the disk. So a disk whose sync has failed stays failed.
#[derive(Debug, Default)]
pub struct SyncState(AtomicBool);

impl SyncState {
    /// Fails once a sync has failed.
    pub fn check(&self) -> io::Result<()> {
        if self.0.load(Ordering::Acquire) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }

    /// Records the outcome of a sync; returns the disk's result.
    pub fn note(&self, synced: io::Result<()>) -> io::Result<()> {
        if synced.is_err() {
            self.0.store(true, Ordering::Release);
        }
        synced.and_then(|()| self.check())
    }
}

/// Bytes of a disk. Every call may block; calls from several threads are served concurrently.
///
/// The caller keeps ranges inside [`Store::size`]. Of two concurrent overlapping writes either may win,
/// sector by sector.
pub trait Store: Send + Sync {
    /// Size in bytes, a multiple of a sector.
    fn size(&self) -> u64;
    /// Fills `into` from `offset`.
    fn read(&self, into: &Segments, offset: u64) -> io::Result<()>;
    /// Writes `from` at `offset`.
    fn write(&self, from: &Segments, offset: u64) -> io::Result<()>;
    /// Frees a range's space; its content afterwards is undefined.
    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()>;
    /// Makes a range read as zeroes; `unmap` allows freeing its space.
    fn write_zeroes(&self, offset: u64, bytes: u64, unmap: bool) -> io::Result<()>;
    /// Passes everything buffered in this process to the kernel, and returns the file (an index into
    /// [`Store::files`]) that must be synced for completed writes to survive a crash of the host; `None` if
    /// none must.
    fn write_back(&self) -> io::Result<Option<usize>>;
    /// State of syncs of the file that [`Store::write_back`] names.
    fn sync_state(&self) -> &SyncState;
    /// Files that extents, origins and [`Store::write_back`] refer to. Always the same.
    fn files(&self) -> Vec<BorrowedFd<'_>>;
    /// Indices into [`Store::files`] of the files that are never written while this disk is open.
    fn bases(&self) -> Vec<usize>;
    /// Location of the range, if it is stored unchanged in one file.
    fn extent(&self, _offset: u64, _bytes: u64) -> Option<Extent> {
        None
    }
    /// Whether the front of a non-empty range is known to be zeroes without reading it, and the length of
    /// that front.
    fn known_zero(&self, _offset: u64, bytes: u64) -> (bool, u64) {
        (false, bytes)
    }
    /// Source of the front of a non-empty range: of 1 to `bytes` bytes.
    ///
    /// Cheap for raw disks and temporary overlays; a table look-up for qcow2, which may read the table. The
    /// result is valid until the next write, discard or zeroing of the range.
    fn origin(&self, offset: u64, bytes: u64) -> Origin;
}

/// Assembles a disk from its open files, the top overlay first.
///
/// A scratch file keeps its content when it is assembled again over the same base, as after a reboot of the
/// guest. Only the first file is ever written, and not if `read_only`.
pub fn assemble(layers: Vec<(File, Format)>, read_only: bool) -> io::Result<Arc<dyn Store>> {
    assemble_within(layers, read_only, None)
}

/// Does the same with a limit for a temporary overlay, in bytes of blocks ever written. A write beyond it
/// fails with `EFBIG`.
pub fn assemble_within(
    layers: Vec<(File, Format)>,
    read_only: bool,
    scratch_limit: Option<u64>,
) -> io::Result<Arc<dyn Store>> {
    let mut layers = layers.into_iter();
    let empty = || io::Error::new(io::ErrorKind::InvalidInput, "a disk needs at least one file");
    let (file, format) = layers.next().ok_or_else(empty)?;
    match format {
        Format::Scratch => {
            let lower = assemble(layers.collect(), true)?;
            Ok(Arc::new(ScratchStore::new(
                file,
                lower,
                read_only,
                scratch_limit,
            )?))
        }
        Format::Raw if layers.len() == 0 => Ok(Arc::new(RawStore::new(file, read_only)?)),
        Format::Raw => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a raw file has nothing below it",
        )),
        Format::Qcow2 => Ok(Arc::new(Qcow2Store::new(file, layers.collect(), read_only)?)),
    }
}
