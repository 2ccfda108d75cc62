//! Formats of disk files, and their detection.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::DiskError;

/// Formats of disk files.
///
/// A file's format is decided in this order:
/// 1. the user's `format = ...`;
/// 2. the format recorded when the file was first written in place as a raw disk (the extended attribute
///    `user.mirrorball.format`, where the file system has attributes);
/// 3. the file's first bytes; a file detected as qcow2 only by them may not refer to other files.
///
/// The guest of a raw disk can write a qcow2 header into it. By rule 2 it stays raw; where nothing can be
/// recorded, rule 3 prevents the header from naming a file of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Raw: the bytes of the disk, in order.
    Raw,
    /// QEMU's copy-on-write format, version 2 or 3.
    Qcow2,
    /// Mirrorball's temporary overlay: blocks at their own offsets in a sparse file, followed by a bitmap of
    /// the present blocks. It never has a name in the file system.
    Scratch,
}

const RECORD: &CStr = c"user.mirrorball.format";

/// A file's format and its trust.
pub(super) struct Known {
    pub format: Format,
    /// Whether the format was stated or recorded, not guessed from bytes that a guest may have written.
    pub trusted: bool,
}

/// Decides the format of an open file.
pub(super) fn decide(path: &Path, file: &File, said: Option<Format>) -> Result<Known, DiskError> {
    if let Some(format) = said {
        return Ok(Known {
            format,
            trusted: true,
        });
    }
    if recorded_raw(file) {
        return Ok(Known {
            format: Format::Raw,
            trusted: true,
        });
    }
    let mut start = [0; 8];
    let read = file
        .read_at(&mut start, 0)
        .map_err(DiskError::io(path, "reading it"))?;
    let foreign = |found| {
        Err(DiskError::ForeignFormat {
            path: path.to_owned(),
            found,
        })
    };
    match &start[..read] {
        bytes if bytes.starts_with(b"QFI\xfb") => Ok(Known {
            format: Format::Qcow2,
            trusted: false,
        }),
        bytes if bytes.starts_with(b"KDMV") || bytes.starts_with(b"COWD") => foreign("VMDK"),
        bytes if bytes.starts_with(b"vhdxfile") => foreign("VHDX"),
        bytes if bytes.starts_with(b"conectix") => foreign("VHD"),
        bytes if bytes.starts_with(b"<<< ") => foreign("VDI"),
        _ => Ok(Known {
            format: Format::Raw,
            trusted: false,
        }),
    }
}

/// Records that `file` is a raw disk that a guest writes. Best effort: some file systems have no attributes.
pub(super) fn record_raw(file: &File) {
    let value = b"raw";
    // SAFETY: the name is a C string, and the value is valid for its length.
    unsafe {
        libc::fsetxattr(
            file.as_raw_fd(),
            RECORD.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        );
    }
}

/// Copies the recorded format of a disk to its copy.
pub fn inherit_format(original: &File, copy: &File) {
    if recorded_raw(original) {
        record_raw(copy);
    }
}

fn recorded_raw(file: &File) -> bool {
    let mut value = [0_u8; 8];
    // SAFETY: the name is a C string, and the kernel writes at most the buffer's length.
    let length = unsafe {
        libc::fgetxattr(
            file.as_raw_fd(),
            RECORD.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    length == 3 && &value[..3] == b"raw"
}

/// Length of an open file or block device, in bytes.
pub(super) fn length(file: &File) -> io::Result<u64> {
    // SAFETY: lseek touches no memory; no code uses the offset of the file.
    let end = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_END) };
    u64::try_from(end).map_err(|_| io::Error::last_os_error())
}
