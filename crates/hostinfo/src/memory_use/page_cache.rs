//! The part of a file that is in the host's page cache.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use page::PAGE_BYTES;

/// Bytes that one `mincore` covers, which returns a byte for each page.
const STEP_BYTES: u64 = 1 << 30;
/// `cachestat(2)`, from Linux 6.5 on.
const SYS_CACHESTAT: libc::c_long = 451;

/// Bytes of `file` in the page cache.
///
/// # Errors
/// For users other than root and the file's owner: to them `mincore` answers that every page is there.
pub fn resident(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    let user = nix::unistd::geteuid();
    if !user.is_root() && metadata.uid() != user.as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    match cachestat(file) {
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::EPERM)
            ) =>
        {
            mincore(file, metadata.len())
        }
        result => result,
    }
}

fn cachestat(file: &File) -> io::Result<u64> {
    #[repr(C)]
    struct Range {
        offset: u64,
        length: u64,
    }
    #[repr(C)]
    #[derive(Default)]
    struct Statistics {
        cached: u64,
        dirty: u64,
        written_back: u64,
        evicted: u64,
        evicted_recently: u64,
    }
    // Length 0: to the end of the file.
    let range = Range { offset: 0, length: 0 };
    let mut found = Statistics::default();
    // SAFETY: both structures are the kernel's and live through the call.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &range, &mut found, 0) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(found.cached * PAGE_BYTES)
}

fn mincore(file: &File, length: u64) -> io::Result<u64> {
    let mut pages = vec![0_u8; (STEP_BYTES.min(length).div_ceil(PAGE_BYTES)) as usize];
    let mut resident = 0;
    let mut offset = 0;
    while offset < length {
        let bytes = STEP_BYTES.min(length - offset) as usize;
        // SAFETY: a new mapping at an address that the kernel chooses; it is never read.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range is the mapping; the vector has a byte for each of its pages.
        let result = unsafe { libc::mincore(start, bytes, pages.as_mut_ptr()) };
        let error = io::Error::last_os_error();
        // SAFETY: our own mapping, not used any more.
        unsafe { libc::munmap(start, bytes) };
        if result != 0 {
            return Err(error);
        }
        let count = (bytes as u64).div_ceil(PAGE_BYTES) as usize;
        resident += pages[..count].iter().filter(|page| **page & 1 == 1).count() as u64 * PAGE_BYTES;
        offset += bytes as u64;
    }
    Ok(resident)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn pages_just_written_are_resident_and_holes_are_not() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 3 * PAGE_BYTES as usize]).unwrap();
        file.set_len(64 << 20).unwrap();
        assert_eq!(resident(&file).unwrap(), 3 * PAGE_BYTES);
        assert_eq!(mincore(&file, 64 << 20).unwrap(), 3 * PAGE_BYTES);
        assert_eq!(mincore(&file, 0).unwrap(), 0);
    }
}
