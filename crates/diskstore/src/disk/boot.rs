//! Boot of the host in which a qcow2 file was first opened for writing.
//!
//! `imago` orders its writes of tables and refcounts, but does not sync the disk between them. A dying
//! process loses none of them, because they are in the page cache. A crash of the host may keep a table and
//! lose the refcount of a cluster that the table names. The next process would take that cluster for free and
//! overwrite flushed data. So the first opening for writing after a boot of the host checks the file; later
//! openings in that boot need no check. On file systems without attributes, each opening checks.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Attribute with the host's boot id.
const RECORD: &CStr = c"user.mirrorball.boot";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Maximum bytes of a record; a boot id has 36.
const RECORD_MAX: usize = 64;

/// Boot id of the running host; none without `/proc`.
pub(super) fn present() -> Option<String> {
    let id = std::fs::read_to_string(BOOT_ID).ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
}

/// Whether a file was opened for writing in this boot of the host.
pub(super) fn is_recorded(file: &File, present: Option<&str>) -> bool {
    present.is_some() && recorded(file).as_deref() == present
}

fn recorded(file: &File) -> Option<String> {
    let mut bytes = [0_u8; RECORD_MAX];
    // SAFETY: the name is a C string, and the buffer is valid for its length.
    let length = unsafe {
        libc::fgetxattr(
            file.as_raw_fd(),
            RECORD.as_ptr(),
            bytes.as_mut_ptr().cast(),
            bytes.len(),
        )
    };
    let length = usize::try_from(length).ok()?;
    String::from_utf8(bytes.get(..length)?.to_vec()).ok()
}

/// Records the current boot of the host, on the disk before anything else is written. Best effort: without
/// attributes the file is checked at each opening.
pub(super) fn record(file: &File, present: Option<&str>) -> io::Result<()> {
    let Some(present) = present else { return Ok(()) };
    // SAFETY: the name is a C string, and the value is valid for its length.
    let set = unsafe {
        libc::fsetxattr(
            file.as_raw_fd(),
            RECORD.as_ptr(),
            present.as_ptr().cast(),
            present.len(),
            0,
        )
    };
    match set {
        0 => file.sync_all(),
        _ => Ok(()),
    }
}
