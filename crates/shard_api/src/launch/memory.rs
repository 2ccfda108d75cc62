//! The part of a launch that describes guest memory and the guest's NUMA nodes.

use serde::{Deserialize, Serialize};

use super::Fd;

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
    /// Memory by home cell, in guest-physical order, where it is of several cells on different nodes. Applies
    /// where neither `host_nodes` nor [`NodeLaunch::host_node`] does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub homes: Vec<HomeMemory>,
    /// Paging of the memory, of a plain VM that boots, with pages of 4 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paging: Option<PagingLaunch>,
    /// Whether the memory is in no file, and the host's kernel merges its equal pages. Of a plain VM, with
    /// pages of 4 KiB.
    // Omitted by default, so that an older shard can read the message.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scan: bool,
}

/// Memory of a VM that is of one cell.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct HomeMemory {
    /// Its size in bytes. The sizes add up to the VM's memory.
    pub bytes: u64,
    /// The host's NUMA nodes of that cell's memory.
    pub nodes: Vec<u32>,
}

/// First bytes of a paging file with a name. The pages follow from byte 4096 on.
pub const PAGING_FILE_MARK: &[u8] = b"mirrorball paging file\n";

/// Paging of guest memory to a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagingLaunch {
    /// Greatest number of bytes of guest memory in the host's memory. [`super::Order::Resident`] changes it.
    pub resident_bytes: u64,
    /// The paging file: a regular file or a block device, open for reading and writing. Its content from byte
    /// 4096 on is lost.
    pub file: Fd,
    /// Name of the file, for messages.
    pub name: String,
    /// Descriptor of `/dev/userfaultfd`, if the monitor may open it.
    pub userfaultfd: Option<Fd>,
    /// Size of the virtual paging disk, bytes, a multiple of 4096; 0 for none.
    // Omitted by default, so that an older shard can read the message.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub disk_bytes: u64,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
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
