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
fn huge_pages_keep_what_is_there_wherever_they_are_asked_for() {
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
