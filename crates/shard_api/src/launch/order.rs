//! Orders of a monitor to a running shard, and the shard's reports.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use urpc::version::Versions;

use super::{DiskLimits, Ending};
#[cfg(doc)]
use super::{LaunchSpec, MappedFile, TscLaunch};
use crate::page_map::PageMapPart;

/// Longest stop of one vCPU by one order, milliseconds.
pub const VCPU_STOP_MS_MAX: u16 = 100;
/// Longest stop of one vCPU with all renewals, before it has to run. Linux reports a hard lockup 10 s after
/// a CPU's last timer tick, and a soft lockup or a stall of RCU later (`kernel/watchdog.c`); this is half.
pub const VCPU_STOP_TOTAL_MAX: Duration = Duration::from_secs(5);

/// Greatest number of files that come with a report.
pub const STATISTICS_FILES_MAX: usize = 64;

/// The number of an order.
///
/// Numbers grow. A shard refuses an order of an older incarnation, and an order with a lower number than the
/// last one. If the last order is repeated, the shard only repeats the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OrderId {
    /// Incarnation of the monitor process that gives orders; a successor's is greater.
    pub incarnation: u64,
    /// Number of the order among those of its process.
    pub request: u64,
}

/// An order as it is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NumberedOrder {
    /// The order's number.
    pub id: OrderId,
    /// Action that the shard takes.
    pub order: Order,
}

/// Order of the monitor to a running shard. The shard answers with a [`Report::Answer`], except to
/// [`Order::Reset`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Press the ACPI power button.
    PowerButton,
    /// Set the balloon's size.
    Balloon {
        /// Bytes that the guest should release.
        bytes: u64,
    },
    /// Report counters and sizes. Answered by [`Answer::Status`].
    Status,
    /// Pass the files of KVM's statistics of up to [`STATISTICS_FILES_MAX`] vCPUs (KVM_GET_STATS_FD), as this
    /// shard's KVM counts them. Answered by [`Answer::VcpuStatistics`].
    VcpuStatistics {
        /// Number of the first of these vCPUs.
        first: u8,
    },
    /// Move a vCPU of a VM that spans cells. Only the home takes this order. Answered by
    /// [`Answer::Moved`].
    Move {
        /// Number of the vCPU.
        vcpu: u8,
        /// Number of the destination shard.
        shard: u8,
    },
    /// Step the guest's time-stamp counter (TSC) forward. For a VM over several hosts.
    Step {
        /// New [`TscLaunch::offset`], guest TSC ticks; greater than the offset so far.
        offset: u64,
    },
    /// Update whether other VMs may map the files of [`LaunchSpec::mapped`].
    Shared {
        /// [`MappedFile::is_shared`] of each file, in the order of [`LaunchSpec::mapped`].
        files: Vec<bool>,
    },
    /// Bind all guest memory to these NUMA nodes of the host, and move pages from `from` on that lie
    /// elsewhere, for a bounded time. Refused for a VM that spans cells. Answered by [`Answer::MemoryMoved`].
    MemoryNodes {
        /// Numbers of the nodes; when empty, the memory is bound to none, and nothing moves.
        nodes: Vec<u32>,
        /// Guest-physical address, a multiple of the page size.
        from: u64,
    },
    /// Report the origin of the VM's pages. Refused for memory that shares no pages: of a VM that spans cells
    /// or is paged, or in huge pages of the host's pool. Answered by [`Answer::PageMap`].
    PageMap {
        /// Number of the first page.
        from: u64,
    },
    /// Set the limit of guest memory in the host's memory. Refused for a VM without
    /// [`PagingLaunch`](super::PagingLaunch).
    Resident {
        /// Bytes, 16 MiB at least.
        bytes: u64,
    },
    /// Set the limits of requests to all disks. Refused if a disk that is limited has no requests.
    LimitDisks(DiskLimits),
    /// Pause the shard until [`Order::Resume`]: no vCPU runs and no device works. A VM that spans cells is
    /// paused when all its shards are, the home last; they serve each other's packets and pages meanwhile.
    Pause,
    /// Resume the shard after [`Order::Pause`]. Changes nothing if it runs.
    Resume,
    /// Stop one vCPU until `for_ms` from now, or renew its stop. It goes on by itself at the deadline.
    /// Refused beyond [`VCPU_STOP_MS_MAX`] or [`VCPU_STOP_TOTAL_MAX`], and by a shard that the vCPU is not
    /// in. A vCPU that leaves its shard goes on.
    StopVcpu {
        /// Number of the vCPU.
        vcpu: u8,
        /// Length of the stop, milliseconds.
        for_ms: u16,
    },
    /// End an [`Order::StopVcpu`] before its deadline. Refused by a shard that the vCPU is not in.
    ContinueVcpu {
        /// Number of the vCPU.
        vcpu: u8,
    },
    /// Send a non-maskable interrupt to each vCPU. Only the home takes this order.
    Nmi,
    /// Reset the VM, as a machine's reset button does. Answered by [`Report::Ended`] with [`Ending::Reboot`].
    Reset,
    /// Stop the vCPUs, flush the disks, and end the shard. A shard of version 2 acknowledges the order at
    /// once with [`Answer::Done`], even while it performs another order or flushes the disks.
    /// [`Report::Ended`] follows.
    Quit,
}

/// Report of a shard to its monitor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Report {
    /// The sandbox is closed and the vCPUs are about to run.
    Running {
        /// Layers of the sandbox that could not be applied, one per line.
        sandbox_missing: Vec<String>,
        /// Optional layers that are missing, one per line.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sandbox_notes: Vec<String>,
        /// The versions of the shard's program; the first if the report has none.
        #[serde(default)]
        versions: Versions,
    },
    /// The answer to an order.
    Answer {
        /// Number of the order.
        to: OrderId,
        /// Result of the order.
        answer: Answer,
    },
    /// The set of disks whose writes wait for room on the host has changed.
    FullDisks {
        /// Indices of these disks in [`LaunchSpec::disks`].
        disks: Vec<u16>,
    },
    /// The VM ended; the last report.
    Ended(Ending),
    /// The launch came from a monitor that has no version in common with the shard. The shard sends no other
    /// report then. This report's form is the same in all versions.
    Unlike {
        /// The versions of the shard's program.
        versions: Versions,
    },
}

/// The answer to an order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The order was performed.
    Done,
    /// Counters and sizes.
    Status(serde_json::Value),
    /// The files of KVM's statistics come with this report, in the order of the vCPUs.
    VcpuStatistics {
        /// Number of files; 0 where the host's KVM has none, or no vCPU is left.
        files: u8,
    },
    /// Result of an [`Order::Move`].
    Moved(MoveReport),
    /// Memory is bound as an [`Order::MemoryNodes`] requires, and a part of it was checked.
    MemoryMoved {
        /// [`Order::MemoryNodes::from`] of the next order; none if all of the memory was checked.
        next: Option<u64>,
    },
    /// The origins of some pages.
    PageMap(PageMapPart),
    /// The order was not performed.
    Refused {
        /// Reason, in one line.
        why: String,
    },
}

/// Result of an [`Order::Move`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "how")]
pub enum MoveReport {
    /// The vCPU runs in the shard that the order names.
    Done {
        /// Time that the vCPU did not run during the move, nanoseconds.
        still_ns: u64,
    },
    /// The vCPU has not moved.
    Refused {
        /// Reason of the refusal.
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_an_order_grows_by_incarnation_first() {
        let id = |incarnation, request| OrderId { incarnation, request };
        assert!(id(2, 1) > id(1, 9));
        assert!(id(2, 2) > id(2, 1));
    }
}
