//! JSON views of VMs and cells.

use config::VmSpec;
use registry::cluster::interface::{CellStatus, LentMemory};
use registry::vms::{Record, State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A running VM.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, ToSchema)]
pub struct Vm {
    /// Unique name among the running VMs of its user.
    pub name: String,
    /// Labels that select it in commands.
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    pub labels: config::Labels,
    /// State of its vCPUs.
    pub state: VmState,
    /// Cell, in a cluster.
    pub cell: Option<u16>,
    /// All cells of a VM that spans several, the first one included.
    pub span: Vec<u16>,
    /// Number of its vCPUs.
    pub cpus: u8,
    /// Guest memory.
    pub memory_bytes: u64,
    /// Name of its image in the store; none if it has a kernel of its own.
    pub image: Option<String>,
    /// Process id of the shard.
    pub pid: Option<i32>,
    /// Number of boots, reboots included.
    pub boots: u32,
    /// Seconds since 1970.
    pub started_unix_s: u64,
    /// Its disks whose writes wait for space on the host.
    pub full_disks: Vec<String>,
}

/// State of a VM's vCPUs.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VmState {
    /// Its files are being opened, or it reboots.
    Starting,
    /// Its vCPUs run.
    Running,
    /// Its vCPUs stand still until it is resumed.
    Paused,
}

impl From<&Record> for Vm {
    fn from(record: &Record) -> Self {
        Self {
            name: record.name.clone(),
            labels: record.spec.labels.clone(),
            state: match record.state {
                State::Starting => VmState::Starting,
                State::Running if record.paused => VmState::Paused,
                State::Running => VmState::Running,
            },
            cell: record.cell,
            span: record.span.iter().map(|part| part.cell).collect(),
            cpus: record.spec.cpus,
            memory_bytes: record.spec.memory.0,
            image: record.spec.image.clone(),
            pid: record.shard_pid,
            boots: record.boots,
            started_unix_s: record.started_unix_s,
            full_disks: record.full_disks.clone(),
        }
    }
}

/// Full view of a VM.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct VmDetails {
    /// Short view.
    #[serde(flatten)]
    pub vm: Vm,
    /// Spec from which it was started.
    pub spec: VmSpec,
    /// Layers of the sandbox that could not be applied.
    pub sandbox_missing: Vec<String>,
    /// Counters of its devices and its memory; none if it does not reply.
    #[schema(value_type = Object)]
    pub status: Option<serde_json::Value>,
}

/// A cell of the cluster on this host.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, ToSchema)]
pub struct Cell {
    /// Number in the cluster, from 0.
    pub number: u16,
    /// Whether its process runs.
    pub runs: bool,
    /// Number of its processes so far; none if none runs.
    pub life: Option<u32>,
    /// Whether it is cordoned: it takes no new VM.
    pub cordoned: bool,
    /// Process id.
    pub pid: u32,
    /// Numbers of the host's CPUs that it has.
    pub cpus: Vec<usize>,
    /// The NUMA nodes of its memory.
    pub nodes: Vec<u32>,
    /// Memory that it can give to VMs, in bytes.
    pub memory_bytes: u64,
    /// Memory of its VMs, in bytes.
    pub given_bytes: u64,
    /// Memory that it has lent to other cells, in bytes.
    pub lent_bytes: u64,
    /// The part of `lent_bytes` that the borrowers requested by themselves; commands lent the rest.
    pub lent_on_request_bytes: u64,
    /// Memory that it has borrowed from other cells, in bytes.
    pub borrowed_bytes: u64,
    /// Number of its VMs' vCPUs.
    pub vcpus: u32,
    /// Its VMs, by name.
    pub vms: Vec<String>,
}

impl From<CellStatus> for Cell {
    fn from(status: CellStatus) -> Self {
        let sum = |parts: &[LentMemory]| parts.iter().map(|part| part.bytes).sum();
        Self {
            number: status.plan.number,
            runs: status.life.is_some(),
            life: status.life,
            cordoned: status.cordoned,
            pid: status.pid,
            cpus: status.plan.cpus,
            nodes: status.plan.nodes,
            memory_bytes: status.plan.memory_bytes,
            given_bytes: status.given_bytes,
            lent_bytes: sum(&status.lent),
            lent_on_request_bytes: sum(&status.lent_on_request),
            borrowed_bytes: sum(&status.borrowed),
            vcpus: status.vcpus,
            vms: status.vms,
        }
    }
}

/// Parameters of a VM's end.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Stop {
    /// Time limit for the guest before it is killed, in seconds, 3600 at most.
    pub limit_s: u64,
}

impl Default for Stop {
    fn default() -> Self {
        Self { limit_s: 30 }
    }
}

/// Outcome of a VM's end.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct Stopped {
    /// Whether it was killed because it did not power off in time.
    pub killed: bool,
}

/// Host resources that a VM uses: [`registry::update::Update`] in the OpenAPI document.
#[derive(Clone, Debug, ToSchema)]
pub struct Limits {
    /// Weight among VMs that share CPUs, 1 to 10000.
    pub cpu_weight: Option<u16>,
    /// Maximum host CPUs, as 1.5.
    pub cpu_limit: Option<f64>,
    /// CPU time of its cell that it has before others, in CPUs, as 0.5.
    pub cpu_reservation: Option<f64>,
    /// Maximum host memory, as `\"700M\"`.
    pub memory_limit: Option<String>,
    /// Maximum guest memory in the host's memory, as `\"256M\"`, of a VM whose memory is paged.
    pub resident: Option<String>,
    /// vCPUs that are pinned to some of the host's CPUs.
    pub pins: Option<Vec<Pin>>,
    /// Host nodes of its memory; any node when empty.
    pub memory_nodes: Option<Vec<u32>>,
    /// New limits of requests to disks.
    pub disks: Option<Vec<DiskRates>>,
}

/// Limits of the requests to a disk: one that is absent stays, one that is null is taken away.
#[derive(Clone, Debug, ToSchema)]
pub struct DiskRates {
    /// `root`, or the disk's place among the VM's other disks, from 0.
    pub disk: String,
    /// Maximum bytes that are read and written per second, as `\"50M\"`.
    pub bandwidth: Option<String>,
    /// Maximum requests per second.
    pub operations: Option<u32>,
}

/// Host CPUs that a vCPU runs on.
#[derive(Clone, Debug, ToSchema)]
pub struct Pin {
    /// The vCPU's number.
    pub vcpu: u8,
    /// Numbers of the CPUs; empty means all CPUs that the VM may use.
    pub cpus: Vec<usize>,
}

/// Size of a VM's balloon.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Balloon {
    /// Bytes that the guest returns to the host.
    pub bytes: u64,
}
