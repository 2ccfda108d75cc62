//! The part of a launch that describes a VM over several cells to one of its shards.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Fd;
pub use crate::cpuid::Leaf;
pub use crate::relation::Ratio;

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
    /// Descriptor of `/dev/userfaultfd`, if the host has it.
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
