//! Reads pages of images that the page cache has, and no others.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::pages::PAGE_BYTES;

/// Appends `pages` pages of a file from page `first` on to `bytes`, as far as the page cache has them.
/// Returns the number of whole pages.
pub(super) fn read_cached(image: &File, first: u64, pages: u64, bytes: &mut Vec<u8>) -> u64 {
    let start = bytes.len();
    bytes.resize(start + (pages * PAGE_BYTES) as usize, 0);
    let room = &mut bytes[start..];
    let vector = libc::iovec {
        iov_base: room.as_mut_ptr().cast(),
        iov_len: room.len(),
    };
    let offset = (first * PAGE_BYTES) as libc::off_t;
    // SAFETY: the vector names a live, exclusive buffer of that length.
    let mut read = unsafe { libc::preadv2(image.as_raw_fd(), &vector, 1, offset, libc::RWF_NOWAIT) };
    if read < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP) {
        // A file system in memory, or one that does not report its cache.
        // SAFETY: as above.
        read = unsafe { libc::pread(image.as_raw_fd(), vector.iov_base, vector.iov_len, offset) };
    }
    let pages = u64::try_from(read).unwrap_or(0) / PAGE_BYTES;
    bytes.truncate(start + (pages * PAGE_BYTES) as usize);
    pages
}
