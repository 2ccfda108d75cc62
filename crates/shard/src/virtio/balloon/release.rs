//! Gives a range of guest memory back to the host.

use std::io;

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};

use super::state::PAGE_BYTES;
use crate::sharing::Mapper;
use crate::virtio::DeviceError;

/// Punches the whole pages inside `start..start + bytes` out of the memory's file; returns how many bytes that was.
///
/// # Errors
/// A range outside the guest's memory is the guest's fault. What the host refuses (a page smaller than its huge page)
/// is no error: the page just stays.
///
/// Pages that stand for an image's (`sharing`) become plain memory again, as a hole: the next touch finds zeroes.
pub fn release(
    memory: &GuestMemoryMmap<()>,
    sharing: Option<&Mapper>,
    start: u64,
    bytes: u64,
) -> Result<u64, DeviceError> {
    let outside = || DeviceError::Protocol(format!("{bytes} bytes at {start:#x} are not all memory"));
    let end = start.checked_add(bytes).ok_or_else(outside)?;
    let region = memory.find_region(GuestAddress(start)).ok_or_else(outside)?;
    let base = region.start_addr().0;
    if end - base > region.len() {
        return Err(outside());
    }
    let first = start.next_multiple_of(PAGE_BYTES);
    let last = end - end % PAGE_BYTES;
    if first >= last {
        return Ok(0);
    }
    let (offset, length) = (first - base, last - first);
    if let Some(sharing) = sharing {
        let done = sharing
            .release(first / PAGE_BYTES..last / PAGE_BYTES)
            .map_err(|source| DeviceError::Host {
                what: "cannot make shared pages plain memory",
                source,
            })?;
        if done {
            return Ok(length);
        }
    }
    let address = region
        .get_host_address(MemoryRegionAddress(offset))
        .map_err(|_| outside())?;
    // Of a file: a hole there, whichever file lies here. Of a mapping alone: zero pages.
    let advice = if region.file_offset().is_some() {
        libc::MADV_REMOVE
    } else {
        libc::MADV_DONTNEED
    };
    // SAFETY: the range is inside one region of guest memory, which nothing in this program holds references into.
    let done = unsafe { libc::madvise(address.cast(), length as usize, advice) == 0 };
    if done {
        return Ok(length);
    }
    let source = io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EBUSY) => Ok(0),
        _ => Err(DeviceError::Host {
            what: "cannot return the guest's memory to the host",
            source,
        }),
    }
}
