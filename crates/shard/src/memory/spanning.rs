//! The memory of a VM that spans cells. Shared memory is a file for each cell's part; every shard maps all of
//! them, each at its place in one mapping per region, and the hardware keeps them coherent. Coherent memory
//! is a [`Replica`].

use std::fs::File;
use std::sync::Arc;

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::replica::Replica;
use super::{GuestRam, MemoryError, advise, bind, check_host, host, map, part_ranges, placement};
use crate::arch::x86_64::layout::Layout;
use crate::launch::{MemoryLaunch, Pages, SpanLaunch};

/// Maps the memory of `layout` for the shard that `span` describes. `files` are those of all parts in order,
/// which all shards map.
pub fn create_shared(
    layout: &Layout,
    launch: &MemoryLaunch,
    span: &SpanLaunch,
    files: &[File],
) -> Result<GuestRam, MemoryError> {
    check_host(launch)?;
    let own = files
        .get(usize::from(span.shard))
        .and_then(|file| file.try_clone().ok())
        .ok_or(MemoryError::Regions)?;
    let own = Arc::new(own);
    let mut regions = Vec::with_capacity(layout.ram.len());
    for range in &layout.ram {
        regions.push(Arc::new(map(&own, range, launch.pages, false)?));
    }
    let memory = GuestMemoryMmap::from_arc_regions(regions).map_err(|_| MemoryError::Regions)?;
    let parts = part_ranges(layout, span.memory.iter().map(|part| part.bytes));
    for ((part, ranges), (shard, file)) in span.memory.iter().zip(parts).zip((0_u8..).zip(files)) {
        for range in ranges {
            if shard != span.shard {
                let at = memory
                    .get_host_address(GuestAddress(range.start))
                    .map_err(|_| MemoryError::Regions)?;
                placement::map_over(at, file, &range).map_err(host("cannot map another cell's memory"))?;
            }
            if !part.host_nodes.is_empty() {
                bind(&memory, &range, &part.host_nodes)?;
            }
        }
    }
    for region in memory.iter() {
        // The mappings over a part receive the same advice as the rest.
        if launch.pages == Pages::Transparent {
            advise(
                region,
                libc::MADV_HUGEPAGE,
                "the host has no transparent huge pages",
            )?;
        }
        advise(
            region,
            libc::MADV_DONTDUMP,
            "cannot keep the guest's memory out of core dumps",
        )?;
        if launch.prefault && span.shard == 0 {
            advise(
                region,
                libc::MADV_POPULATE_WRITE,
                "cannot allocate the guest's memory",
            )?;
        }
    }
    Ok(Arc::new(memory))
}

/// Maps the memory of `layout` for a shard with a replica. It must not be accessed before it is served.
pub fn create_coherent(
    layout: &Layout,
    launch: &MemoryLaunch,
    replica: &Replica,
) -> Result<GuestRam, MemoryError> {
    check_host(launch)?;
    replica.ram(layout)
}
