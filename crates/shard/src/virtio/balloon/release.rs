//! Releases ranges of guest memory to the host.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MemoryRegionAddress,
};

use super::state::UNIT_BYTES;
use crate::kind::VmKind;
use crate::memory::replica::Coherence;
use crate::paging::Paging;
use crate::sharing::Mapper;
use crate::virtio::DeviceError;

/// Participant in the release of a plain VM's pages.
#[derive(Clone)]
pub enum PlainRelease {
    /// No participant: no page maps a file or has a slot, so a range is released whole.
    Whole,
    /// The map of shared pages, where pages map an image.
    Shared(Arc<Mapper>),
    /// The pager, which has slots of pages.
    Paged(Arc<Paging>),
}

/// Release of guest memory, by kind of VM. With replicas of the memory in other shards all of them take part,
/// since no page is this shard's alone.
#[derive(Clone)]
pub struct Release(pub VmKind<PlainRelease, (), &'static Coherence>);

impl Release {
    /// Releases the whole pages inside ranges, each an address and a length in bytes. Returns the number of
    /// bytes.
    ///
    /// # Errors
    /// Fails as [`release`].
    pub fn ranges(
        &self,
        memory: &GuestMemoryMmap<()>,
        mut ranges: impl Iterator<Item = (u64, u64)>,
    ) -> Result<u64, DeviceError> {
        let sharing = match &self.0 {
            VmKind::Plain(PlainRelease::Shared(sharing)) => Some(&**sharing),
            VmKind::Plain(PlainRelease::Paged(paging)) => return drop_pages(paging, memory, ranges),
            VmKind::Plain(PlainRelease::Whole) | VmKind::SharedSpan(()) => None,
            VmKind::CoherentSpan((), coherence) => return give_back(coherence, memory, ranges),
        };
        ranges.try_fold(0, |all, (start, bytes)| {
            Ok(all + release(memory, sharing, start, bytes)?)
        })
    }
}

/// Releases the whole pages inside ranges in all shards.
fn give_back(
    coherence: &Coherence,
    memory: &GuestMemoryMmap<()>,
    ranges: impl Iterator<Item = (u64, u64)>,
) -> Result<u64, DeviceError> {
    let mut pages = Vec::new();
    for (start, bytes) in ranges {
        let (_, whole) = whole_pages(memory, start, bytes)?;
        let number = |address: u64| u32::try_from(address / UNIT_BYTES).unwrap_or(u32::MAX);
        pages.push(number(whole.start)..number(whole.end));
    }
    Ok(coherence.give_back(pages) * UNIT_BYTES)
}

/// Releases the whole pages inside ranges, in memory or paged out.
fn drop_pages(
    paging: &Paging,
    memory: &GuestMemoryMmap<()>,
    ranges: impl Iterator<Item = (u64, u64)>,
) -> Result<u64, DeviceError> {
    let mut all = 0;
    for (start, bytes) in ranges {
        let (_, whole) = whole_pages(memory, start, bytes)?;
        let number = |address: u64| u32::try_from(address / UNIT_BYTES).unwrap_or(u32::MAX);
        let released = paging.release(number(whole.start)..number(whole.end));
        released.map_err(|source| DeviceError::Host {
            what: "cannot return the guest's memory to the host",
            source,
        })?;
        all += whole.end - whole.start;
    }
    Ok(all)
}

/// Returns the region of a range, and the whole pages inside the range; the end equals the start if there are
/// none.
fn whole_pages(
    memory: &GuestMemoryMmap<()>,
    start: u64,
    bytes: u64,
) -> Result<(&GuestRegionMmap<()>, Range<u64>), DeviceError> {
    let outside = || DeviceError::Protocol(format!("{bytes} bytes at {start:#x} are not all memory"));
    let end = start.checked_add(bytes).ok_or_else(outside)?;
    let region = memory.find_region(GuestAddress(start)).ok_or_else(outside)?;
    if end - region.start_addr().0 > region.len() {
        return Err(outside());
    }
    let first = start.next_multiple_of(UNIT_BYTES);
    let last = end - end % UNIT_BYTES;
    Ok((region, first..last.max(first)))
}

/// Punches the whole pages inside `start..start + bytes` out of the memory's file. Returns the number of
/// bytes.
///
/// # Errors
/// A range outside the guest's memory is the guest's error. A refusal by the host (a page smaller than its
/// huge page) is no error: the page stays.
///
/// Pages that map an image (`sharing`) become plain memory again, as a hole: the next access finds zeroes.
pub fn release(
    memory: &GuestMemoryMmap<()>,
    sharing: Option<&Mapper>,
    start: u64,
    bytes: u64,
) -> Result<u64, DeviceError> {
    let (region, whole) = whole_pages(memory, start, bytes)?;
    if whole.is_empty() {
        return Ok(0);
    }
    let Range {
        start: first,
        end: last,
    } = whole;
    let (offset, length) = (first - region.start_addr().0, last - first);
    if let Some(sharing) = sharing {
        let done = sharing
            .release(first / UNIT_BYTES..last / UNIT_BYTES)
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
        .map_err(|_| DeviceError::Protocol(format!("{bytes} bytes at {start:#x} are not all memory")))?;
    // Of a file: punches a hole, whichever file is mapped here. Of a mapping alone: zero pages.
    let advice = if region.file_offset().is_some() {
        libc::MADV_REMOVE
    } else {
        libc::MADV_DONTNEED
    };
    // SAFETY: the range is inside one region of guest memory, which nothing in this program holds references
    // into.
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
