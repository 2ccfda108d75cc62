//! Addresses of guest memory in the shard's process, and huge pages that are allocated at the start.
//!
//! KVM maps a huge page into the guest with one nested fault instead of 512. It does so only if the guest's
//! address and the shard's agree in their last 21 bits, and the file already has a huge page.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use page::PAGE_LEN;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

const HUGE_BYTES: u64 = 2 << 20;
/// Advice that collapses pages into a huge page; since Linux 6.1.
const MADV_COLLAPSE: i32 = 25;
/// Bound above the size of any kernel and initramfs. A file that claims more receives small pages for the
/// rest.
const BOOT_BYTES_MAX: u64 = 256 << 20;

/// Maps `range` of the file at an address that agrees with it modulo `align`, which is 2 MiB or 1 GiB. The
/// mapping is never removed: guest memory lives as long as its process.
pub(super) fn map(file: &File, range: &Range<u64>, align: u64, prot: i32, flags: i32) -> io::Result<*mut u8> {
    let bytes = (range.end - range.start) as usize;
    let room = bytes + align as usize;
    // SAFETY: a new mapping at an address that the kernel chooses; nothing existing is touched.
    let reserved = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            room,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if reserved == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let skip = range.start.wrapping_sub(reserved as u64) % align;
    let start = reserved.cast::<u8>().wrapping_add(skip as usize);
    let offset = libc::off_t::try_from(range.start).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `start..start + bytes` lies in the reservation just made, which no other code uses.
    let mapped = unsafe {
        libc::mmap(
            start.cast(),
            bytes,
            prot,
            flags | libc::MAP_FIXED,
            file.as_raw_fd(),
            offset,
        )
    };
    if mapped == libc::MAP_FAILED {
        let error = io::Error::last_os_error();
        // SAFETY: the reservation is used by no other code.
        unsafe { libc::munmap(reserved, room) };
        return Err(error);
    }
    Ok(start)
}

/// Allocates huge pages of guest memory of which `range` covers half or more, if the host can. For memory
/// that is about to be filled: this allocates it. A huge page that is mostly empty costs more memory and time
/// than it saves.
pub fn fill_with_huge_pages(memory: &GuestMemoryMmap<()>, range: Range<u64>) {
    let wanted = range.start..range.end.min(range.start.saturating_add(BOOT_BYTES_MAX));
    // Memory without a file is kept coherent page by page.
    for region in memory.iter().filter(|region| region.file_offset().is_some()) {
        let base = region.start_addr().0;
        let start = (wanted.start.max(base) / HUGE_BYTES * HUGE_BYTES).max(base);
        let end = wanted.end.min(base + region.len());
        let end = end.next_multiple_of(HUGE_BYTES).min(base + region.len());
        let Ok(address) = memory.get_host_address(GuestAddress(start)) else {
            continue;
        };
        for skipped in (0..end.saturating_sub(start)).step_by(HUGE_BYTES as usize) {
            let address = address.wrapping_add(skipped as usize);
            let bytes = HUGE_BYTES.min(end - start - skipped) as usize;
            let page = start + skipped..start + skipped + bytes as u64;
            let taken = wanted
                .end
                .min(page.end)
                .saturating_sub(wanted.start.max(page.start));
            if taken < HUGE_BYTES / 2 {
                continue;
            }
            // SAFETY: these are ranges of one live mapping, and the calls keep their contents. A kernel that
            // can't, or has no huge page left, leaves small pages: then the guest only starts more slowly.
            // The first page must be present, as MADV_COLLAPSE treats an empty range as one that was removed.
            unsafe {
                libc::madvise(address.cast(), PAGE_LEN.min(bytes), libc::MADV_POPULATE_WRITE);
                libc::madvise(address.cast(), bytes, MADV_COLLAPSE);
            }
        }
    }
}

/// Maps `range` of another file over a part of a mapping. The part begins at `at` and has the same offsets.
pub(super) fn map_over(at: *mut u8, file: &File, range: &Range<u64>) -> io::Result<()> {
    let offset = libc::off_t::try_from(range.start).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the caller's mapping of guest memory has this range, and nothing refers into it yet.
    let mapped = unsafe {
        libc::mmap(
            at.cast(),
            (range.end - range.start) as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED,
            file.as_raw_fd(),
            offset,
        )
    };
    if mapped == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
