//! What a monitor tells a shard to run, and what the shard tells back.
//!
//! The monitor opens every file, then starts the shard's process with one end of a [control
//! socket](crate::control). Over it goes one message: the [`Launch`] with every [`Fd`] as SCM_RIGHTS. Then
//! the monitor sends [`NumberedOrder`]s and the shard sends [`Report`]s. The end of the monitor's side means
//! that it died: the shard ends at once.

use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::os::fd::RawFd;

pub use crate::cpuid::Leaf;
pub use crate::relation::Ratio;

/// An open file passed with the [`LaunchSpec`]: the index among the files of the message.
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
    /// Another shard of a VM that spans cells.
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
    /// As in [`LaunchSpec`].
    pub sandbox: SandboxLaunch,
}

/// A VM that spans cells, as one of its shards is told of it. Shard 0 is its home.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SpanLaunch {
    /// This shard.
    pub shard: u8,
    /// The shard of each vCPU at the start.
    pub vcpus: Vec<u8>,
    /// The memory of each shard's cell, which all shards map, or which that shard manages.
    pub memory: Vec<ShardMemory>,
    /// How the shards' memories are kept coherent, where each has one of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coherence: Option<CoherenceLaunch>,
    /// The channels between this shard and each; none to itself.
    pub channels: Vec<Option<ShardChannels>>,
    /// The guest's time-stamp counter.
    pub tsc: TscLaunch,
    /// What the guest is told of the processor: what all hosts have in common. All that this host has when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpuid: Vec<Leaf>,
}

/// How the guest's time-stamp counter comes from a host's.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct TscLaunch {
    /// What is added to the host's, scaled.
    pub offset: u64,
    /// What the host's is multiplied by.
    pub ratio: Ratio,
    /// Ticks in a millisecond; the host's when absent.
    pub khz: Option<u32>,
    /// The kernels of all other hosts of the VM take their time from theirs.
    pub is_relied_on: bool,
}

/// Of a VM's memory, what is in the cell of one shard.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShardMemory {
    /// How much: after that of the shards before, in guest-physical addresses.
    pub bytes: u64,
    /// A file with page g at offset g, of the size of the whole; none where each shard has a memory of its own.
    pub file: Option<Fd>,
    /// The host's nodes that it is bound to; anywhere when empty.
    pub host_nodes: Vec<u32>,
}

/// What is between two shards.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShardChannels {
    /// Of one host: a ring each way.
    Rings {
        /// To the other.
        outgoing: Fd,
        /// From it.
        incoming: Fd,
    },
    /// Of two hosts: a connection.
    Stream {
        /// A connected stream socket.
        socket: Fd,
        /// Where the other is, for people.
        peer: String,
    },
}

/// The memory of a shard that has one of its own, kept coherent with the others'.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CoherenceLaunch {
    /// `/dev/userfaultfd`, where the host has it.
    pub userfaultfd: Option<Fd>,
    /// For each lane the connections to each shard; none to itself.
    pub lanes: Vec<Vec<Option<LaneSockets>>>,
    /// The shards as people know them.
    pub names: Vec<String>,
    /// Where the guest's kernel lies, if it does not unpack itself; else empty.
    pub kernel: Range<u64>,
    /// For each shard the memory that its host shares with this one, if the lanes are to use it.
    pub shared: Vec<Option<SharedLanes>>,
    /// Why they use none though there is some, one line each.
    pub notes: Vec<String>,
    /// Whether another thread of this host encrypts what lanes send, and decrypts what they receive.
    pub encrypted: bool,
}

/// Memory that two hosts share, for the lanes of two shards.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SharedLanes {
    /// To be mapped in part, and closed.
    pub memory: Fd,
    /// Of each lane.
    pub lanes: Vec<LanePipes>,
}

/// Pipes beside a lane's [`LaneSockets`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LanePipes {
    /// For messages alone.
    pub control: PipesAt,
    /// For messages with a page.
    pub bulk: PipesAt,
}

/// Where two empty pipes are in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipesAt {
    /// The one to the other shard: bytes from the beginning, a multiple of a page.
    pub outgoing: u64,
    /// The one from it, likewise.
    pub incoming: u64,
    /// Words of eight bytes that each holds.
    pub words: usize,
}

/// Connected stream sockets between two shards, for one lane.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LaneSockets {
    /// For messages alone.
    pub control: Fd,
    /// For messages with a page.
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
    /// How the kernel's code is shared with VMs that run the same; at the read, the initramfs too.
    pub share_boot: Share,
    /// Which of the files above other VMs map, too, as the VM starts; [`Order::Shared`] tells later.
    pub mapped: Vec<MappedFile>,
    /// The VM's shards, when it spans cells. Its memory is then in [`SpanLaunch::memory`].
    pub span: Option<SpanLaunch>,
    /// The state to go on from, instead of booting.
    pub resume: Option<ResumeLaunch>,
    /// A socket to the monitor for [`HandoverRequest`]s and their answers.
    pub handover: Fd,
    /// Bytes of the serial console, both ways.
    pub console: Fd,
    /// Write-only file for the shard's own log lines.
    pub log: Fd,
    /// The sandbox, as far as the monitor made it.
    pub sandbox: SandboxLaunch,
}

/// The state of a VM that was frozen.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ResumeLaunch {
    /// The file of the machine's state ([`crate::saved`]).
    pub state: Fd,
    /// The files of its memory: its own, then the layers.
    pub memory: Vec<Fd>,
}

/// What a monitor asks of a shard over a socket that carries files.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum HandoverRequest {
    /// Freeze the VM as it is now, and let it go on.
    Freeze {
        /// For each disk with a temporary overlay, an empty file for a copy of that.
        overlays: Vec<Option<Fd>>,
    },
    /// Tell which pages of memory the VM has touched so far.
    Touched,
}

/// The answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum HandoverReply {
    /// Runs of guest pages, by their first and their number.
    Touched {
        /// In order.
        runs: Vec<(u64, u64)>,
    },
    /// Frozen; the overlays' files are filled.
    Frozen {
        /// What others can go on from.
        resume: ResumeLaunch,
        /// How long the VM stood still, microseconds.
        paused_us: u64,
    },
    /// The VM goes on as it was.
    Refused {
        /// Why, and what to do.
        why: String,
    },
}

/// Guest memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemoryLaunch {
    /// Size, a multiple of 2 MiB from 64 MiB.
    pub bytes: u64,
    /// What the memfd is made of.
    pub pages: Pages,
    /// Allocate everything at the start.
    pub prefault: bool,
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
    /// vCPU numbers.
    pub vcpus: Vec<u8>,
    /// Bytes of memory, a multiple of 2 MiB.
    pub memory_bytes: u64,
    /// Distance to every node in order (10 is local), for the SLIT.
    pub distances: Vec<u8>,
    /// What its vCPUs wait for memory of every node in order, picoseconds, for the HMAT; empty when not measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub latencies_ps: Vec<u64>,
    /// What its vCPUs read of every node's memory, millions of bytes a second; empty when not measured.
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
    /// Request queues.
    pub queues: u16,
    /// Offer as virtio-pmem instead of virtio-block (one raw layer only).
    pub pmem: bool,
    /// How pages read from files that nobody writes are shared with other VMs.
    pub share: Share,
    /// The outcome of a write that finds no room on the host.
    #[serde(default)]
    pub on_full: OnFull,
}

/// What a write to a disk does that finds no room on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFull {
    /// It fails.
    #[default]
    Error,
    /// It waits until there is room.
    Pause,
}

/// How a disk shares memory (`shard::sharing`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Share {
    /// Copy, always.
    Never,
    /// Map instead of copying.
    AtRead,
    /// Copy, and map later in the background.
    Deferred,
    /// Whichever suits the host's memory and the image's users (`policy::sharing`).
    Adaptive,
}

/// One file of a disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerLaunch {
    /// The open file.
    pub file: Fd,
    /// Its format.
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
    /// The file's device, as `stat` says.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// Whether another VM may map its pages, too.
    pub is_shared: bool,
}

/// A network card.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NetLaunch {
    /// Name for logs and metrics.
    pub id: String,
    /// The card's address.
    pub mac: [u8; 6],
    /// What is on the other side.
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
    /// Listening unix socket; a client writes `CONNECT <port>\n`, reads `OK <port>\n`, and is connected to the guest.
    pub listener: Fd,
    /// The shard's end of the boot's [`crate::ports::pair`], over which the monitor connects ports of the host (cid 2).
    pub ports: Option<Fd>,
}

/// The sandbox of a shard's process, as far as the monitor made it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SandboxLaunch {
    /// How strictly to close it.
    pub policy: SandboxPolicy,
    /// The user to become; none where the process has one already, or may not change it.
    pub identity: Option<Identity>,
    /// What the monitor could not do when it made the process (namespaces), one line each.
    pub missing: Vec<String>,
    /// What the monitor lacks of the layers that `require` does not insist on, one line each.
    pub notes: Vec<String>,
}

/// A user and its group, by the host's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// The group.
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
/// Numbers grow. A shard refuses an order of an older incarnation, and one with a lower number than the last;
/// the last order repeated it does not carry out again, but repeats its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OrderId {
    /// The process that gives orders: each successor of one has a greater number.
    pub incarnation: u64,
    /// The order among those of its process.
    pub request: u64,
}

/// An order as it is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NumberedOrder {
    /// Its number.
    pub id: OrderId,
    /// The order.
    pub order: Order,
}

/// What the monitor asks of a running shard. Each is answered by a [`Report::Answer`], but for
/// [`Order::Reset`] and [`Order::Quit`].
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
    /// Count. Answered by [`Answer::Status`].
    Status,
    /// Move a vCPU of a VM that spans cells; to its home. Answered by [`Answer::Moved`].
    Move {
        /// Which.
        vcpu: u8,
        /// To which shard.
        shard: u8,
    },
    /// From now on add that to the host's time-stamp counter, scaled: more than so far. For a VM over several hosts.
    Step {
        /// As in [`TscLaunch`].
        offset: u64,
    },
    /// Whether other VMs may map each file of [`LaunchSpec::mapped`] now, in that order.
    Shared {
        /// As [`MappedFile::is_shared`].
        files: Vec<bool>,
    },
    /// Stand still until [`Order::Resume`]: no vCPU runs and no device works. For a plain VM.
    Pause,
    /// Go on after [`Order::Pause`].
    Resume,
    /// Send a non-maskable interrupt to each vCPU. For a plain VM.
    Nmi,
    /// Start again as a machine does whose reset button is pressed. Answered by [`Report::Ended`] with
    /// [`Ending::Reboot`].
    Reset,
    /// Stop running vCPUs, flush disks, end. Answered by [`Report::Ended`].
    Quit,
}

/// What a shard tells its monitor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Report {
    /// The sandbox is closed and the vCPUs are about to run; what could not be applied, one line each.
    Running {
        /// What of the sandbox could not be applied.
        sandbox_missing: Vec<String>,
        /// What is lacking of the layers that `require` does not insist on.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sandbox_notes: Vec<String>,
    },
    /// The answer to an order.
    Answer {
        /// To which.
        to: OrderId,
        /// What became of it.
        answer: Answer,
    },
    /// The disks whose writes wait for room on the host are others than before.
    FullDisks {
        /// Their places in [`LaunchSpec::disks`].
        disks: Vec<u16>,
    },
    /// The VM ended; the last report.
    Ended(Ending),
    /// The launch came from a monitor of another version: the only report then. Its form is the same in all versions.
    OtherVersion {
        /// The version of the shard's program.
        version: String,
    },
}

/// The answer to an order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// It was carried out.
    Done,
    /// Counters and sizes.
    Status(serde_json::Value),
    /// What became of an [`Order::Move`].
    Moved(MoveReport),
    /// It was not carried out.
    Refused {
        /// Why, in one line.
        why: String,
    },
}

/// What became of a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "how")]
pub enum MoveReport {
    /// The vCPU runs where it was to run.
    Done {
        /// How long it stood still, nanoseconds.
        still_ns: u64,
    },
    /// It runs where it ran.
    Refused {
        /// Why.
        why: String,
    },
}

/// How a VM ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "how")]
pub enum Ending {
    /// The guest powered off (ACPI S5).
    PowerOff,
    /// The guest asked for a reset: the monitor starts it again.
    Reboot,
    /// The guest's kernel panicked (told by pvpanic).
    Panic,
    /// A triple fault.
    TripleFault,
    /// KVM could not go on.
    KvmInternalError {
        /// KVM's suberror and what it says of it.
        detail: String,
    },
    /// The monitor asked for the end.
    Quit,
    /// The guest rebooted too often, each time as soon as it ran: the monitor starts it no more. No shard reports this.
    RebootLoop,
    /// Another shard is gone, and the memory that it had. Why, that one's own end tells.
    PeerLost {
        /// Which, and how that showed.
        detail: String,
    },
    /// The shard itself failed.
    ShardFailed {
        /// What failed, in one line.
        detail: String,
    },
}

impl Ending {
    /// The exit status of a shard that ended so, and of `mirrorball run` but for a reboot (`docs/cli.md`). A
    /// parent that reads no reports decides by it.
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
