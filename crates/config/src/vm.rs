//! A VM file: what a person writes to describe one VM.
//!
//! Unknown keys are errors. Sizes take units (`512M`, `2G`). `docs/vm-file.md` is the schema for people.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::io_limit::IoLimitSpec;
use crate::span::{SpanMemory, SpanSpec};

/// One VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Unique among running VMs. Letters, digits, `-`, `_`, `.`; 63 at most. Chosen when absent.
    pub name: Option<String>,
    /// An image of the image store: gives the kernel, the initramfs and the root disk.
    pub image: Option<String>,
    /// vCPUs, 1 to 254.
    #[serde(default = "default_cpus", deserialize_with = "cpus")]
    pub cpus: u8,
    /// Its part of CPUs that it shares with other VMs, 1 to 10000: one of 200 gets twice as much as one of 100. Those
    /// without a weight share by their vCPUs.
    #[serde(default)]
    pub cpu_weight: Option<u16>,
    /// As many of the host's CPUs it uses at most, however many vCPUs it has; 0.01 at least.
    #[serde(default)]
    pub cpu_limit: Option<f64>,
    /// Memory of the host that its processes use at most, the guest's own included.
    #[serde(default)]
    pub memory_limit: Option<Size>,
    /// I/O of the host's devices that its disks do at most each second.
    #[serde(default)]
    pub io_limit: Option<IoLimitSpec>,
    /// Whether nothing else runs on a core of the host while this VM does: its other hardware threads stay idle, or run this VM.
    #[serde(default)]
    pub core_scheduling: bool,
    /// The endings after which it starts again.
    // Left out of records and snapshots that programs from before it read.
    #[serde(default, skip_serializing_if = "RestartSpec::is_no")]
    pub restart: RestartSpec,
    /// Guest memory, from 64M.
    #[serde(default = "default_memory")]
    pub memory: Size,
    /// Kernel, when not the image's; and words for either's command line.
    pub kernel: Option<KernelSpec>,
    /// How the image's own root disk is used.
    #[serde(default)]
    pub root: RootSpec,
    /// Further disks, in the order the guest finds them.
    #[serde(default)]
    pub disks: Vec<DiskSpec>,
    /// Network cards; absent means one in user mode, an empty list none.
    pub nets: Option<Vec<NetSpec>>,
    /// Guest NUMA nodes.
    #[serde(default)]
    pub nodes: Vec<NodeSpec>,
    /// What backs guest memory: `4K`, `thp`, `2M`, `1G`.
    #[serde(default)]
    pub pages: PagesSpec,
    /// Allocate all memory at the start.
    #[serde(default)]
    pub prefault: bool,
    /// Give the guest a balloon with free-page reporting; see [`VmSpec::has_balloon`].
    #[serde(default = "yes")]
    pub balloon: bool,
    /// Run this in the guest and end with its exit status.
    pub command: Option<Vec<String>>,
    /// How strict the sandbox is: `auto`, `require`, `off`.
    #[serde(default)]
    pub sandbox: SandboxSpec,
    /// Bytes that the temporary overlay of each disk takes at most; no limit when absent.
    #[serde(default)]
    pub scratch_limit: Option<Size>,
    /// How disks that do not say share memory: `adaptive`, `deferred`, `at-read`, `never`.
    #[serde(default)]
    pub share: Option<ShareSpec>,
    /// The group of VMs that share memory with one another; the host's file says who shares when absent.
    #[serde(default)]
    pub share_group: Option<String>,
    /// The cell of the cluster to run in; where there is most room when absent.
    #[serde(default)]
    pub cell: Option<u16>,
    /// The cells of the cluster that it spans, a shard in each; one cell and shard when absent.
    #[serde(default)]
    pub span: Option<SpanSpec>,
}

impl VmSpec {
    /// Whether each of its shards has a copy of its memory.
    pub fn is_coherent(&self) -> bool {
        let span = self.span.as_ref();
        span.is_some_and(|span| span.memory() == SpanMemory::Coherent)
    }

    /// The kernel's file and its initramfs, if they are not the image's.
    pub fn kernel_files(&self) -> Option<(&Path, Option<&Path>)> {
        let kernel = self.kernel.as_ref()?;
        Some((kernel.path.as_deref()?, kernel.initrd.as_deref()))
    }

    /// What is said for the kernel's command line; may be empty.
    pub fn cmdline(&self) -> &str {
        self.kernel.as_ref().map_or("", |kernel| &kernel.cmdline)
    }

    /// Whether the VM gets a balloon. Pages of the host's pools are reserved for it to its end: another VM that took one
    /// given back would leave this one without when it wants it again.
    pub fn has_balloon(&self) -> bool {
        let pool = matches!(self.pages, PagesSpec::Huge2M | PagesSpec::Huge1G);
        self.balloon && !pool
    }

    /// The cell where it is asked to be, or the home of the span that is asked for.
    pub fn home_cell(&self) -> Option<u16> {
        let home = || self.span.as_ref()?.cells()?.first().copied();
        self.cell.or_else(home)
    }
}

/// A size in bytes, written as a number with a unit: `K`, `M`, `G`, `T` (powers of 1,024), in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(value_type = String, example = "512M"))]
pub struct Size(pub u64);

/// A kernel given by its files, or what the image's own is told.
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
    /// Added to the command line that Mirrorball makes, behind its words and the image's: of words with one key Linux takes the last.
    #[serde(default)]
    pub cmdline: String,
}

/// How a VM uses its image's root disk. Always private: the image is never written.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RootSpec {
    /// Keep the VM's writes, in an overlay file of the data directory named by the VM.
    #[serde(default)]
    pub persistent: bool,
    /// How what it reads is shared; as the VM's `share` when absent.
    pub share: Option<ShareSpec>,
    /// The outcome of a write that finds no room on the host.
    #[serde(default)]
    pub on_full: OnFullSpec,
}

/// The endings after which a VM starts again. A guest's reboot always starts it, and an end by `kill` or `stop` never does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RestartSpec {
    /// No ending.
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

/// The outcome of a write to a disk that finds no room on the host (`docs/disks.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnFullSpec {
    /// It fails: the guest gets an I/O error.
    #[default]
    Error,
    /// It waits until there is room.
    Pause,
}

/// How pages that a disk reads from a file nobody writes are shared with other VMs (`docs/sharing.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ShareSpec {
    /// As suits the host's memory and the number of VMs on the image.
    #[default]
    Adaptive,
    /// Copied at once, shared in the background.
    Deferred,
    /// Shared when read.
    AtRead,
    /// Copied.
    Never,
}

/// A disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// The file.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: PathBuf,
    /// Told from the file's first bytes when absent.
    pub format: Option<DiskFormatSpec>,
    /// Who else may use it.
    #[serde(default)]
    pub mode: DiskMode,
    /// Keep the writes. An exclusive disk that is not persistent is written to a temporary overlay.
    #[serde(default)]
    pub persistent: bool,
    /// The guest may not write at all.
    #[serde(default)]
    pub read_only: bool,
    /// The device it is: `block` or `pmem`.
    #[serde(default, rename = "as")]
    pub device: DiskDevice,
    /// Request queues; one for each vCPU, four at most, when absent.
    pub queues: Option<u16>,
    /// How what it reads is shared; as the VM's `share` when absent.
    pub share: Option<ShareSpec>,
    /// The outcome of a write that finds no room on the host.
    #[serde(default)]
    pub on_full: OnFullSpec,
}

/// Formats of disk files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum DiskFormatSpec {
    /// Raw.
    Raw,
    /// qcow2.
    Qcow2,
}

/// Who may use a disk.
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

/// Which device a disk is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum DiskDevice {
    /// virtio-block.
    #[default]
    Block,
    /// virtio-pmem.
    Pmem,
}

/// A network card.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NetSpec {
    /// `user`, or `tap`.
    pub kind: NetKind,
    /// The TAP device, for `tap`.
    pub tap: Option<String>,
    /// Ports of the host forwarded to the guest, for `user`: `8080:80`, `udp:5353:53`.
    #[serde(default)]
    pub forward: Vec<String>,
    /// Chosen when absent.
    pub mac: Option<String>,
    /// Queue pairs, for `tap`.
    pub queues: Option<u16>,
    /// Whether the guest may reach the host and the cluster's hosts, for `user`.
    #[serde(default)]
    pub host: bool,
}

/// What a network card is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum NetKind {
    /// Unprivileged networking through passt.
    User,
    /// A TAP device.
    Tap,
}

/// A guest NUMA node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NodeSpec {
    /// vCPUs, as `0-1,4`.
    pub cpus: String,
    /// Its memory.
    pub memory: Size,
    /// Distance to each node in order, 10 being local; 10 and 20 when absent.
    pub distances: Option<Vec<u8>>,
    /// Host node to bind the memory to.
    pub host_node: Option<u32>,
}

/// What backs guest memory.
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

/// How strict the sandbox is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum SandboxSpec {
    /// What the host allows; the rest is reported.
    #[default]
    Auto,
    /// Everything, or refuse.
    Require,
    /// Nothing.
    Off,
}

fn default_cpus() -> u8 {
    1
}

/// Reads the number of vCPUs here, where the number is at hand when it does not even fit its type.
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

impl Size {
    /// Reads a number with a unit. A number without one is refused: `512` is bytes to some and MiB to others.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let number: u64 = number
            .parse()
            .map_err(|_| format!("{text:?} is not a size: write a number and a unit, as \"512M\""))?;
        let shift = match unit.trim().to_ascii_uppercase().as_str() {
            "K" | "KB" | "KIB" => 10,
            "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            "T" | "TB" | "TIB" => 40,
            "" | "B" => {
                return Err(format!(
                    "the size {text:?} has no unit: write \"{number}M\" or \"{number}G\""
                ));
            }
            _ => return Err(format!("{unit:?} is not a unit of size: use K, M, G or T")),
        };
        number
            .checked_mul(1 << shift)
            .map(Size)
            .ok_or_else(|| format!("the size {text:?} is too large for any machine: write a smaller one"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shift, unit) = [(40, "T"), (30, "G"), (20, "M"), (10, "K")]
            .into_iter()
            .find(|&(shift, _)| self.0 != 0 && self.0.is_multiple_of(1 << shift))
            .unwrap_or((0, "B"));
        write!(f, "{}{unit}", self.0 >> shift)
    }
}

impl std::str::FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }
}

impl Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size with a unit, as \"512M\"")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Size, E> {
                Size::parse(text).map_err(E::custom)
            }
            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Size, E> {
                if number <= 0 {
                    return Err(E::custom(format!(
                        "{number} is not a size: write a number and a unit, as \"512M\""
                    )));
                }
                Err(E::custom(format!(
                    "the size {number} has no unit: write \"{number}M\" or \"{number}G\""
                )))
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}
