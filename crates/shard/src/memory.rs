//! Guest memory: one file (memfd) per VM with page g at offset g (ARCHITECTURE.md), mapped once per RAM
//! region.
//!
//! [`create`] checks the request against the host's resources and reports which of them is missing.

pub mod nodes;
mod placement;
pub mod replica;
mod spanning;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};

use shard_api::memory::{GuestFileError, guest_file};

use crate::arch::x86_64::layout::Layout;
use crate::launch::{MemoryLaunch, NodeLaunch, Pages};

use nodes::{MemoryNodes, bind};
pub use placement::fill_with_huge_pages;
pub use spanning::{create_coherent, create_shared};

/// The guest's memory as every device sees it. Cheap to clone; the mapping lives as long as the last clone.
pub type GuestRam = Arc<GuestMemoryMmap<()>>;

/// Reason why guest memory can't be created.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The host has too little memory.
    #[error(
        "the VM wants {wanted_mib} MiB of memory, but the host has {host_mib} MiB{which}; make `memory` \
         smaller"
    )]
    TooMuch {
        /// Memory that the VM requests, MiB.
        wanted_mib: u64,
        /// Memory of the host, MiB.
        host_mib: u64,
        /// Which memory of the host is counted, for the error text.
        which: &'static str,
    },
    /// The host's pool of huge pages is too small.
    #[error(
        "the VM wants {wanted} huge pages of {size_kib} KiB, but {free} are free; `echo {enough} \
         >/sys/kernel/mm/hugepages/hugepages-{size_kib}kB/nr_hugepages` adds them, or use `pages = \"4K\"`"
    )]
    HugePages {
        /// Number of huge pages that the VM needs.
        wanted: u64,
        /// Pages that are neither used nor reserved.
        free: u64,
        /// Size that the pool must have, pages.
        enough: u64,
        /// Size of a page, KiB.
        size_kib: u64,
    },
    /// Memory files get no transparent huge pages.
    #[error(
        "this host gives memory files no transparent huge pages; `echo advise >{SHMEM_ENABLED}` lets it, \
         or use `pages = \"4K\"`"
    )]
    NoTransparentPages,
    /// The host refused an operation.
    #[error("{what}")]
    Host {
        /// The refused operation.
        what: &'static str,
        /// Reason of the refusal.
        #[source]
        source: io::Error,
    },
    /// The regions overlap; a bug of the layout.
    #[error("the regions of memory overlap")]
    Regions,
}

/// The host's setting of transparent huge pages in memory files. Most hosts have `never`.
const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Creates the memory of `layout`, with the pages and host nodes of `launch` and `nodes`. With a `frozen`
/// file of another VM's memory it has that file's contents, and shares each page until it is written.
pub fn create(
    layout: &Layout,
    launch: &MemoryLaunch,
    nodes: &[NodeLaunch],
    frozen: Option<File>,
) -> Result<GuestRam, MemoryError> {
    check_host(launch)?;
    let private = frozen.is_some();
    let file = Arc::new(match frozen {
        Some(file) => file,
        None => memory_file(launch.pages, layout.ram_end())?,
    });
    let mut regions = Vec::with_capacity(layout.ram.len());
    for range in &layout.ram {
        regions.push(Arc::new(map(&file, range, launch.pages, private)?));
    }
    let memory = GuestMemoryMmap::from_arc_regions(regions).map_err(|_| MemoryError::Regions)?;
    MemoryNodes::new(launch, nodes).bind(&memory, layout)?;
    if launch.prefault && !private {
        for region in memory.iter() {
            // The pages are present from now on, so that the guest's first access costs a nested fault only.
            advise(
                region,
                libc::MADV_POPULATE_WRITE,
                "cannot allocate the guest's memory",
            )?;
        }
    }
    Ok(Arc::new(memory))
}

/// Returns the guest-physical ranges of memory in parts of these sizes, filled from address 0 in their order.
pub fn part_ranges(layout: &Layout, parts: impl Iterator<Item = u64>) -> Vec<Vec<Range<u64>>> {
    let mut free = layout.ram.iter().cloned();
    let mut current = free.next();
    let mut all = Vec::new();
    for part in parts {
        let mut left = part;
        let mut ranges = Vec::new();
        while left > 0
            && let Some(region) = &mut current
        {
            let bytes = left.min(region.end - region.start);
            if bytes > 0 {
                ranges.push(region.start..region.start + bytes);
            }
            region.start += bytes;
            left -= bytes;
            if region.start == region.end {
                current = free.next();
            }
        }
        all.push(ranges);
    }
    all
}

fn check_host(launch: &MemoryLaunch) -> Result<(), MemoryError> {
    let size_kib = match launch.pages {
        Pages::Huge2M => 2 << 10,
        Pages::Huge1G => 1 << 20,
        Pages::Transparent => {
            let refused = |text: String| text.contains("[never]") || text.contains("[deny]");
            // On a kernel without the file, the advice itself is refused later.
            if std::fs::read_to_string(SHMEM_ENABLED).is_ok_and(refused) {
                return Err(MemoryError::NoTransparentPages);
            }
            return check_meminfo(launch);
        }
        Pages::Small => return check_meminfo(launch),
    };
    // A missing pool has no pages.
    let pool = |name| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-{size_kib}kB/{name}");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or(0)
    };
    let free = pool("free_hugepages").saturating_sub(pool("resv_hugepages"));
    let wanted = launch.bytes.div_ceil(size_kib << 10);
    if wanted > free {
        return Err(MemoryError::HugePages {
            wanted,
            free,
            enough: pool("nr_hugepages") + wanted - free,
            size_kib,
        });
    }
    Ok(())
}

fn check_meminfo(launch: &MemoryLaunch) -> Result<(), MemoryError> {
    let Ok(meminfo) = std::fs::read_to_string("/proc/meminfo") else {
        // Without /proc, the check is left to the host's own refusal.
        return Ok(());
    };
    let (key, which) = if launch.prefault {
        ("MemAvailable:", " available")
    } else {
        ("MemTotal:", " altogether")
    };
    let Some(host_kib) = meminfo_kib(&meminfo, key) else {
        return Ok(());
    };
    // Pages in the paging file need no memory.
    let resident = launch.paging.as_ref().map(|paging| paging.resident_bytes);
    let bytes = launch.bytes.min(resident.unwrap_or(launch.bytes));
    if bytes >> 10 > host_kib {
        let wanted_mib = bytes >> 20;
        return Err(MemoryError::TooMuch {
            wanted_mib,
            host_mib: host_kib >> 10,
            which,
        });
    }
    Ok(())
}

fn meminfo_kib(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn memory_file(pages: Pages, bytes: u64) -> Result<File, MemoryError> {
    guest_file(pages, bytes).map_err(|GuestFileError { what, source }| MemoryError::Host { what, source })
}

fn map(
    file: &Arc<File>,
    range: &Range<u64>,
    pages: Pages,
    private: bool,
) -> Result<GuestRegionMmap<()>, MemoryError> {
    let reserve = match pages {
        Pages::Small | Pages::Transparent => libc::MAP_NORESERVE,
        // The host reserves the pool's pages now. Without that, a page that is missing at the guest's first
        // access would end the VM.
        Pages::Huge2M | Pages::Huge1G => 0,
    };
    let kind = if private {
        libc::MAP_PRIVATE
    } else {
        libc::MAP_SHARED
    };
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, kind | reserve);
    let align = if pages == Pages::Huge1G { 1 << 30 } else { 2 << 20 };
    let what = "cannot map the guest's memory";
    let start = placement::map(file, range, align, prot, flags).map_err(host(what))?;
    let builder = MmapRegionBuilder::new((range.end - range.start) as usize)
        .with_mmap_prot(prot)
        .with_mmap_flags(flags)
        .with_file_offset(FileOffset::from_arc(file.clone(), range.start));
    // SAFETY: a mapping of that size, protection and file, just made, ours alone and never undone.
    let builder = unsafe { builder.with_raw_mmap_pointer(start) };
    let mapping = builder
        .build()
        .map_err(|error| host(what)(io::Error::other(error)))?;
    let region = GuestRegionMmap::new(mapping, GuestAddress(range.start)).ok_or(MemoryError::Regions)?;
    if pages == Pages::Transparent {
        advise(
            &region,
            libc::MADV_HUGEPAGE,
            "the host has no transparent huge pages; use `pages = \"4K\"`",
        )?;
    }
    // A core dump of the shard must not contain its guest's secrets.
    advise(
        &region,
        libc::MADV_DONTDUMP,
        "cannot keep the guest's memory out of core dumps",
    )?;
    Ok(region)
}

fn advise(region: &GuestRegionMmap<()>, advice: i32, what: &'static str) -> Result<(), MemoryError> {
    // SAFETY: the range is exactly one live mapping; the advices used keep its contents.
    let result = unsafe { libc::madvise(region.as_ptr().cast(), region.len() as usize, advice) };
    if result != 0 {
        Err(host(what)(io::Error::last_os_error()))
    } else {
        Ok(())
    }
}

fn host(what: &'static str) -> impl Fn(io::Error) -> MemoryError {
    move |source| MemoryError::Host { what, source }
}
