//! The bytes of a disk, whatever its format, from files that are already open.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::qcow2::Qcow2Store;
use super::raw::RawStore;
use super::scratch::ScratchStore;
use super::{Format, Segments};

/// Where a range of a disk lies as it is: in one file, at the same offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index among [`Store::files`].
    pub file: usize,
}

/// Where the front of a range comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It lies as it is in a file that nobody writes while this disk is open.
    Base {
        /// Index among [`Store::files`]; one of [`Store::bases`].
        file: usize,
        /// Where in that file. Everything named lies before the file's end, but the last page may not be whole.
        offset: u64,
        /// How much.
        bytes: u64,
    },
    /// It comes from elsewhere: an overlay's own data, zeroes, compressed clusters, a file written in place.
    Other {
        /// How much.
        bytes: u64,
    },
}

impl Origin {
    /// How much of the range it speaks of.
    pub fn bytes(&self) -> u64 {
        match *self {
            Self::Base { bytes, .. } | Self::Other { bytes } => bytes,
        }
    }

    /// The same, with `files` other files before those it counts.
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
/// Linux drops data that it could not write, and reports that once for each open file: the next sync succeeds, whichever queue of
/// the disk asks for it. So a disk whose sync has failed stays failed.
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

    /// Notes how a sync ended; the result is that of the disk's sync.
    pub fn note(&self, synced: io::Result<()>) -> io::Result<()> {
        if synced.is_err() {
            self.0.store(true, Ordering::Release);
        }
        synced.and_then(|()| self.check())
    }
}

/// The bytes of a disk. Every call may block; calls from several threads are served at once.
///
/// The caller keeps ranges inside [`Store::size`]. Of two overlapping writes at once either may win, sector by sector.
pub trait Store: Send + Sync {
    /// Size in bytes, a multiple of a sector.
    fn size(&self) -> u64;
    /// Fills `into` from `offset`.
    fn read(&self, into: &Segments, offset: u64) -> io::Result<()>;
    /// Writes `from` at `offset`.
    fn write(&self, from: &Segments, offset: u64) -> io::Result<()>;
    /// Gives a range's space back; what it reads as afterwards is not said.
    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()>;
    /// Makes a range read as zeroes; `unmap` allows giving its space back.
    fn write_zeroes(&self, offset: u64, bytes: u64, unmap: bool) -> io::Result<()>;
    /// Hands everything that is only in this process to the kernel, and returns the file (an index among
    /// [`Store::files`]) whose data must be synced for completed writes to survive the host; `None` when nothing must.
    fn write_back(&self) -> io::Result<Option<usize>>;
    /// The state of syncs of the file that [`Store::write_back`] names.
    fn sync_state(&self) -> &SyncState;
    /// The files that extents, origins and [`Store::write_back`] name. Always the same.
    fn files(&self) -> Vec<BorrowedFd<'_>>;
    /// Which of [`Store::files`] nobody writes while this disk is open.
    fn bases(&self) -> Vec<usize>;
    /// Where the range lies, if it lies in one file as it is.
    fn extent(&self, _offset: u64, _bytes: u64) -> Option<Extent> {
        None
    }
    /// Whether the front of a range of at least one byte is known to be zeroes without reading it, and how much of the
    /// range that says something of.
    fn known_zero(&self, _offset: u64, bytes: u64) -> (bool, u64) {
        (false, bytes)
    }
    /// Where the front of a range of at least one byte comes from: 1 to `bytes` bytes of it.
    ///
    /// Cheap for raw disks and temporary overlays; a table look-up for qcow2, which may read the table. The answer
    /// holds until the next write, discard or zeroing of the range.
    fn origin(&self, offset: u64, bytes: u64) -> Origin;
}

/// Puts a disk together from its open files, the top overlay first.
///
/// A scratch file keeps its content when it is assembled anew over the same base, as after a reboot of the guest.
/// Only the first file is ever written, and not if `read_only`.
pub fn assemble(layers: Vec<(File, Format)>, read_only: bool) -> io::Result<Arc<dyn Store>> {
    assemble_within(layers, read_only, None)
}

/// The same, with a limit to a temporary overlay: bytes of blocks that were ever written. A write beyond it fails with
/// `EFBIG`.
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
