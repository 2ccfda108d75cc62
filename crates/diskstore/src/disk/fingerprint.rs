//! Fingerprint of a base: size and time of its last write, which detect a changed base.
//!
//! An overlay records its base's fingerprint as an extended attribute when it is made. Best effort: some file
//! systems have no attributes, and an overlay made by another program has none.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Attribute with the fingerprint. A user may remove it (`setfattr -x`) to accept a changed base.
const RECORD: &CStr = c"user.mirrorball.base";
/// Maximum bytes of three numbers and two spaces.
const TEXT_MAX: usize = 64;

/// Size and time of the last write of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fingerprint {
    /// Size in bytes.
    pub bytes: i64,
    written_seconds: i64,
    written_nanoseconds: i64,
}

impl Fingerprint {
    /// Returns the current fingerprint of a file.
    pub fn of(file: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: all zeroes is a value of this plain structure.
        let mut about: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: writes one local structure.
        if unsafe { libc::fstat(file.as_raw_fd(), &mut about) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            bytes: about.st_size,
            written_seconds: about.st_mtime,
            written_nanoseconds: about.st_mtime_nsec,
        })
    }

    /// Records it in an overlay.
    pub fn record(self, overlay: &File) {
        let Self {
            bytes,
            written_seconds,
            written_nanoseconds,
        } = self;
        let text = format!("{bytes} {written_seconds} {written_nanoseconds}");
        // SAFETY: the name is a C string, and the value is valid for its length.
        unsafe {
            libc::fsetxattr(
                overlay.as_raw_fd(),
                RECORD.as_ptr(),
                text.as_ptr().cast(),
                text.len(),
                0,
            );
        }
    }

    /// Returns the fingerprint recorded in an overlay.
    pub fn recorded(overlay: &File) -> Option<Self> {
        let mut text = [0_u8; TEXT_MAX];
        // SAFETY: the name is a C string, and the kernel writes at most the buffer's length.
        let length = unsafe {
            libc::fgetxattr(
                overlay.as_raw_fd(),
                RECORD.as_ptr(),
                text.as_mut_ptr().cast(),
                text.len(),
            )
        };
        let text = std::str::from_utf8(text.get(..usize::try_from(length).ok()?)?).ok()?;
        let numbers: Option<Vec<i64>> = text.split(' ').map(|number| number.parse().ok()).collect();
        match numbers?[..] {
            [bytes, written_seconds, written_nanoseconds] => Some(Self {
                bytes,
                written_seconds,
                written_nanoseconds,
            }),
            _ => None,
        }
    }

    /// Removes the record, so that the overlay accepts any state of its base.
    pub fn forget(overlay: &File) {
        // SAFETY: the name is a C string.
        unsafe { libc::fremovexattr(overlay.as_raw_fd(), RECORD.as_ptr()) };
    }
}
