//! The host's memory as a whole, from `/proc/meminfo` and `/proc/zoneinfo`.

use std::fs;
use std::io;

use page::PAGE_BYTES;

use super::smaps::field;

/// The host's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct HostMemory {
    /// All memory that the kernel can allocate, bytes.
    pub total_bytes: u64,
    /// Memory that nothing uses: `MemFree`, and the free pages on the lists of single CPUs.
    pub free_bytes: u64,
    /// The total without the free memory.
    pub used_bytes: u64,
    /// Page tables of KVM's guests (`SecPageTables`); 0 before Linux 6.1, which does not count them.
    pub kvm_page_tables_bytes: u64,
    /// The kernel's own objects and stacks (`Slab`, `KernelStack`, `Percpu`).
    pub kernel_bytes: u64,
}

impl HostMemory {
    /// Reads the figures of now.
    pub fn now() -> io::Result<Self> {
        let zones = fs::read_to_string("/proc/zoneinfo").unwrap_or_default();
        Ok(Self::of(&fs::read_to_string("/proc/meminfo")?, &zones))
    }

    /// Parses the two texts.
    pub fn of(meminfo: &str, zoneinfo: &str) -> Self {
        let mut host = Self::default();
        for (name, bytes) in meminfo.lines().filter_map(field) {
            match name {
                "MemTotal" => host.total_bytes = bytes,
                "MemFree" => host.free_bytes += bytes,
                "SecPageTables" => host.kvm_page_tables_bytes = bytes,
                "Slab" | "KernelStack" | "Percpu" => host.kernel_bytes += bytes,
                _ => {}
            }
        }
        host.free_bytes += at_hand(zoneinfo);
        host.used_bytes = host.total_bytes.saturating_sub(host.free_bytes);
        host
    }
}

/// Free pages on the lists of single CPUs, which `MemFree` leaves out: `count: N` below each zone's
/// `pagesets`.
fn at_hand(zoneinfo: &str) -> u64 {
    let pages = zoneinfo
        .lines()
        .filter_map(|line| line.trim().strip_prefix("count:")?.trim().parse::<u64>().ok());
    pages.sum::<u64>() * PAGE_BYTES
}
