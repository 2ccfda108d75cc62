//! Messages between a monitor and a shard: what to run, orders, and reports.
//!
//! The monitor opens every file, then starts the shard's process with one end of a [control
//! socket](crate::control). The first message over that socket is the [`Launch`] with every [`Fd`] as
//! SCM_RIGHTS. Then the monitor sends [`NumberedOrder`]s and the shard sends [`Report`]s. The end of the
//! monitor's side means that the monitor died: the shard ends at once.

use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::os::fd::RawFd;

use urpc::version::Versions;

pub use crate::cpuid::Leaf;
pub use crate::relation::Ratio;

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
    Part(Box<PartLaunch>),
}

/// A shard without devices of a VM that spans cells.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartLaunch {
    /// `/dev/kvm`.
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

/// A VM that spans cells, as described to one of its shards. Shard 0 is the home.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SpanLaunch {
    /// Number of this shard.
    pub shard: u8,
    /// The shard of each vCPU at the start.
    pub vcpus: Vec<u8>,
    /// Part of guest memory in each shard's cell, by shard number. All shards map a part that has a file;
    /// only its own shard manages a part that has none.
    pub memory: Vec<ShardMemory>,
    /// How the shards' memories are kept coherent; none where all shards map the same memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coherence: Option<CoherenceLaunch>,
    /// Channel between this shard and each shard, by shard number; none to itself.
    pub channels: Vec<Option<ShardChannels>>,
    /// The guest's time-stamp counter.
    pub tsc: TscLaunch,
    /// CPUID leaves that all hosts have in common, for the guest's CPUID. When empty, the guest gets all
    /// leaves of this host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpuid: Vec<Leaf>,
}

/// How the guest's time-stamp counter (TSC) is computed from a host's: host TSC times `ratio`, plus `offset`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct TscLaunch {
    /// Guest TSC ticks added to the scaled host TSC, modulo 2^64.
    pub offset: u64,
    /// Factor of the host's TSC.
    pub ratio: Ratio,
    /// Frequency of the guest's TSC, kHz; the host's when absent.
    pub khz: Option<u32>,
    /// Whether the kernels of all other hosts of the VM use the TSC as their clock source.
    pub is_relied_on: bool,
}

/// Part of a VM's memory in the cell of one shard.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShardMemory {
    /// Size in bytes. In guest-physical addresses, the part follows those of the shards before.
    pub bytes: u64,
    /// File that has guest-physical address g at offset g, and covers the whole memory. None where each shard
    /// has its own copy of the memory.
    pub file: Option<Fd>,
    /// Host NUMA nodes that the part is bound to; not bound when empty.
    pub host_nodes: Vec<u32>,
}

/// Channel between two shards.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShardChannels {
    /// Two shards on one host: a ring in each direction.
    Rings {
        /// Ring to the other shard.
        outgoing: Fd,
        /// Ring from the other shard.
        incoming: Fd,
    },
    /// Two shards on different hosts: a connection.
    Stream {
        /// A connected stream socket.
        socket: Fd,
        /// Place of the other shard, for messages to people.
        peer: String,
    },
}

/// A shard's own copy of guest memory, kept coherent with the copies of the other shards.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CoherenceLaunch {
    /// `/dev/userfaultfd`, where the host has it.
    pub userfaultfd: Option<Fd>,
    /// Connections by lane, then by shard number; none to this shard itself.
    pub lanes: Vec<Vec<Option<LaneSockets>>>,
    /// Names of the shards for messages to people, by shard number.
    pub names: Vec<String>,
    /// Guest-physical addresses of the guest's kernel; empty if the kernel unpacks itself.
    pub kernel: Range<u64>,
    /// By shard number: memory that its host shares with this host, if the lanes are to use that memory.
    pub shared: Vec<Option<SharedLanes>>,
    /// Reasons why lanes do not use shared memory that exists, one line each.
    pub notes: Vec<String>,
    /// Whether another thread of this host encrypts what lanes send, and decrypts what they receive.
    pub encrypted: bool,
}

/// Memory that two hosts share, for the lanes of two shards.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SharedLanes {
    /// File of the shared memory. The shard maps the pipes and closes the file.
    pub memory: Fd,
    /// Pipes of each lane.
    pub lanes: Vec<LanePipes>,
}

/// Pipes beside a lane's [`LaneSockets`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LanePipes {
    /// Pipes for messages without a page.
    pub control: PipesAt,
    /// Pipes for messages with a page.
    pub bulk: PipesAt,
}

/// Location of two empty pipes in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipesAt {
    /// Offset of the pipe to the other shard, bytes from the beginning of the file; a multiple of a page.
    pub outgoing: u64,
    /// Offset of the pipe from the other shard, likewise.
    pub incoming: u64,
    /// Capacity of each pipe, words of eight bytes.
    pub words: usize,
}

/// Connected stream sockets between two shards, for one lane.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LaneSockets {
    /// Socket for messages without a page.
    pub control: Fd,
    /// Socket for messages with a page.
    pub bulk: Fd,
}

/// One VM, with every file already open.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LaunchSpec {
    /// The VM's name.
    pub name: String,
    /// `/dev/kvm`.
    pub kvm: Fd,
    /// Number of vCPUs, 1 to 254.
    pub vcpus: u8,
    /// Guest memory.
    pub memory: MemoryLaunch,
    /// Guest NUMA nodes; empty for a guest without SRAT.
    pub nodes: Vec<NodeLaunch>,
    /// The kernel: bzImage or ELF.
    pub kernel: Fd,
    /// The initramfs.
    pub initrd: Option<Fd>,
    /// The whole kernel command line.
    pub cmdline: String,
    /// Disks in the order the guest finds them.
    pub disks: Vec<DiskLaunch>,
    /// Network cards in the order the guest finds them.
    pub nets: Vec<NetLaunch>,
    /// The socket device.
    pub vsock: Option<VsockLaunch>,
    /// Whether there is a balloon.
    pub balloon: bool,
    /// How the kernel's code is shared with VMs that run the same kernel. With [`Share::AtRead`], the
    /// initramfs is shared too.
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

/// Request of a monitor to a shard, over a socket that carries files.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum HandoverRequest {
    /// Freeze the VM's state as it is now. The VM runs on afterwards.
    Freeze {
        /// By disk: an empty file for a copy of the disk's temporary overlay; none for a disk without one.
        overlays: Vec<Option<Fd>>,
    },
    /// Report which pages of memory the VM has touched so far.
    Touched,
}

/// Reply to a [`HandoverRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum HandoverReply {
    /// The pages that the VM has touched.
    Touched {
        /// Runs of guest pages in order: number of the first page, number of pages.
        runs: Vec<(u64, u64)>,
    },
    /// The VM's state is frozen; the overlays' files are filled.
    Frozen {
        /// The state that other VMs can resume.
        resume: ResumeLaunch,
        /// Time that the VM was paused, microseconds.
        paused_us: u64,
    },
    /// The request was refused. The VM runs on unchanged.
    Refused {
        /// Reason, and what to do.
        why: String,
    },
}

/// Guest memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemoryLaunch {
    /// Size in bytes: a multiple of 2 MiB, at least 64 MiB.
    pub bytes: u64,
    /// Page size of the memfd.
    pub pages: Pages,
    /// Whether to allocate all memory at the start.
    pub prefault: bool,
    /// Host NUMA nodes that all memory is bound to; when empty, [`NodeLaunch::host_node`] decides, or
    /// nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_nodes: Vec<u32>,
}

/// Page sizes that back guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pages {
    /// 4 KiB pages; the host may use transparent huge pages.
    #[default]
    #[serde(rename = "4K")]
    Small,
    /// Transparent huge pages asked for (`MADV_HUGEPAGE`).
    #[serde(rename = "thp")]
    Transparent,
    /// 2 MiB pages of the host's pool.
    #[serde(rename = "2M")]
    Huge2M,
    /// 1 GiB pages of the host's pool.
    #[serde(rename = "1G")]
    Huge1G,
}

/// A NUMA node that the guest sees. The nodes' memory adds up to the VM's; each vCPU is in one node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeLaunch {
    /// Numbers of the node's vCPUs.
    pub vcpus: Vec<u8>,
    /// Bytes of memory, a multiple of 2 MiB.
    pub memory_bytes: u64,
    /// Distance to every node in order (10 is local), for the SLIT.
    pub distances: Vec<u8>,
    /// Latency of this node's vCPUs to the memory of every node in order, picoseconds, for the HMAT; empty
    /// when not measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub latencies_ps: Vec<u64>,
    /// Read bandwidth of this node's vCPUs from the memory of every node in order, 10^6 bytes/s, for the
    /// HMAT; empty when not measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bandwidths_mb_s: Vec<u64>,
    /// Host node to bind this memory to.
    pub host_node: Option<u32>,
}

/// A disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskLaunch {
    /// Name for logs and metrics, also the guest-visible serial (20 bytes at most).
    pub id: String,
    /// The files from the top overlay down to the base; the base may be read-only.
    pub layers: Vec<LayerLaunch>,
    /// The guest may not write.
    pub read_only: bool,
    /// Bytes that a temporary overlay may take, if there is a limit.
    #[serde(default)]
    pub scratch_limit: Option<u64>,
    /// Number of request queues.
    pub queues: u16,
    /// Offer as virtio-pmem instead of virtio-block (one raw layer only).
    pub pmem: bool,
    /// How pages read from files that nobody writes are shared with other VMs.
    pub share: Share,
    /// The outcome of a write that finds no room on the host.
    #[serde(default)]
    pub on_full: OnFull,
}

/// The outcome of a write to a disk that finds no room on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFull {
    /// The write fails.
    #[default]
    Error,
    /// The write waits until there is room.
    Pause,
}

/// How a disk shares memory (`shard::sharing`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Share {
    /// Pages are copied, never mapped.
    Never,
    /// Pages are mapped at the read instead of copied.
    AtRead,
    /// Pages are copied at the read, and mapped later in the background.
    Deferred,
    /// Chosen by the host's memory and the image's users (`policy::sharing`).
    Adaptive,
}

/// One file of a disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerLaunch {
    /// The open file.
    pub file: Fd,
    /// Format of the file.
    pub format: DiskFormat,
}

/// Formats of disk files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// The bytes of the disk, in order.
    Raw,
    /// QEMU's copy-on-write format, version 2 or 3.
    Qcow2,
    /// A temporary overlay (`diskstore::disk::Format::Scratch`).
    Scratch,
}

/// A file whose pages the VM may map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedFile {
    /// Number of the file's device (`st_dev`).
    pub device: u64,
    /// Inode number of the file on that device (`st_ino`).
    pub inode: u64,
    /// Whether another VM may map the file's pages, too.
    pub is_shared: bool,
}

/// A network card.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NetLaunch {
    /// Name for logs and metrics.
    pub id: String,
    /// MAC address of the card.
    pub mac: [u8; 6],
    /// What the card is connected to.
    pub backend: NetBackendLaunch,
}

/// What a network card is connected to.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetBackendLaunch {
    /// TAP files, one for each queue pair, opened with a virtio-net header.
    Tap(Vec<Fd>),
    /// A stream socket to passt: each frame has its length before it, four bytes, big endian.
    Stream(Fd),
}

/// The socket device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VsockLaunch {
    /// The guest's context id, from 3.
    pub cid: u32,
    /// Listening unix socket; a client writes `CONNECT <port>\n`, reads `OK <port>\n`, and is connected to
    /// the guest.
    pub listener: Fd,
    /// The shard's end of the boot's [`crate::ports::pair`], over which the monitor connects ports of the
    /// host (cid 2).
    pub ports: Option<Fd>,
}

/// The sandbox of a shard's process, as far as the monitor made it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SandboxLaunch {
    /// How strictly to close the sandbox.
    pub policy: SandboxPolicy,
    /// User that the process has to become; none where the process has its user already, or may not change
    /// its user.
    pub identity: Option<Identity>,
    /// What the monitor could not do when it made the process (namespaces), one line each.
    pub missing: Vec<String>,
    /// What the monitor lacks of the layers that `require` does not insist on, one line each.
    pub notes: Vec<String>,
}

/// A user and its group, by the host's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
}

/// How strictly to close the sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxPolicy {
    /// Apply what the host allows; report what it does not.
    #[default]
    Auto,
    /// Apply everything or refuse to start.
    Require,
    /// Apply nothing.
    Off,
}

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
    /// The order.
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
        /// Bytes the guest is asked to give back.
        bytes: u64,
    },
    /// Report counters and sizes. Answered by [`Answer::Status`].
    Status,
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
    /// Pause the VM until [`Order::Resume`]: no vCPU runs and no device works. Refused for a VM that spans
    /// cells.
    Pause,
    /// Resume the VM after [`Order::Pause`].
    Resume,
    /// Send a non-maskable interrupt to each vCPU. Refused for a VM that spans cells.
    Nmi,
    /// Reset the VM, as a machine's reset button does. Answered by [`Report::Ended`] with [`Ending::Reboot`].
    Reset,
    /// Stop the vCPUs, flush the disks, and end the shard. A shard of version 2 acknowledges the order at
    /// once with [`Answer::Done`], also while another order is under way or the disks are being flushed.
    /// [`Report::Ended`] follows.
    Quit,
}

/// Report of a shard to its monitor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Report {
    /// The sandbox is closed and the vCPUs are about to run.
    Running {
        /// Parts of the sandbox that could not be applied, one line each.
        sandbox_missing: Vec<String>,
        /// Parts lacking of the layers that `require` does not insist on, one line each.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sandbox_notes: Vec<String>,
        /// The versions that the shard's program speaks; the first, if it does not name them.
        #[serde(default)]
        versions: Versions,
    },
    /// The answer to an order.
    Answer {
        /// Number of the order.
        to: OrderId,
        /// Outcome of the order.
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
        /// The versions that the shard's program speaks.
        versions: Versions,
    },
}

/// The answer to an order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The order was carried out.
    Done,
    /// Counters and sizes.
    Status(serde_json::Value),
    /// Outcome of an [`Order::Move`].
    Moved(MoveReport),
    /// Memory is bound as an [`Order::MemoryNodes`] says, and a part of it was looked at.
    MemoryMoved {
        /// [`Order::MemoryNodes::from`] of the order that goes on; none when all of the memory was looked at.
        next: Option<u64>,
    },
    /// The order was not carried out.
    Refused {
        /// Reason, in one line.
        why: String,
    },
}

/// Outcome of an [`Order::Move`].
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
        /// Reason.
        why: String,
    },
}

/// How a VM ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "how")]
pub enum Ending {
    /// The guest powered off (ACPI S5).
    PowerOff,
    /// The guest requested a reset. The monitor starts the VM again.
    Reboot,
    /// The guest's kernel panicked (reported by pvpanic).
    Panic,
    /// A vCPU took a triple fault.
    TripleFault,
    /// KVM could not continue to run a vCPU.
    KvmInternalError {
        /// Description of the error, with KVM's suberror if there is one.
        detail: String,
    },
    /// The monitor ended the VM.
    Quit,
    /// The guest rebooted too often, each time as soon as it ran. The monitor does not start it again. No
    /// shard reports this.
    RebootLoop,
    /// Another shard is gone, with its memory. That shard's own ending has the cause.
    PeerLost {
        /// The lost shard, and how the loss was noticed.
        detail: String,
    },
    /// The shard itself failed.
    ShardFailed {
        /// What failed, in one line.
        detail: String,
    },
}

impl Ending {
    /// Exit status of a shard with this ending, and of `mirrorball run`, except for a reboot
    /// (`docs/reference/cli.md`). A parent that reads no reports decides by this status.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::PowerOff => 0,
            Self::Reboot => 32,
            Self::Panic => 70,
            Self::TripleFault => 71,
            Self::KvmInternalError { .. } => 72,
            Self::PeerLost { .. } | Self::ShardFailed { .. } => 73,
            Self::Quit => 74,
            Self::RebootLoop => 75,
        }
    }

    /// The ending of a shard that left with `status` and without a last report; `None` where no ending has
    /// the status. `detail` is for the endings that have one.
    pub fn of_exit_status(status: i32, detail: &str) -> Option<Self> {
        let detail = detail.to_owned();
        let all = [
            Self::PowerOff,
            Self::Reboot,
            Self::Panic,
            Self::TripleFault,
            Self::KvmInternalError {
                detail: detail.clone(),
            },
            Self::ShardFailed { detail },
            Self::Quit,
        ];
        all.into_iter()
            .find(|ending| i32::from(ending.exit_status()) == status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_ending_of_a_shard_has_an_exit_status_that_names_it() {
        let detail = "why".to_owned();
        let of_status = |status| Ending::of_exit_status(status, "why");
        for (ending, status) in [
            (Ending::PowerOff, 0),
            (Ending::Reboot, 32),
            (Ending::Panic, 70),
            (Ending::TripleFault, 71),
            (
                Ending::KvmInternalError {
                    detail: detail.clone(),
                },
                72,
            ),
            (
                Ending::ShardFailed {
                    detail: detail.clone(),
                },
                73,
            ),
            (Ending::Quit, 74),
        ] {
            assert_eq!(ending.exit_status(), status);
            assert_eq!(of_status(status.into()), Some(ending));
        }
        assert_eq!(Ending::PeerLost { detail }.exit_status(), 73);
        // No shard reports a loop of reboots; 101 is a panic's of the program, 127 of one that is not
        // executed.
        for status in [-1, 1, 2, 33, 75, 101, 126, 127, 256 + 32] {
            assert_eq!(of_status(status), None, "{status}");
        }
    }

    #[test]
    fn number_of_an_order_grows_by_incarnation_first() {
        let id = |incarnation, request| OrderId { incarnation, request };
        assert!(id(2, 1) > id(1, 9));
        assert!(id(2, 2) > id(2, 1));
    }
}
