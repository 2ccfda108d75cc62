//! A VM's memory as the pager uses it: the file of the memory, and its mapping for the guest.
//!
//! Page g is at offset g of the file. The pager reads pages by the file and never by the mapping: a thread
//! that answers faults must not cause one.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use dsm::PAGE_LEN;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::memory::GuestRam;

/// A region of memory in this process.
#[derive(Debug)]
struct Region {
    /// Address of its first page.
    host: usize,
    /// Its guest pages.
    pages: Range<u32>,
}

/// The pages of a VM's memory.
pub struct GuestPages {
    regions: Vec<Region>,
    file: File,
    /// Keeps the mappings.
    _memory: GuestRam,
}

impl GuestPages {
    /// Uses the memory of a plain VM, which is one file that is mapped as shared.
    ///
    /// # Errors
    /// If it is not, or the host refuses to keep its pages small.
    pub fn new(memory: &GuestRam) -> io::Result<Self> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
        let mut regions = Vec::new();
        let mut first = None;
        for region in memory.iter() {
            let file = region.file_offset().ok_or_else(wrong)?;
            if file.start() != region.start_addr().0 {
                return Err(wrong());
            }
            first.get_or_insert(file.file().try_clone()?);
            let page = |address: u64| u32::try_from(address / PAGE_LEN as u64).map_err(|_| wrong());
            let start = region.start_addr().0;
            let host = region.as_ptr();
            // SAFETY: a live mapping of that length; only the size of its pages changes. Kernels without huge
            // pages refuse, which is as good.
            unsafe { libc::madvise(host.cast(), region.len() as usize, libc::MADV_NOHUGEPAGE) };
            regions.push(Region {
                host: host as usize,
                pages: page(start)?..page(start + region.len())?,
            });
        }
        Ok(Self {
            regions,
            file: first.ok_or_else(wrong)?,
            _memory: memory.clone(),
        })
    }

    /// Returns the number of pages up to the end of memory, holes of the address space included.
    pub fn end(&self) -> u32 {
        self.regions.last().map_or(0, |region| region.pages.end)
    }

    /// Returns the number of pages of memory.
    pub fn count(&self) -> u32 {
        self.regions.iter().map(|region| region.pages.len() as u32).sum()
    }

    /// Returns the addresses of all regions.
    pub fn addresses(&self) -> impl Iterator<Item = Range<usize>> {
        let end = |region: &Region| region.host + region.pages.len() * PAGE_LEN;
        self.regions.iter().map(move |region| region.host..end(region))
    }

    /// Returns the page at an address.
    pub fn page_at(&self, address: usize) -> Option<u32> {
        self.regions.iter().find_map(|region| {
            let index = address.checked_sub(region.host)? / PAGE_LEN;
            (index < region.pages.len()).then(|| region.pages.start + index as u32)
        })
    }

    /// Returns the page at an address, and the number of pages of its region from there on.
    pub fn pages_from(&self, address: u64) -> Option<(u64, u64)> {
        let page = self.page_at(usize::try_from(address).ok()?)?;
        let region = self.regions.iter().find(|region| region.pages.contains(&page))?;
        Some((page.into(), u64::from(region.pages.end - page)))
    }

    /// Returns the address of a page.
    pub fn address(&self, page: u32) -> Option<usize> {
        let region = self.regions.iter().find(|region| region.pages.contains(&page))?;
        Some(region.host + (page - region.pages.start) as usize * PAGE_LEN)
    }

    /// Returns the pages that the memory's file has.
    ///
    /// # Errors
    /// If the host does not report them.
    pub fn present(&self) -> io::Result<Vec<Range<u32>>> {
        let mut present = Vec::new();
        let seek = |at: u32, whence| {
            // SAFETY: takes no pointers. No other code uses the file's position.
            let at = unsafe { libc::lseek(self.file.as_raw_fd(), offset_of(at), whence) };
            match at {
                0.. => Ok(Some((at / PAGE_LEN as i64) as u32)),
                _ => match io::Error::last_os_error() {
                    error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
                    error => Err(error),
                },
            }
        };
        let mut at = 0;
        while let Some(start) = seek(at, libc::SEEK_DATA)? {
            at = seek(start, libc::SEEK_HOLE)?.unwrap_or(self.end()).max(start + 1);
            for region in &self.regions {
                let run = start.max(region.pages.start)..at.min(region.pages.end);
                if !run.is_empty() {
                    present.push(run);
                }
            }
        }
        Ok(present)
    }

    /// Unmaps pages; they stay in the file. On return no thread and no vCPU has access without a fault.
    ///
    /// # Errors
    /// The host's error.
    pub fn unmap(&self, pages: Range<u32>) -> io::Result<()> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
        let at = self.address(pages.start).ok_or_else(wrong)?;
        // SAFETY: a range of guest memory, which is a shared mapping of a file: no content is lost, and Rust
        // has no reference into it.
        let result = unsafe {
            libc::madvise(
                at as *mut libc::c_void,
                pages.len() * PAGE_LEN,
                libc::MADV_DONTNEED,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Reads a page by the file.
    ///
    /// # Errors
    /// The host's error.
    pub fn read(&self, page: u32, bytes: &mut [u8; PAGE_LEN]) -> io::Result<()> {
        self.file.read_exact_at(bytes, u64::from(page) * PAGE_LEN as u64)
    }

    /// Puts a page into the file, unmapped: the next access is a minor fault. The caller holds the lock, and
    /// the file does not have the page.
    ///
    /// # Errors
    /// The host's error.
    pub fn write(&self, page: u32, bytes: &[u8; PAGE_LEN]) -> io::Result<()> {
        self.file.write_all_at(bytes, u64::from(page) * PAGE_LEN as u64)
    }

    /// Removes pages from memory: the next access finds a page that is missing.
    ///
    /// # Errors
    /// The host's error.
    pub fn punch(&self, pages: Range<u32>) -> io::Result<()> {
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (at, bytes) = (offset_of(pages.start), pages.len() as i64 * PAGE_LEN as i64);
        // SAFETY: takes no pointers.
        let result = unsafe { libc::fallocate(self.file.as_raw_fd(), flags, at, bytes) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

fn offset_of(page: u32) -> libc::off_t {
    libc::off_t::from(page) * PAGE_LEN as libc::off_t
}

/// Calls `each` with the runs of successive numbers in a sorted list.
///
/// # Errors
/// The first error of `each`.
pub fn for_runs<E>(sorted: &[u32], mut each: impl FnMut(Range<u32>) -> Result<(), E>) -> Result<(), E> {
    sorted
        .chunk_by(|before, after| before + 1 == *after)
        .try_for_each(|run| each(run[0]..run[run.len() - 1] + 1))
}
