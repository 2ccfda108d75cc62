//! The memory map that a kernel boots with: addresses of RAM, and addresses that the kernel must not use.

use super::layout::{ACPI_START, ECAM_BYTES, ECAM_START, LEGACY_HOLE_END, LEGACY_HOLE_START, Layout};

/// Kind of an entry of the map. The values are those of both e820 and PVH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    /// Free for use.
    Ram = 1,
    /// In use by the machine.
    Reserved = 2,
}

/// One entry of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryMapEntry {
    /// First address.
    pub start: u64,
    /// Size, bytes.
    pub bytes: u64,
    /// Kind of the range.
    pub kind: MemoryKind,
}

/// Returns the map of `layout` in order of addresses, without overlap.
pub fn memory_map(layout: &Layout) -> Vec<MemoryMapEntry> {
    let entry = |start, end: u64, kind| MemoryMapEntry {
        start,
        bytes: end - start,
        kind,
    };
    let low_end = layout.ram.first().map_or(0, |low| low.end);
    let mut map = vec![
        entry(0, LEGACY_HOLE_START, MemoryKind::Ram),
        entry(ACPI_START, LEGACY_HOLE_END, MemoryKind::Reserved),
        entry(LEGACY_HOLE_END, low_end, MemoryKind::Ram),
        entry(ECAM_START, ECAM_START + ECAM_BYTES, MemoryKind::Reserved),
    ];
    map.extend(
        layout
            .ram
            .iter()
            .skip(1)
            .map(|high| entry(high.start, high.end, MemoryKind::Ram)),
    );
    map
}
