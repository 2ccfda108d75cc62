//! Messages between a monitor and a shard: the launch, orders, and reports.
//!
//! The monitor opens every file, then starts the shard's process with one end of a [control
//! socket](crate::control). The first message over that socket is the [`Launch`] with every [`Fd`] as
//! SCM_RIGHTS. Then the monitor sends [`NumberedOrder`]s and the shard sends [`Report`]s. The end of the
//! monitor's side means that the monitor died: the shard ends at once.

mod devices;
mod ending;
mod handover;
mod memory;
mod order;
mod sandbox;
mod span;

use std::os::fd::RawFd;

use serde::{Deserialize, Serialize};

pub use devices::{
    DiskFormat, DiskLaunch, DiskLimit, DiskLimits, FolderLaunch, LayerLaunch, MappedFile, NetBackendLaunch,
    NetLaunch, OnFull, RegionLaunch, Share, VsockLaunch,
};
pub use ending::Ending;
pub use handover::{HandoverReply, HandoverRequest};
pub use memory::{HomeMemory, MemoryLaunch, NodeLaunch, PAGING_FILE_MARK, Pages, PagingLaunch};
pub use order::{
    Answer, MoveReport, NumberedOrder, Order, OrderId, Report, STATISTICS_FILES_MAX, VCPU_STOP_MS_MAX,
    VCPU_STOP_TOTAL_MAX,
};
pub use sandbox::{Identity, SandboxLaunch, SandboxPolicy};
pub use span::{
    CoherenceLaunch, LanePipes, LaneSockets, Leaf, PipesAt, Ratio, ShardChannels, ShardMemory, SharedLanes,
    SpanLaunch, TscLaunch,
};

/// Index of an open file among the files of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fd(pub usize);

/// The descriptor at which a shard finds its control socket.
pub const CONTROL_FD: RawFd = 3;

/// The first message to a shard, which goes with a [version](crate::version).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Launch {
    /// A whole VM, or the home of one that spans cells.
    Vm(Box<LaunchSpec>),
    /// A shard other than the home of a VM that spans cells.
    #[serde(rename = "part")]
    Secondary(Box<SecondaryLaunch>),
}

/// A shard without devices of a VM that spans cells.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SecondaryLaunch {
    /// Descriptor of `/dev/kvm`.
    pub kvm: Fd,
    /// The whole VM's memory.
    pub memory: MemoryLaunch,
    /// The VM's shards.
    pub span: SpanLaunch,
    /// Write-only file for the shard's own log lines.
    pub log: Fd,
    /// The sandbox, as in [`LaunchSpec::sandbox`].
    pub sandbox: SandboxLaunch,
}

/// One VM, with every file already open.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LaunchSpec {
    /// The VM's name.
    pub name: String,
    /// Descriptor of `/dev/kvm`.
    pub kvm: Fd,
    /// Number of vCPUs, 1 to 254.
    pub vcpus: u8,
    /// Guest memory.
    pub memory: MemoryLaunch,
    /// Guest NUMA nodes; empty for a guest without SRAT.
    pub nodes: Vec<NodeLaunch>,
    /// The kernel: bzImage or ELF.
    pub kernel: Fd,
    /// Descriptor of the initramfs.
    pub initrd: Option<Fd>,
    /// The whole kernel command line.
    pub cmdline: String,
    /// Disks in the order the guest finds them.
    pub disks: Vec<DiskLaunch>,
    /// Limits of requests to the disks, as the VM starts. [`Order::LimitDisks`] changes them later.
    #[serde(default)]
    pub disk_limits: DiskLimits,
    /// Shared regions, persistent memory after that of the disks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub regions: Vec<RegionLaunch>,
    /// Network cards in the order the guest finds them.
    pub nets: Vec<NetLaunch>,
    /// Shared folders in the order the guest finds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub folders: Vec<FolderLaunch>,
    /// The socket device.
    pub vsock: Option<VsockLaunch>,
    /// Whether there is a balloon.
    pub balloon: bool,
    /// Sharing of the kernel's code with VMs that run the same kernel. With [`Share::AtRead`], the initramfs
    /// is shared too.
    pub share_boot: Share,
    /// The files above whose pages the VM may map, as the VM starts. [`Order::Shared`] updates
    /// [`MappedFile::is_shared`] later.
    pub mapped: Vec<MappedFile>,
    /// The VM's shards, when it spans cells. Its memory is then in [`SpanLaunch::memory`].
    pub span: Option<SpanLaunch>,
    /// The frozen state to resume instead of booting.
    pub resume: Option<ResumeLaunch>,
    /// Socket to the monitor for [`HandoverRequest`]s and [`HandoverReply`]s.
    pub handover: Fd,
    /// Stream of the serial console's bytes, in both directions.
    pub console: Fd,
    /// Write-only file for the shard's own log lines.
    pub log: Fd,
    /// The sandbox, as far as the monitor made it.
    pub sandbox: SandboxLaunch,
}

/// The state of a frozen VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ResumeLaunch {
    /// The file of the machine's state ([`crate::saved`]).
    pub state: Fd,
    /// Files of guest memory: the VM's own file, then the layers in order.
    pub memory: Vec<Fd>,
}
