//! Memory that Linux fills as it starts, which is put in huge pages before.
//!
//! In small pages, each page of 4 KiB costs a fault at its first access. Two places are filled in any start:
//!
//! - Page structs: 64 bytes for each page, for whole sections of 128 MiB. Linux takes them in one piece from
//!   the end of memory, aligned to 2 MiB (`sparse_buffer_init` in `mm/sparse.c`), and writes all of them.
//! - The memory behind the kernel. The lists of free pages have the lowest addresses first, so objects of the
//!   kernel lie there, which it rarely frees and which are on no disk's image. The first whole block of 4 MiB
//!   is left out: Linux 6.1 takes it for objects that can be reclaimed, and fills an eighth of it in an idle
//!   VM.
//!
//! A place that is predicted wrongly costs memory until the guest fills it.

use std::ops::Range;

/// Memory for which the structs are one block.
const SECTION_BYTES: u64 = 128 << 20;
const BLOCK_BYTES: u64 = 2 << 20;
/// Bound above what Linux takes from the end of memory before the page structs: `pglist_data` (172 KB in
/// 6.1), page tables, and the map of sections.
const EARLIER_BYTES: u64 = 256 << 10;
/// Largest block of free pages of Linux 6.1.
const LARGEST_BYTES: u64 = 4 << 20;
/// End of the memory behind the kernel that is predicted to be filled, from the kernel's end on: 16 MiB, or
/// an eighth of a small VM's memory.
const KERNEL_OBJECTS_BYTES: u64 = 16 << 20;
const KERNEL_OBJECTS_SHARE: u64 = 8;

/// Returns the predicted place of the page structs in the memory `ram`, of which the initramfs `initrd` has a
/// part. The range is empty if there is no room.
pub fn page_structs(ram: &[Range<u64>], initrd: &Range<u64>) -> Range<u64> {
    let Some(last) = ram.last() else {
        return 0..0;
    };
    let bytes = sections(ram).saturating_mul(BLOCK_BYTES);
    let has_initrd = last.contains(&initrd.start) && !initrd.is_empty();
    let top = if has_initrd { initrd.start } else { last.end };
    let end = top.saturating_sub(EARLIER_BYTES) / BLOCK_BYTES * BLOCK_BYTES;
    match end.checked_sub(bytes) {
        Some(start) if start >= last.start => start..end,
        _ => 0..0,
    }
}

/// Returns the memory behind the kernel, which ends at `kernel_end`, that is predicted to be filled: before
/// and behind the first block of the largest size. With memory above 4 GiB the ranges are empty, as Linux
/// fills that first.
pub fn kernel_objects(ram: &[Range<u64>], kernel_end: u64, page_structs: &Range<u64>) -> [Range<u64>; 2] {
    let [only] = ram else {
        return [0..0, 0..0];
    };
    // The header of a bzImage may claim any end.
    let start = kernel_end.min(only.end).next_multiple_of(BLOCK_BYTES);
    let bytes = KERNEL_OBJECTS_BYTES.min((only.end - only.start) / KERNEL_OBJECTS_SHARE);
    let end = start.saturating_add(bytes).min(page_structs.start) / BLOCK_BYTES * BLOCK_BYTES;
    let left_out = start.next_multiple_of(LARGEST_BYTES);
    let next = left_out.saturating_add(LARGEST_BYTES);
    [start..left_out.min(end).max(start), next..end.max(next)]
}

/// Returns the number of sections with memory. The ranges are in order.
fn sections(ram: &[Range<u64>]) -> u64 {
    let mut next = 0;
    let mut count = 0;
    for range in ram.iter().filter(|range| !range.is_empty()) {
        let first = (range.start / SECTION_BYTES).max(next);
        next = range.end.div_ceil(SECTION_BYTES).max(next);
        count += next - first;
    }
    count
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arch::x86_64::layout::Layout;

    const MIB: u64 = 1 << 20;

    fn ram(mib: u64) -> Vec<Range<u64>> {
        Layout::new(mib * MIB, &[]).unwrap().ram
    }

    /// The places that Linux 6.1 chose in VMs of the image `tiny` with 128 and 256 MiB, whose initramfs has
    /// 6.2 MB and begins 56 KiB above a block.
    #[test]
    fn page_structs_of_linux_are_found_below_the_initramfs() {
        let of = |mib: u64, initrd| page_structs(&ram(mib), &initrd);
        assert_eq!(of(128, 0x7a0_e000..128 * MIB), 118 * MIB..120 * MIB);
        assert_eq!(of(256, 0xfa0_e000..256 * MIB), 244 * MIB..248 * MIB);
        // Without an initramfs, and with one in other memory than the last.
        assert_eq!(of(256, 0..0), 250 * MIB..254 * MIB);
        let all = ram(5120);
        let top = all[1].end;
        assert_eq!(
            of(5120, all[0].end - 6 * MIB..all[0].end),
            top - 82 * MIB..top - 2 * MIB
        );
        // A bound above all that fits.
        assert_eq!(page_structs(std::slice::from_ref(&(0..MIB)), &(0..0)), 0..0);
    }

    #[test]
    fn kernel_objects_are_a_part_of_small_memory_behind_the_kernel() {
        let of = |mib: u64, kernel_end| {
            let ram = ram(mib);
            kernel_objects(&ram, kernel_end, &page_structs(&ram, &(0..0)))
        };
        assert_eq!(of(128, 61 * MIB), [62 * MIB..64 * MIB, 68 * MIB..78 * MIB]);
        assert_eq!(of(96, 64 * MIB), [64 * MIB..64 * MIB, 68 * MIB..76 * MIB]);
        assert_eq!(of(5120, 62 * MIB), [0..0, 0..0]);
        assert!(of(128, u64::MAX).iter().all(Range::is_empty));
    }

    proptest! {
        #[test]
        fn places_lie_in_memory_apart_from_one_another(
            mib in 32u64..100_000,
            initrd_mib in 0u64..32,
            kernel_mib in 0u64..300,
        ) {
            let ram = ram(mib);
            let low_end = ram[0].end;
            let initrd = low_end - initrd_mib * MIB..low_end;
            let structs = page_structs(&ram, &initrd);
            let objects = kernel_objects(&ram, kernel_mib * MIB, &structs);
            for place in [&structs, &objects[0], &objects[1]] {
                prop_assert!(place.start <= place.end);
                prop_assert_eq!((place.start % BLOCK_BYTES, place.end % BLOCK_BYTES), (0, 0));
                if !place.is_empty() {
                    let is_in = |range: &Range<u64>| range.start <= place.start && place.end <= range.end;
                    prop_assert!(ram.iter().any(is_in));
                    prop_assert!(place.end <= initrd.start || place.start >= initrd.end);
                }
            }
            prop_assert!(structs.is_empty() || (structs.end - structs.start) * 64 >= mib * MIB);
            for place in objects.iter().filter(|place| !place.is_empty()) {
                prop_assert!(place.start >= kernel_mib * MIB && place.end <= structs.start);
            }
        }
    }
}
