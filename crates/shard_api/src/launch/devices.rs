//! The part of a launch that describes disks, network cards and the socket device.

use serde::{Deserialize, Serialize};

use super::Fd;

/// Files and settings of one disk in the launch message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskLaunch {
    /// Name for logs and metrics, also the guest-visible serial (20 bytes at most).
    pub id: String,
    /// The files from the top overlay down to the base; the base may be read-only.
    pub layers: Vec<LayerLaunch>,
    /// Whether the guest may not write.
    pub read_only: bool,
    /// Bytes that a temporary overlay may take, if there is a limit.
    #[serde(default)]
    pub scratch_limit: Option<u64>,
    /// Number of request queues.
    pub queues: u16,
    /// Offer as virtio-pmem instead of virtio-block (one raw layer only).
    pub pmem: bool,
    /// Sharing of pages from files without a writer.
    pub share: Share,
    /// Result of a write that finds no room on the host.
    #[serde(default)]
    pub on_full: OnFull,
}

/// Limits of the guest's requests to its disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimits {
    /// Those of the image's root disk.
    #[serde(default)]
    pub root: DiskLimit,
    /// Those of the other disks, in the order of the VM file. A disk beyond the list has none.
    #[serde(default)]
    pub others: Vec<DiskLimit>,
}

/// Limits of the guest's requests to one disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimit {
    /// Bytes that are read and written per second; none is no limit.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// Requests per second; none is no limit.
    #[serde(default)]
    pub requests: Option<u32>,
}

/// A shared region of the cluster, which several VMs map.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegionLaunch {
    /// Name of the region.
    pub name: String,
    /// Its file in memory, open for writing unless `read_only`. Its length is fixed.
    pub file: Fd,
    /// Whether the guest may not write.
    pub read_only: bool,
}

/// Result of a write to a disk that finds no room on the host.
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
    /// Connection of the card to the host.
    pub backend: NetBackendLaunch,
}

/// Connection of a network card to the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetBackendLaunch {
    /// TAP files, one for each queue pair, opened with a virtio-net header.
    Tap(Vec<Fd>),
    /// A stream socket to passt: each frame has its length before it, four bytes, big endian.
    Stream(Fd),
    /// A packet socket (`SOCK_SEQPACKET`) to the gateway of a subnet: each packet is a frame.
    Packets(Fd),
    /// A packet socket to the gateway of a subnet: each packet is a frame behind a virtio-net header of 12
    /// bytes.
    Offloads(Fd),
}

/// A shared folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FolderLaunch {
    /// Name by which the guest mounts the folder, 36 bytes at most.
    pub tag: String,
    /// Socket of packets to the folder's process.
    pub socket: Fd,
    /// Whether pages of the folder's files are shared with other VMs.
    #[serde(default)]
    pub share: bool,
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
