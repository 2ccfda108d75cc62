//! A VM file: the description of one VM.
//!
//! Unknown keys are errors. Sizes take units (`512M`, `2G`). `docs/reference/vm-file.md` documents the
//! schema.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cluster::RegionAccess;
use crate::io_limit::IoLimitSpec;
use crate::labels::Labels;
use crate::size::Size;
use crate::span::{SpanMemory, SpanSpec};

/// One VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Unique among running VMs. Letters, digits, `-`, `_`, `.`; 63 at most. Chosen when absent.
    pub name: Option<String>,
    /// Defined VMs after which this one starts, when the cluster comes up.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<String>,
    /// Labels by which commands select VMs; 64 at most.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = std::collections::BTreeMap<String, String>))]
    pub labels: Labels,
    /// An image of the image store: gives the kernel, the initramfs and the root disk.
    pub image: Option<String>,
    /// Whether the VM starts from a template of its image, which has booted already, instead of booting.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warm: bool,
    /// vCPUs, 1 to 254.
    #[serde(default = "default_cpus", deserialize_with = "cpus")]
    pub cpus: u8,
    /// Weight of the VM on CPUs that VMs share, 1 to 10000: a VM of 200 gets twice as much time as a VM of
    /// 100. VMs without a weight share in proportion to their vCPUs.
    #[serde(default)]
    pub cpu_weight: Option<u16>,
    /// Maximum number of the host's CPUs that the VM uses, however many vCPUs it has; 0.01 to 1024.
    #[serde(default)]
    pub cpu_limit: Option<f64>,
    /// CPU time of its cell that the VM has before others in each period, in CPUs, if it wants it; 0.01 to
    /// 1024. The rest of the CPUs is shared by weight.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_reservation: Option<f64>,
    /// Whether a cell with drivers runs the VM's busy vCPUs at the same time.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub gang: bool,
    /// Maximum memory of the host that the VM's processes use, the guest's memory included.
    #[serde(default)]
    pub memory_limit: Option<Size>,
    /// Maximum I/O per second of the VM's disks on each device of the host.
    #[serde(default)]
    pub io_limit: Option<IoLimitSpec>,
    /// Whether nothing else runs on a core of the host while this VM does: the core's other hardware threads
    /// idle, or run this VM.
    #[serde(default)]
    pub core_scheduling: bool,
    /// The endings after which the VM starts again.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "RestartSpec::is_no")]
    pub restart: RestartSpec,
    /// Guest memory, from 64M.
    #[serde(default = "default_memory")]
    pub memory: Size,
    /// Host nodes that guest memory is bound to; any when empty.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_nodes: Vec<u32>,
    /// Maximum guest memory in the host's memory, from 16M; the rest is in a paging file. All of it when
    /// absent.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident: Option<Size>,
    /// The paging file, a block device, or the directory of a nameless paging file; with `resident`.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub paging_file: Option<PathBuf>,
    /// Size of a virtual paging disk, from 1M to four times the memory: a disk for the guest's swap, whose
    /// pages are in the paging file; with `resident`.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paging_disk: Option<Size>,
    /// Guest memory that stays in the host's memory, whatever the pressure; at most `memory`, and `resident`.
    /// All that the VM may have when absent.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_min: Option<Size>,
    /// Weight of the VM when the host is short of memory, 1 to 10000: a VM of 200 keeps twice as much as a VM
    /// of 100, which is the default. With `resident` and `memory_min`.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_weight: Option<u16>,
    /// Kernel to use instead of the image's, and words for the kernel's command line.
    pub kernel: Option<KernelSpec>,
    /// Use of the image's root disk.
    #[serde(default)]
    pub root: RootSpec,
    /// Further disks, in the order the guest finds them.
    #[serde(default)]
    pub disks: Vec<DiskSpec>,
    /// Regions of the cluster's memory that the VM shares with other VMs, each a persistent-memory device
    /// after those of the disks.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<SharedSpec>,
    /// Folders of the host that the guest mounts by virtio-fs.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub folders: Vec<FolderSpec>,
    /// Network cards; absent means one of a subnet, an empty list none.
    pub nets: Option<Vec<NetSpec>>,
    /// Guest NUMA nodes.
    #[serde(default)]
    pub nodes: Vec<NodeSpec>,
    /// Pages that back guest memory: `4K`, `thp`, `2M`, `1G`.
    #[serde(default)]
    pub pages: PagesSpec,
    /// Allocate all memory at the start.
    #[serde(default)]
    pub prefault: bool,
    /// Whether to give the guest a balloon with free-page reporting; see [`VmSpec::has_balloon`].
    #[serde(default = "yes")]
    pub balloon: bool,
    /// Command to run in the guest. The VM ends with the command's exit status.
    pub command: Option<Vec<String>>,
    /// Strictness of the sandbox: `auto`, `require`, `off`.
    #[serde(default)]
    pub sandbox: SandboxSpec,
    /// Maximum bytes of each disk's temporary overlay; no limit when absent.
    #[serde(default)]
    pub scratch_limit: Option<Size>,
    /// Sharing mode of disks without a `share` of their own: `adaptive`, `deferred`, `at-read`, `never`; or
    /// `scan`, which is `adaptive`, and the host scans all of the VM's memory for equal pages.
    #[serde(default)]
    pub share: Option<ShareSpec>,
    /// The group of VMs that share memory with one another. When absent, the host's file decides which VMs
    /// share memory.
    #[serde(default)]
    pub share_group: Option<String>,
    /// Cell of the cluster to run in; when absent, the cell with the most free resources.
    #[serde(default)]
    pub cell: Option<u16>,
    /// Cells that the VM may depend on, the preferred lender first; any when empty. It runs in one of them
    /// and has memory of no other.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cells: Vec<u16>,
    /// The cells of the cluster that the VM spans, a shard in each; when absent, one cell and one shard.
    #[serde(default)]
    pub span: Option<SpanSpec>,
}

impl VmSpec {
    /// CPU time that its cell reserves for it, thousandths of a CPU; 0 without a reservation.
    pub fn cpu_reservation_permille(&self) -> u32 {
        let permille = self.cpu_reservation.map(|cpus| (cpus * 1000.0).round().max(1.0));
        permille.map_or(0, |permille| permille as u32)
    }

    /// Whether each shard of the VM has its own copy of the memory, kept coherent.
    pub fn is_coherent(&self) -> bool {
        let span = self.span.as_ref();
        span.is_some_and(|span| span.memory() == SpanMemory::Coherent)
    }

    /// Paths of the kernel and its initramfs; `None` if the kernel is the image's.
    pub fn kernel_files(&self) -> Option<(&Path, Option<&Path>)> {
        let kernel = self.kernel.as_ref()?;
        Some((kernel.path.as_deref()?, kernel.initrd.as_deref()))
    }

    /// Words of the spec for the kernel's command line; may be empty.
    pub fn cmdline(&self) -> &str {
        self.kernel.as_ref().map_or("", |kernel| &kernel.cmdline)
    }

    /// Whether the VM gets a balloon. A VM on pages of the host's pools gets none: those pages stay reserved
    /// for the VM to its end. Otherwise another VM could take a page that this VM returned and needs again.
    pub fn has_balloon(&self) -> bool {
        let pool = matches!(self.pages, PagesSpec::Huge2M | PagesSpec::Huge1G);
        self.balloon && !pool
    }

    /// The cell that the spec names, or the first of the cells that it spans; none if Mirrorball chooses.
    pub fn home_cell(&self) -> Option<u16> {
        let home = || self.span.as_ref()?.cells()?.first().copied();
        self.cell.or_else(home)
    }
}

/// A kernel given by its files, or words for the command line of the image's kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct KernelSpec {
    /// bzImage or ELF; the image's when absent.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub path: Option<PathBuf>,
    /// Initramfs of the kernel at `path`.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub initrd: Option<PathBuf>,
    /// Words appended to the kernel's command line, after those of Mirrorball and of the image. Of most words
    /// with the same key, Linux takes the last.
    #[serde(default)]
    pub cmdline: String,
}

/// Use of an image's root disk. Always private: the image is never written.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RootSpec {
    /// Keep the VM's writes, in an overlay file of the data directory named by the VM.
    #[serde(default)]
    pub persistent: bool,
    /// Sharing mode of pages that the root disk reads; the VM's `share` when absent.
    pub share: Option<ShareSpec>,
    /// Outcome of a write for which the host has no space.
    #[serde(default)]
    pub on_full: OnFullSpec,
    /// Maximum bytes per second that the guest reads and writes, from 64K; no limit when absent.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
    /// Maximum requests per second, from 1; no limit when absent.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations: Option<u32>,
}

/// The endings after which a VM starts again. A guest's reboot always starts it, and an end by `kill` or
/// `stop` never does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RestartSpec {
    /// No ending starts the VM again.
    #[default]
    No,
    /// A failure: a panic, a triple fault, an error of KVM, a shard that is gone.
    OnFailure,
    /// Each failure, and the guest's power-off.
    Always,
}

impl RestartSpec {
    fn is_no(&self) -> bool {
        *self == Self::No
    }
}

/// Outcome of a write to a disk for which the host has no space (`docs/guide/disks.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnFullSpec {
    /// The write fails: the guest gets an I/O error.
    #[default]
    Error,
    /// The write waits for free space.
    Pause,
}

/// Sharing of pages that a disk reads from a file that is never written, with other VMs
/// (`docs/guide/sharing.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ShareSpec {
    /// Chosen by the host's memory and the number of VMs on the image.
    #[default]
    Adaptive,
    /// Pages are copied at once, and shared later in the background.
    Deferred,
    /// Pages are shared when they are read.
    AtRead,
    /// Pages are copied, never shared.
    Never,
    /// As `Adaptive`, and the host's kernel merges equal pages of the VM's memory. A mode of the whole VM.
    Scan,
}

/// A disk beside the image's root disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// Path of the disk's file or block device.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: PathBuf,
    /// Format of the file; when absent, detected from the file's first bytes.
    pub format: Option<DiskFormatSpec>,
    /// Sharing of the disk between VMs.
    #[serde(default)]
    pub mode: DiskMode,
    /// Keep the writes. An exclusive disk that is not persistent is written to a temporary overlay.
    #[serde(default)]
    pub persistent: bool,
    /// The guest may not write at all.
    #[serde(default)]
    pub read_only: bool,
    /// The guest's device: `block` or `pmem`.
    #[serde(default, rename = "as")]
    pub device: DiskDevice,
    /// Number of request queues; when absent, one for each vCPU, four at most.
    pub queues: Option<u16>,
    /// Sharing mode of pages that the disk reads; the VM's `share` when absent.
    pub share: Option<ShareSpec>,
    /// Outcome of a write for which the host has no space.
    #[serde(default)]
    pub on_full: OnFullSpec,
    /// Maximum bytes per second that the guest reads and writes, from 64K; no limit when absent.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
    /// Maximum requests per second, from 1; no limit when absent.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations: Option<u32>,
}

/// Formats of disk files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum DiskFormatSpec {
    /// The bytes of the disk, in order.
    Raw,
    /// QEMU's copy-on-write format, version 2 or 3.
    Qcow2,
}

/// Sharing of a disk between VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum DiskMode {
    /// Any number of VMs, each seeing its own writes over a base that is never written.
    #[default]
    Private,
    /// One VM at a time.
    Exclusive,
}

/// The guest's device for a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum DiskDevice {
    /// A virtio-block device.
    #[default]
    Block,
    /// A virtio-pmem device.
    Pmem,
}

/// A shared region of the cluster, as a VM uses it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SharedSpec {
    /// Name of the region in the cluster file.
    pub name: String,
    /// Whether the VM only reads it.
    #[serde(default)]
    pub read_only: bool,
}

impl SharedSpec {
    /// The access that the VM requests.
    pub fn access(&self) -> RegionAccess {
        match self.read_only {
            true => RegionAccess::Read,
            false => RegionAccess::Write,
        }
    }
}

/// A folder of the host that the guest mounts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FolderSpec {
    /// Path of the directory.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: PathBuf,
    /// Name by which the guest mounts the folder.
    pub tag: String,
    /// Whether the guest may change nothing.
    #[serde(default)]
    pub read_only: bool,
    /// How long the guest may use what it has read.
    #[serde(default)]
    pub cache: FolderCache,
    /// Whether the guest may use extended attributes of users (`user.*`).
    #[serde(default)]
    pub xattr: bool,
    /// Whether the host has pages of files that the guest reads in memory once, for all VMs that share so.
    // Omitted by default, so that older programs can read the record.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub share: bool,
}

/// How long a guest may use what it has read of a folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum FolderCache {
    /// Nothing is kept.
    None,
    /// Data until the file is opened again or has changed, names and attributes for a second.
    #[default]
    Auto,
    /// Everything.
    Always,
}

/// A network card.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NetSpec {
    /// `user`, `subnet`, or `tap`.
    pub kind: NetKind,
    /// The TAP device, for `tap`.
    pub tap: Option<String>,
    /// Ports of the host forwarded to the guest, for `user` and `subnet`: `8080:80`, `udp:5353:53`.
    #[serde(default)]
    pub forward: Vec<String>,
    /// MAC address; chosen when absent.
    pub mac: Option<String>,
    /// Number of queue pairs, for `tap`; one when absent.
    pub queues: Option<u16>,
    /// Whether the guest may reach the host and the cluster's hosts, for `user` and `subnet`.
    #[serde(default)]
    pub host: bool,
    /// Network of the card, for `subnet`: letters, digits, `-`, `_`, `.`; 63 at most. When absent, that of
    /// the share group, or of the command that started the VM.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// IPv4 address of the card on its network, for `subnet`; chosen when absent.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub address: Option<Ipv4Addr>,
    /// Maximum bytes per second that the guest sends, for `subnet`, from 1K; no limit when absent.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
    /// Maximum packets per second that the guest sends, for `subnet`, from 1; no limit when absent.
    // Omitted by default, so that older programs can read the record or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets: Option<u32>,
}

impl NetSpec {
    /// Returns a card of this kind with no further settings.
    pub fn of(kind: NetKind) -> Self {
        Self {
            kind,
            tap: None,
            forward: Vec::new(),
            mac: None,
            queues: None,
            host: false,
            network: None,
            address: None,
            bandwidth: None,
            packets: None,
        }
    }
}

/// Connection of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum NetKind {
    /// Unprivileged networking through passt.
    User,
    /// A network of this owner's VMs, with a way out.
    Subnet,
    /// A TAP device.
    Tap,
}

/// A guest NUMA node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NodeSpec {
    /// vCPUs of the node, as `0-1,4`.
    pub cpus: String,
    /// Memory of the node.
    pub memory: Size,
    /// Distance to each node in order, 10 being local; 10 and 20 when absent.
    pub distances: Option<Vec<u8>>,
    /// Host node to bind the memory to.
    pub host_node: Option<u32>,
}

/// Pages that back guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum PagesSpec {
    /// 4 KiB pages.
    #[default]
    #[serde(rename = "4K")]
    Small,
    /// Transparent huge pages.
    #[serde(rename = "thp")]
    Transparent,
    /// 2 MiB pages of the host's pool.
    #[serde(rename = "2M")]
    Huge2M,
    /// 1 GiB pages of the host's pool.
    #[serde(rename = "1G")]
    Huge1G,
}

/// Strictness of the sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum SandboxSpec {
    /// Apply the layers that the host allows; the others are reported.
    #[default]
    Auto,
    /// Apply all layers, or refuse to start.
    Require,
    /// Apply no layer.
    Off,
}

fn default_cpus() -> u8 {
    1
}

/// Reads the number of vCPUs. An error names the number even if it does not fit a `u8`.
fn cpus<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u8, D::Error> {
    let number = i64::deserialize(deserializer)?;
    u8::try_from(number)
        .ok()
        .filter(|cpus| (1..=254).contains(cpus))
        .ok_or_else(|| serde::de::Error::custom(format!("{number} CPUs: write a number from 1 to 254")))
}

fn default_memory() -> Size {
    Size(512 << 20)
}

fn yes() -> bool {
    true
}

fn is_yes(value: &bool) -> bool {
    *value
}
