//! Memory that a monitor creates for shards: files of guest memory, and rings between two shards.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use urpc::host::{MemoryError, SharedRing};

use crate::launch::Pages;
use crate::layout::Layout;

/// Number of messages that a channel between two shards holds: several migrating vCPUs.
pub const RING_LINES: usize = 1024;

/// Reason why a file of guest memory can't be created.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct GuestFileError {
    /// The failed operation.
    pub what: &'static str,
    /// Reason of the failure.
    #[source]
    pub source: io::Error,
}

/// Creates a file for `bytes` of guest memory.
///
/// # Errors
/// Fails if the host has no such memory.
pub fn guest_file(pages: Pages, bytes: u64) -> Result<File, GuestFileError> {
    let failed = |what| move |source| GuestFileError { what, source };
    let huge = match pages {
        Pages::Small | Pages::Transparent => 0,
        Pages::Huge2M => libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
        Pages::Huge1G => libc::MFD_HUGETLB | libc::MFD_HUGE_1GB,
    };
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a valid C string; the call touches no other memory.
    let fd = unsafe { libc::memfd_create(c"guest-memory".as_ptr(), flags | huge) };
    if fd < 0 {
        return Err(failed("cannot make the file of the guest's memory")(
            io::Error::last_os_error(),
        ));
    }
    // SAFETY: memfd_create has just given us this descriptor.
    let file = unsafe { File::from_raw_fd(fd) };
    let page = if pages == Pages::Huge1G { 1 << 30 } else { 2 << 20 };
    file.set_len(bytes.next_multiple_of(page))
        .map_err(failed("cannot size the file of the guest's memory"))?;
    Ok(file)
}

/// Creates the file for one shard's part of the memory of a VM of `ram_bytes`.
///
/// # Errors
/// Fails if the host has no such memory, or the address space has no room for it.
pub fn file_of_shard(pages: Pages, ram_bytes: u64) -> Result<File, GuestFileError> {
    let layout = Layout::new(ram_bytes, &[]).ok_or_else(|| GuestFileError {
        what: "the regions of memory overlap",
        source: io::ErrorKind::InvalidInput.into(),
    })?;
    guest_file(pages, layout.ram_end())
}

/// Creates the memory of one channel between two shards of a host.
///
/// # Errors
/// Fails as [`SharedRing::create`].
pub fn channel() -> Result<OwnedFd, MemoryError> {
    SharedRing::create(RING_LINES).map(|(_, file)| file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_of_a_shard_has_the_holes_of_the_address_space() {
        let gib = 1 << 30;
        let bytes = |ram| {
            let file = file_of_shard(Pages::Small, ram).unwrap();
            file.metadata().unwrap().len()
        };
        assert_eq!(bytes(gib), gib);
        // Memory that does not fit below 3 GiB continues at 4 GiB.
        assert_eq!(bytes(4 * gib), 5 * gib);
    }
}
