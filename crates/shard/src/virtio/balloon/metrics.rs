//! Counters of the balloon, and the names of the guest's statistics.

use std::sync::atomic::AtomicU64;

/// Counters since the shard started; relaxed, written by the device's thread, read by any.
#[derive(Debug, Default)]
pub struct BalloonMetrics {
    /// Bytes returned to the host by inflating.
    pub inflated_bytes: AtomicU64,
    /// Bytes returned to the host by free-page reporting.
    pub reported_bytes: AtomicU64,
}

/// Names by tag (Virtio 1.2, section 5.5.6.3).
const STATISTICS: [&str; 10] = [
    "swap_in_bytes",
    "swap_out_bytes",
    "major_faults",
    "minor_faults",
    "free_bytes",
    "total_bytes",
    "available_bytes",
    "disk_cache_bytes",
    "hugetlb_allocations",
    "hugetlb_failures",
];

pub fn statistic_name(tag: u16) -> String {
    STATISTICS
        .get(usize::from(tag))
        .map_or_else(|| format!("tag_{tag}"), |name| (*name).to_owned())
}
