//! A ring in memory that several processes map.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::ptr::{self, NonNull};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::ring::{LINES_MAX, LINES_MIN, Line, Ring};

/// Why there is no ring in this memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The kernel refused.
    #[error("cannot {0} the memory of a channel")]
    Refused(&'static str, #[source] io::Error),
    /// The other side could cut the file off, and this side would die of SIGBUS.
    #[error("the memory of a channel is not sealed against shrinking")]
    NotSealed,
    /// Not the size of a ring, or not that many lines.
    #[error("{0} bytes are no channel: three lines and a power of two from {LINES_MIN} to {LINES_MAX} are")]
    Size(u64),
}

/// A mapped ring. Unmapped when dropped.
#[derive(Debug)]
pub struct SharedRing {
    ring: NonNull<Ring>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and a ring is made of atomics only.
unsafe impl Send for SharedRing {}
// SAFETY: as above.
unsafe impl Sync for SharedRing {}

impl SharedRing {
    /// A new, empty ring of that many lines, and the file to give to the other side.
    ///
    /// # Errors
    /// If the kernel has no memory, or `lines` is no power of two from [`LINES_MIN`] to [`LINES_MAX`].
    pub fn create(lines: usize) -> Result<(Self, OwnedFd), MemoryError> {
        let bytes = Ring::bytes(lines) as u64;
        lines_of(bytes)?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let refused = |what| move |error: nix::Error| MemoryError::Refused(what, error.into());
        let file = memfd_create(c"channel", flags).map_err(refused("create"))?;
        nix::unistd::ftruncate(&file, bytes as i64).map_err(refused("size"))?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).map_err(refused("seal"))?;
        Ok((Self::attach(&file)?, file))
    }

    /// The ring in a file that the other side made.
    ///
    /// # Errors
    /// If the file has not the size of a ring, or may shrink.
    pub fn attach(file: &OwnedFd) -> Result<Self, MemoryError> {
        let refused = |error: nix::Error| MemoryError::Refused("look at", error.into());
        let seals = fcntl(file, FcntlArg::F_GET_SEALS).map_err(refused)?;
        if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK) {
            return Err(MemoryError::NotSealed);
        }
        let bytes = nix::sys::stat::fstat(file).map_err(refused)?.st_size as u64;
        map(file, 0, bytes)
    }

    /// A ring of that many lines at `offset` of memory that hosts share: a PCI device's, opened as a file, which can't
    /// shrink. One side clears it first ([`SharedRing::clear`]).
    ///
    /// # Errors
    /// If the file is smaller, `offset` is within a page, or `lines` is no power of two from [`LINES_MIN`] to
    /// [`LINES_MAX`].
    pub fn at(device: &File, offset: u64, lines: usize) -> Result<Self, MemoryError> {
        let bytes = Ring::bytes(lines) as u64;
        let known = device
            .metadata()
            .map_err(|error| MemoryError::Refused("look at", error))?;
        // A character device has no size to show, and refuses to be mapped beyond its end.
        let size = if known.file_type().is_char_device() {
            u64::MAX
        } else {
            known.len()
        };
        if offset.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(MemoryError::Size(size.saturating_sub(offset)));
        }
        map(device, offset, bytes)
    }

    /// Makes it an empty ring. Nobody may use it yet.
    pub fn clear(&mut self) {
        // SAFETY: the mapping is that large, this side has the only reference in this process, and zero is a valid ring.
        unsafe { ptr::write_bytes(self.ring.as_ptr().cast::<u8>(), 0, self.bytes) };
    }
}

/// The lines of a ring of that many bytes.
fn lines_of(bytes: u64) -> Result<usize, MemoryError> {
    let lines = usize::try_from(bytes)
        .ok()
        .and_then(|bytes| bytes.checked_sub(Ring::bytes(0)));
    let lines = lines
        .filter(|rest| rest % size_of::<Line>() == 0)
        .map(|rest| rest / size_of::<Line>());
    lines
        .filter(|lines| lines.is_power_of_two() && (LINES_MIN..=LINES_MAX).contains(lines))
        .ok_or(MemoryError::Size(bytes))
}

fn map(file: &impl AsRawFd, offset: u64, bytes: u64) -> Result<SharedRing, MemoryError> {
    let lines = lines_of(bytes)?;
    let bytes = Ring::bytes(lines);
    // SAFETY: a new mapping at a place of the kernel's choice.
    let at = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            offset as libc::off_t,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(MemoryError::Refused("map", io::Error::last_os_error()));
    }
    // The length of a ring's pointer is that of its lines.
    let ring = ptr::slice_from_raw_parts_mut(at.cast::<Line>(), lines) as *mut Ring;
    let ring = NonNull::new(ring).expect("mmap gives null only for a fixed address");
    Ok(SharedRing { ring, bytes })
}

impl Deref for SharedRing {
    type Target = Ring;

    fn deref(&self) -> &Ring {
        // SAFETY: mapped, large enough, aligned to a page, any bytes are a ring, and all of it is atomics: that another
        // process writes it at the same time is no data race.
        unsafe { self.ring.as_ref() }
    }
}

impl Drop for SharedRing {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference outlives this value.
        unsafe { libc::munmap(self.ring.as_ptr().cast(), self.bytes) };
    }
}
