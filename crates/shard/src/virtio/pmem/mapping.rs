//! The file's mapping in this process.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use page::PAGE_BYTES;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestRegionMmap};

use crate::memory::GuestRam;

/// Size unit of the guest's persistent memory, bytes.
const ALIGN: u64 = 2 << 20;

/// Effect of the guest's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// Writes go to the file, which is open for writing.
    Kept,
    /// Writes are visible to the VM but do not reach the file.
    Private,
    /// Writes of the vCPUs have no effect.
    Refused,
    /// Nothing in this process can write: the file is open for reading, and mapped shared and read-only.
    /// Other processes may write it, and the VM sees their writes.
    ReadOnly,
}

/// Parameters of KVM's memory slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmemRegion {
    /// Guest-physical address.
    pub guest: u64,
    /// Size in bytes, a multiple of 2 MiB.
    pub bytes: u64,
    /// Address in this process; mapped until the process ends.
    pub host: u64,
    /// Whether writes of the vCPUs have no effect.
    pub read_only: bool,
}

impl PmemRegion {
    /// Returns `memory` with this region, for devices: a driver may have them read and write persistent
    /// memory too (direct I/O between two disks).
    pub fn join(&self, memory: &GuestRam) -> io::Result<GuestRam> {
        let length = usize::try_from(self.bytes).map_err(io::Error::other)?;
        let builder = MmapRegionBuilder::new(length)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: `host` is a mapping of that size and is never undone.
        let mapping = unsafe { builder.with_raw_mmap_pointer(self.host as *mut u8) }
            .build()
            .map_err(io::Error::other)?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(self.guest))
            .ok_or_else(|| io::Error::other("persistent memory does not fit in the address space"))?;
        let joined = memory.insert_region(Arc::new(region)).map_err(io::Error::other)?;
        Ok(Arc::new(joined))
    }
}

/// Returns the size of the region for a file of `file_bytes`.
pub fn region_bytes(file_bytes: u64) -> Option<u64> {
    file_bytes.max(1).checked_next_multiple_of(ALIGN)
}

/// Maps `file` for the guest address `guest`. Memory past the file's last page is plain zero memory.
///
/// Where writes are refused, the vCPUs can't write. A driver that has another device write here changes this
/// VM's private copy, as a read-only mapping would end the process. So a region that is mapped read-only
/// must not be joined to the memory of devices ([`PmemRegion::join`]).
///
/// The mapping is never removed: KVM refers to it as long as the VM exists, which is until the process ends.
pub fn map(file: &File, guest: u64, writes: Writes) -> io::Result<PmemRegion> {
    let file_bytes = file.metadata()?.len();
    let bytes = region_bytes(file_bytes).ok_or_else(|| io::Error::other("the file is too large"))?;
    let protection = match writes {
        Writes::ReadOnly => libc::PROT_READ,
        Writes::Kept | Writes::Private | Writes::Refused => libc::PROT_READ | libc::PROT_WRITE,
    };
    let length = usize::try_from(bytes + ALIGN).map_err(io::Error::other)?;
    let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses; nothing else is touched.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, reserve, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // Aligned as the guest address is, so that huge pages fit.
    let host = (start as u64).next_multiple_of(ALIGN);
    let mapped = file_bytes.next_multiple_of(PAGE_BYTES);
    if mapped > 0 {
        let sharing = match writes {
            Writes::Kept | Writes::ReadOnly => libc::MAP_SHARED,
            Writes::Private | Writes::Refused => libc::MAP_PRIVATE | libc::MAP_NORESERVE,
        };
        // SAFETY: replaces a part of the mapping just made, to which no reference exists yet.
        let result = unsafe {
            libc::mmap(
                host as *mut libc::c_void,
                mapped as usize,
                protection,
                sharing | libc::MAP_FIXED,
                file.as_raw_fd(),
                0,
            )
        };
        if result == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(PmemRegion {
        guest,
        bytes,
        host,
        read_only: matches!(writes, Writes::Refused | Writes::ReadOnly),
    })
}
