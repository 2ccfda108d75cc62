//! What VMs and cells look like from outside.

use config::VmSpec;
use registry::cluster::interface::{CellStatus, LentMemory};
use registry::vms::{Record, State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A running VM.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, ToSchema)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// Its labels.
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    pub labels: config::Labels,
    /// What it does.
    pub state: VmState,
    /// The cell that it runs in, in a cluster.
    pub cell: Option<u16>,
    /// All cells that it runs in, that one first, when it spans several.
    pub span: Vec<u16>,
    /// vCPUs.
    pub cpus: u8,
    /// Guest memory.
    pub memory_bytes: u64,
    /// Its image.
    pub image: Option<String>,
    /// The shard's process.
    pub pid: Option<i32>,
    /// How often the guest started, reboots included.
    pub boots: u32,
    /// Seconds since 1970.
    pub started_unix_s: u64,
    /// Its disks whose writes wait for room on the host.
    pub full_disks: Vec<String>,
}

/// What a VM does.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VmState {
    /// It is being started.
    Starting,
    /// Its vCPUs run.
    Running,
    /// It stands still by order.
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

/// A VM with all that is known of it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct VmDetails {
    /// In short.
    #[serde(flatten)]
    pub vm: Vm,
    /// What it was started from.
    pub spec: VmSpec,
    /// What of the sandbox could not be applied.
    pub sandbox_missing: Vec<String>,
    /// What its devices and its memory counted; none if it does not answer.
    #[schema(value_type = Object)]
    pub status: Option<serde_json::Value>,
}

/// A cell of the cluster on this host.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, ToSchema)]
pub struct Cell {
    /// Its number.
    pub number: u16,
    /// Whether its process runs.
    pub runs: bool,
    /// How many processes it has had; none if none runs.
    pub life: Option<u32>,
    /// Whether it takes no new VM.
    pub cordoned: bool,
    /// Its process.
    pub pid: u32,
    /// Its CPUs.
    pub cpus: Vec<usize>,
    /// The NUMA nodes of its memory.
    pub nodes: Vec<u32>,
    /// The memory that it gives out.
    pub memory_bytes: u64,
    /// What its VMs have.
    pub given_bytes: u64,
    /// What of its memory it has lent to other cells.
    pub lent_bytes: u64,
    /// What other cells have lent it.
    pub borrowed_bytes: u64,
    /// vCPUs of its VMs.
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
            borrowed_bytes: sum(&status.borrowed),
            vcpus: status.vcpus,
            vms: status.vms,
        }
    }
}

/// How a VM is to be ended.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Stop {
    /// Seconds the guest may take before it is killed, 3600 at most.
    pub limit_s: u64,
}

impl Default for Stop {
    fn default() -> Self {
        Self { limit_s: 30 }
    }
}

/// How a VM ended.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct Stopped {
    /// It did not power off in time.
    pub killed: bool,
}

/// What a VM uses of its host. The document's view of [`registry::update::Update`].
#[derive(Clone, Debug, ToSchema)]
pub struct Limits {
    /// Its part of CPUs that VMs share, 1 to 10000.
    pub cpu_weight: Option<u16>,
    /// CPUs of the host at most, as 1.5.
    pub cpu_limit: Option<f64>,
    /// Memory of the host at most, as `\"700M\"`.
    pub memory_limit: Option<String>,
    /// vCPUs that run on some of the host's CPUs only.
    pub pins: Option<Vec<Pin>>,
    /// Nodes of the host that its memory lies on; on any when empty.
    pub memory_nodes: Option<Vec<u32>>,
}

/// The CPUs of the host that a vCPU runs on.
#[derive(Clone, Debug, ToSchema)]
pub struct Pin {
    /// The vCPU's number.
    pub vcpu: u8,
    /// The CPUs' numbers; all that the VM may use when there is none.
    pub cpus: Vec<usize>,
}

/// What a VM's balloon is to take.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Balloon {
    /// Bytes that the guest gives back.
    pub bytes: u64,
}
