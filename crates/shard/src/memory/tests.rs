use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::{GuestRam, create, fill_with_huge_pages};
use crate::arch::x86_64::layout::Layout;
use crate::launch::{MemoryLaunch, Pages};

fn memory(bytes: u64) -> GuestRam {
    let launch = MemoryLaunch {
        bytes,
        pages: Pages::Small,
        prefault: false,
        host_nodes: Vec::new(),
        homes: Vec::new(),
        paging: None,
        scan: false,
    };
    create(&Layout::new(bytes, &[]).unwrap(), &launch, &[], None).unwrap()
}

#[test]
fn every_region_can_be_mapped_in_huge_pages() {
    for region in memory((3 << 30) + (64 << 20)).iter() {
        let apart = (region.as_ptr() as u64).wrapping_sub(region.start_addr().0);
        assert_eq!(apart % (2 << 20), 0);
    }
}

#[test]
fn huge_pages_keep_the_contents_at_any_range() {
    let memory = memory(64 << 20);
    let places = [0, 4096, (2 << 20) - 8, 5 << 20, (64 << 20) - 8].map(GuestAddress);
    for place in places {
        memory.write_obj(place.0 ^ 0x5a5a, place).unwrap();
    }
    for range in [
        4096..8192,
        (5 << 20)..(5 << 20),
        (63 << 20)..u64::MAX,
        u64::MAX - 1..u64::MAX,
        0..64 << 20,
    ] {
        fill_with_huge_pages(&memory, range);
    }
    for place in places {
        assert_eq!(memory.read_obj::<u64>(place).unwrap(), place.0 ^ 0x5a5a);
    }
}

#[test]
fn huge_page_is_allocated_only_where_half_of_it_is_to_be_filled() {
    use std::os::unix::fs::MetadataExt;
    let memory = memory(64 << 20);
    let allocated = || {
        let regions = memory.iter().filter_map(|region| region.file_offset());
        regions
            .map(|offset| offset.file().metadata().unwrap().blocks() * 512)
            .sum::<u64>()
    };
    // A small program, and the ends of two adjacent pages.
    fill_with_huge_pages(&memory, (1 << 20)..(1 << 20) + 4096);
    fill_with_huge_pages(&memory, (4 << 20) - 8192..(4 << 20) + 8192);
    assert_eq!(allocated(), 0);
    // A mapped page is present at least, with or without a huge page of the host.
    fill_with_huge_pages(&memory, (8 << 20)..(11 << 20));
    assert!(allocated() > 0);
}
