//! A raw disk: the bytes of a file or block device, in order.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use super::format::length;
use super::{Extent, Origin, SECTOR_BYTES, Segments, Store, SyncState};

/// A raw disk. A last part of less than a sector is ignored.
pub(super) struct RawStore {
    file: File,
    size: u64,
    read_only: bool,
    sync_state: SyncState,
}

/// Bytes of zeroes per write where the file system can't zero a range itself.
const ZERO_BYTES: usize = 64 << 10;

/// The kernel may end a killed process's write at a page boundary of its source. Whole pages begin at sector
/// boundaries, so no sector is left half zero.
#[repr(align(4096))]
struct Zeroes([u8; ZERO_BYTES]);
static ZEROES: Zeroes = Zeroes([0; ZERO_BYTES]);

impl RawStore {
    pub fn new(file: File, read_only: bool) -> io::Result<Self> {
        let size = length(&file)? / SECTOR_BYTES * SECTOR_BYTES;
        Ok(Self {
            file,
            size,
            read_only,
            sync_state: SyncState::default(),
        })
    }
}

impl Store for RawStore {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, into: &Segments, offset: u64) -> io::Result<()> {
        read_all(&self.file, into, offset)
    }

    fn write(&self, from: &Segments, offset: u64) -> io::Result<()> {
        write_all(&self.file, from, offset)
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        match punch(&self.file, offset, bytes) {
            // A discard is a hint.
            Err(error) if not_supported(&error) => Ok(()),
            result => result,
        }
    }

    fn write_zeroes(&self, offset: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        zero(&self.file, offset, bytes, unmap)
    }

    fn write_back(&self) -> io::Result<Option<usize>> {
        Ok(Some(0))
    }

    fn sync_state(&self) -> &SyncState {
        &self.sync_state
    }

    fn files(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.file.as_fd()]
    }

    fn extent(&self, _offset: u64, _bytes: u64) -> Option<Extent> {
        Some(Extent { file: 0 })
    }

    fn known_zero(&self, offset: u64, bytes: u64) -> (bool, u64) {
        hole(&self.file, offset, bytes)
    }

    fn bases(&self) -> Vec<usize> {
        if self.read_only { vec![0] } else { Vec::new() }
    }

    fn origin(&self, offset: u64, bytes: u64) -> Origin {
        if self.read_only {
            Origin::Base {
                file: 0,
                offset,
                bytes,
            }
        } else {
            Origin::Other { bytes }
        }
    }
}

/// Whether the front of a range of a file is a hole, and the length of the uniform front.
pub(super) fn hole(file: &File, offset: u64, bytes: u64) -> (bool, u64) {
    let next = |what| {
        let from = i64::try_from(offset).unwrap_or(i64::MAX);
        // SAFETY: lseek touches no memory; no code uses the offset of the file.
        u64::try_from(unsafe { libc::lseek(file.as_raw_fd(), from, what) })
            .map_err(|_| io::Error::last_os_error())
    };
    let end = offset.saturating_add(bytes);
    match next(libc::SEEK_DATA) {
        Ok(data) if data > offset => (true, data.min(end) - offset),
        // After the last data.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => (true, bytes),
        Err(_) => (false, bytes),
        Ok(_) => match next(libc::SEEK_HOLE) {
            Ok(hole) if hole > offset => (false, hole.min(end) - offset),
            _ => (false, bytes),
        },
    }
}

/// Reads all segments; bytes past the end of the file are zeroes.
pub(super) fn read_all(file: &File, into: &Segments, offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < into.bytes() {
        let rest;
        let part = if done == 0 {
            into
        } else {
            rest = into.part(done, into.bytes() - done);
            &rest
        };
        let iovecs = part.iovecs();
        let at = file_offset(offset, done)?;
        // SAFETY: the segments are writable until the I/O ends, which is when preadv returns.
        let read = unsafe { libc::preadv(file.as_raw_fd(), iovecs.as_ptr(), iovecs.len() as i32, at) };
        match u64::try_from(read) {
            Ok(0) => {
                part.zero();
                return Ok(());
            }
            Ok(read) => done += read,
            Err(_) => retry_if_interrupted()?,
        }
    }
    Ok(())
}

/// Writes all segments.
pub(super) fn write_all(file: &File, from: &Segments, offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < from.bytes() {
        let rest;
        let part = if done == 0 {
            from
        } else {
            rest = from.part(done, from.bytes() - done);
            &rest
        };
        let iovecs = part.iovecs();
        let at = file_offset(offset, done)?;
        // SAFETY: the segments are readable until the I/O ends, which is when pwritev returns.
        let written = unsafe { libc::pwritev(file.as_raw_fd(), iovecs.as_ptr(), iovecs.len() as i32, at) };
        match u64::try_from(written) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => done += written,
            Err(_) => retry_if_interrupted()?,
        }
    }
    Ok(())
}

/// Reserves space for the whole file where its file system can: writes to its mapping then need none.
pub fn allocate_whole(file: &File) -> io::Result<()> {
    match allocate(file, 0, 0, file.metadata()?.len()) {
        Err(error) if not_supported(&error) => Ok(()),
        result => result,
    }
}

/// Makes a hole.
pub(super) fn punch(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    allocate(
        file,
        libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        offset,
        bytes,
    )
}

/// Makes a range read as zeroes, by the file system if possible.
pub(super) fn zero(file: &File, offset: u64, bytes: u64, unmap: bool) -> io::Result<()> {
    let mode = if unmap {
        libc::FALLOC_FL_PUNCH_HOLE
    } else {
        libc::FALLOC_FL_ZERO_RANGE
    };
    match allocate(file, mode | libc::FALLOC_FL_KEEP_SIZE, offset, bytes) {
        Err(error) if not_supported(&error) => {
            write_zero_bytes(offset, bytes, |zeroes, at| write_all(file, zeroes, at))
        }
        result => result,
    }
}

/// Writes zeroes in pieces.
pub(super) fn write_zero_bytes(
    offset: u64,
    bytes: u64,
    write: impl Fn(&Segments, u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut done = 0;
    while done < bytes {
        let take = (bytes - done).min(ZERO_BYTES as u64);
        let mut piece = Segments::new();
        // SAFETY: a write only reads its segments, and `ZEROES` is static.
        unsafe { piece.push(ZEROES.0.as_ptr().cast_mut(), take as usize) };
        write(&piece, offset + done)?;
        done += take;
    }
    Ok(())
}

fn allocate(file: &File, mode: i32, offset: u64, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let (at, length) = (file_offset(offset, 0)?, file_offset(bytes, 0)?);
    loop {
        // SAFETY: fallocate touches no memory of ours.
        if unsafe { libc::fallocate(file.as_raw_fd(), mode, at, length) } == 0 {
            return Ok(());
        }
        retry_if_interrupted()?;
    }
}

fn not_supported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV)
    )
}

fn retry_if_interrupted() -> io::Result<()> {
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        error => Err(error),
    }
}

fn file_offset(offset: u64, more: u64) -> io::Result<i64> {
    offset
        .checked_add(more)
        .and_then(|sum| i64::try_from(sum).ok())
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
}
