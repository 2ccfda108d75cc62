//! The bytes of a disk, whatever its format, from files that are already open.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

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
    /// The files that extents and [`Store::write_back`] name. Always the same.
    fn files(&self) -> Vec<BorrowedFd<'_>>;
    /// Where the range lies, if it lies in one file as it is.
    fn extent(&self, _offset: u64, _bytes: u64) -> Option<Extent> {
        None
    }
}

/// Puts a disk together from its open files, the top overlay first.
///
/// A scratch file keeps its content when it is assembled anew over the same base, as after a reboot of the guest.
/// Only the first file is ever written, and not if `read_only`.
pub fn assemble(layers: Vec<(File, Format)>, read_only: bool) -> io::Result<Arc<dyn Store>> {
    let mut layers = layers.into_iter();
    let empty = || io::Error::new(io::ErrorKind::InvalidInput, "a disk needs at least one file");
    let (file, format) = layers.next().ok_or_else(empty)?;
    match format {
        Format::Scratch => {
            let lower = assemble(layers.collect(), true)?;
            Ok(Arc::new(ScratchStore::new(file, lower)?))
        }
        Format::Raw if layers.len() == 0 => Ok(Arc::new(RawStore::new(file)?)),
        Format::Raw => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a raw file has nothing below it",
        )),
        Format::Qcow2 => Ok(Arc::new(Qcow2Store::new(file, layers.collect(), read_only)?)),
    }
}
