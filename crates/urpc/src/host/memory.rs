//! A ring or a pipe in memory that several processes map.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::pipe::{Pipe, WORDS_MAX, WORDS_MIN};
use crate::ring::{LINES_MAX, LINES_MIN, Line, Ring};

/// Reason why memory is unusable for a channel.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The kernel refused an operation.
    #[error("cannot {0} the memory of a channel")]
    Refused(&'static str, #[source] io::Error),
    /// The other side could shrink the file, and this side would die of SIGBUS.
    #[error("the memory of a channel is not sealed against shrinking")]
    NotSealed,
    /// The size is not that of a ring with a valid number of lines.
    #[error("{0} bytes are no channel: three lines and a power of two from {LINES_MIN} to {LINES_MAX} are")]
    Size(u64),
    /// The number of words is invalid, or the memory has no room for them.
    #[error("no room for a pipe of {0} words, a power of two from {WORDS_MIN} to {WORDS_MAX}")]
    Words(usize),
}

/// Mapped memory. Unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping belongs to no thread, and only atomics are made of it here.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// A mapped ring. Unmapped when dropped.
#[derive(Debug)]
pub struct SharedRing {
    mapping: Mapping,
    lines: usize,
}

/// A mapped pipe. Unmapped when dropped.
#[derive(Debug)]
pub struct SharedPipe {
    mapping: Mapping,
    words: usize,
}

impl SharedRing {
    /// Creates an empty ring of `lines` lines, and the file to pass to the other side.
    ///
    /// # Errors
    /// Fails if the kernel has no memory, or `lines` is no power of two from [`LINES_MIN`] to [`LINES_MAX`].
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

    /// Maps the ring in a file that the other side created.
    ///
    /// # Errors
    /// Fails if the file does not have the size of a ring, or may shrink.
    pub fn attach(file: &OwnedFd) -> Result<Self, MemoryError> {
        let refused = |error: nix::Error| MemoryError::Refused("look at", error.into());
        let seals = fcntl(file, FcntlArg::F_GET_SEALS).map_err(refused)?;
        if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK) {
            return Err(MemoryError::NotSealed);
        }
        let bytes = nix::sys::stat::fstat(file).map_err(refused)?.st_size as u64;
        map(file, 0, bytes)
    }

    /// Maps a ring of `lines` lines at `offset` of memory that hosts share: a PCI device's, opened as a file,
    /// which can't shrink. One side must clear it first ([`SharedRing::clear`]).
    ///
    /// # Errors
    /// Fails if the file is smaller, `offset` is within a page, or `lines` is no power of two from
    /// [`LINES_MIN`] to [`LINES_MAX`].
    pub fn at(device: &File, offset: u64, lines: usize) -> Result<Self, MemoryError> {
        let bytes = Ring::bytes(lines) as u64;
        let left = left_after(device, offset)?;
        if bytes > left {
            return Err(MemoryError::Size(left));
        }
        map(device, offset, bytes)
    }

    /// Makes the ring empty. Neither side may use it meanwhile.
    pub fn clear(&mut self) {
        self.mapping.clear();
    }
}

impl SharedPipe {
    /// Maps a pipe of `words` words at `offset` of memory that hosts or processes share, which can't shrink.
    /// One side must clear it first ([`SharedPipe::clear`]).
    ///
    /// # Errors
    /// Fails if the memory is smaller, `offset` is within a page, or `words` is no power of two from
    /// [`WORDS_MIN`] to [`WORDS_MAX`].
    pub fn at(memory: &File, offset: u64, words: usize) -> Result<Self, MemoryError> {
        let is_usable = words.is_power_of_two() && (WORDS_MIN..=WORDS_MAX).contains(&words);
        if !is_usable || Pipe::bytes(words) as u64 > left_after(memory, offset)? {
            return Err(MemoryError::Words(words));
        }
        let mapping = Mapping::new(memory, offset, Pipe::bytes(words))?;
        Ok(Self { mapping, words })
    }

    /// Makes the pipe empty. Neither side may use it meanwhile.
    pub fn clear(&mut self) {
        self.mapping.clear();
    }
}

/// Returns the size of that memory from `offset` on, bytes.
fn left_after(memory: &File, offset: u64) -> Result<u64, MemoryError> {
    let known = memory
        .metadata()
        .map_err(|error| MemoryError::Refused("look at", error))?;
    // A character device reports no size, and refuses a mapping beyond its end.
    let size = if known.file_type().is_char_device() {
        u64::MAX
    } else {
        known.len()
    };
    Ok(size.saturating_sub(offset))
}

/// Returns the number of lines of a ring with that many bytes.
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
    let mapping = Mapping::new(file, offset, Ring::bytes(lines))?;
    Ok(SharedRing { mapping, lines })
}

impl Mapping {
    fn new(file: &impl AsRawFd, offset: u64, bytes: usize) -> Result<Self, MemoryError> {
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
        let at = NonNull::new(at.cast()).expect("mmap gives null only for a fixed address");
        Ok(Self { at, bytes })
    }

    fn clear(&mut self) {
        // SAFETY: the mapping is that large, this side has the only reference in this process, and zero is
        // valid for all that is made of it.
        unsafe { ptr::write_bytes(self.at.as_ptr(), 0, self.bytes) };
    }
}

impl Deref for SharedRing {
    type Target = Ring;

    fn deref(&self) -> &Ring {
        // The length in a ring's pointer is the number of its lines.
        let lines = ptr::slice_from_raw_parts(self.mapping.at.as_ptr().cast::<Line>(), self.lines);
        // SAFETY: mapped, large enough, aligned to a page, any bytes are a ring, and all of it is atomics:
        // that another process writes it at the same time is no data race.
        unsafe { &*(lines as *const Ring) }
    }
}

impl Deref for SharedPipe {
    type Target = Pipe;

    fn deref(&self) -> &Pipe {
        // As for a ring.
        let words = ptr::slice_from_raw_parts(self.mapping.at.as_ptr().cast::<AtomicU64>(), self.words);
        // SAFETY: as of a ring.
        unsafe { &*(words as *const Pipe) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference outlives this value.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}
