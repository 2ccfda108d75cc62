//! Counters and states of a host's cells, CPUs, VMs and vCPUs at one moment.

use registry::cluster::interface::{CpuLending, LentMemory};
use serde::Serialize;

/// Maximum length of a reason from another process, in characters.
const WHY_CHARS_MAX: usize = 200;

/// Everything that was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// Time of the reading, in milliseconds since 1970.
    pub unix_ms: u64,
    /// The same by a clock that never steps, in milliseconds since the first reading began.
    pub at_ms: u64,
    /// The cells, by number.
    pub cells: Vec<CellReading>,
    /// The host's CPUs that are online, by number.
    pub cpus: Vec<CpuReading>,
    /// The caller's VMs, by name.
    pub vms: Vec<VmReading>,
    /// Their vCPUs, by VM and number.
    pub vcpus: Vec<VcpuReading>,
    /// Sources that gave no figures, each with the reason.
    pub unknown: Vec<Unknown>,
}

/// A source without figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unknown {
    /// The source, such as `cell 1` or a VM's name.
    pub source: String,
    /// The reason, in one line.
    pub why: String,
}

impl Unknown {
    /// Bounds the reason, and removes its control characters: it may come from another process.
    pub fn new(source: impl Into<String>, why: &str) -> Self {
        let plain = why
            .chars()
            .take(WHY_CHARS_MAX)
            .map(|c| if c.is_control() { ' ' } else { c });
        Self {
            source: source.into(),
            why: plain.collect(),
        }
    }
}

/// Whether a cell answers and takes VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CellState {
    /// The cell's process answers, and takes VMs.
    Runs,
    /// The cell's process answers, and takes no new VM.
    Cordoned,
    /// The cell has failed: nothing runs in it.
    Failed,
    /// A cell of another host, which the other cells take for dead.
    Dead,
    /// A cell of this host whose process did not answer in time.
    Silent,
}

impl CellState {
    /// The word for it, as in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Runs => "runs",
            Self::Cordoned => "cordoned",
            Self::Failed => "failed",
            Self::Dead => "dead",
            Self::Silent => "silent",
        }
    }
}

/// A cell. Users whom a cluster admits see its CPUs, nodes and free memory only.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CellReading {
    /// The cell's number.
    pub cell: u16,
    /// Its host, when there are several.
    pub host: Option<String>,
    /// Whether it is a cell of this host.
    pub is_here: bool,
    /// The cluster's view of it; none if no cell has reported.
    pub state: Option<CellState>,
    /// The id of its process.
    pub pid: Option<u32>,
    /// Numbers of the host's CPUs that it has.
    pub cpus: Vec<usize>,
    /// The NUMA nodes of its memory.
    pub nodes: Vec<u32>,
    /// Memory that it manages, in bytes.
    pub memory_bytes: Option<u64>,
    /// Memory of its VMs, in bytes.
    pub given_bytes: Option<u64>,
    /// Free memory, in bytes, as the cluster reports it to the users whom it admits.
    pub free_bytes: Option<u64>,
    /// Memory that it has lent, by borrower.
    pub lent: Option<Vec<LentMemory>>,
    /// Memory that it has borrowed, by lender.
    pub borrowed: Option<Vec<LentMemory>>,
    /// Number of its VMs' vCPUs.
    pub vcpus: Option<u32>,
    /// Names of its VMs.
    pub vms: Option<Vec<String>>,
    /// Moves of vCPUs between cells by its decision; none if it decides on none.
    pub cpu_lending: Option<CpuLending>,
}

/// A CPU of the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CpuReading {
    /// The CPU's number.
    pub cpu: usize,
    /// Time that it worked since the host's boot, in ticks.
    pub busy_ticks: u64,
    /// All time since then, in ticks.
    pub total_ticks: u64,
    /// Its run queue, as its cell reports it.
    pub queue: Option<CpuQueue>,
}

/// The run queue of a CPU, as a cell that schedules its vCPUs reports it (`cpus = "gangs"` in the cluster
/// file). Each figure is optional, since a cell of another release may leave some out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CpuQueue {
    /// VM whose gang runs.
    pub gang: Option<String>,
    /// Number of vCPUs that are ready and wait.
    pub waiting: Option<u32>,
    /// Number of vCPUs that halt often, so that Linux runs them without their gangs.
    pub ungated: Option<u32>,
    /// Load, in thousandths of a CPU.
    pub load_milli: Option<u64>,
    /// vCPUs that it got from other CPUs.
    pub moves: Option<QueueMoves>,
    /// Number of requests to give a vCPU away that it refused.
    pub refused: Option<u64>,
}

/// Number of vCPUs that came to a CPU, by the reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct QueueMoves {
    /// By the idle balancer.
    pub idle: Option<u64>,
    /// By the periodic balancer.
    pub periodic: Option<u64>,
    /// By a user's order.
    pub ordered: Option<u64>,
}

/// Whether a VM runs, and why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// Its files are being opened, or it reboots.
    Starting,
    /// Its vCPUs run.
    Running,
    /// Its vCPUs stand still by a user's order, `pause`.
    Paused,
    /// Writes of its disks wait for room on the host.
    DiskFull,
}

impl VmState {
    /// The word for it, as in `mirrorball ps`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::DiskFull => "disk full",
        }
    }
}

/// Settings, place and memory of a VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmReading {
    /// The VM's name.
    pub vm: String,
    /// Whether it starts, runs, is paused, or waits for room.
    pub state: VmState,
    /// Its cell, or its home's, in a cluster of the caller's.
    pub cell: Option<u16>,
    /// Its cell in the host's cluster, which has admitted the caller.
    pub host_cell: Option<u16>,
    /// The cells that it spans; empty if it does not.
    pub span: Vec<u16>,
    /// Number of its vCPUs.
    pub vcpus: u8,
    /// Its weight; `null` without one.
    pub cpu_weight: Option<u16>,
    /// Host CPUs that it uses at most; `null` without a limit.
    pub cpu_limit: Option<f64>,
    /// CPU time that its cell reserves for it, in CPUs; `null` without a reservation.
    pub cpu_reservation: Option<f64>,
    /// Its guest's memory, in bytes.
    pub memory_bytes: u64,
    /// Memory of the host that it takes, in bytes; measured every 5 s.
    pub host_bytes: Option<u64>,
    /// Memory of it that is swapped out, in bytes.
    pub swapped_bytes: Option<u64>,
    /// Memory that its cell borrowed for it, by lender.
    pub borrowed: Vec<LentMemory>,
}

/// Origin of a vCPU's move to a CPU of another cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MovedBy {
    /// Its cell, which decides when it returns, too.
    Decision,
    /// A command, which alone ends the move.
    Command,
}

/// A vCPU, and the thread that runs it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VcpuReading {
    /// The VM's name.
    pub vm: String,
    /// The vCPU's number.
    pub vcpu: u8,
    /// Time at which its counters arrived, by the clock of [`Reading::at_ms`].
    #[serde(skip)]
    pub at_ms: u64,
    /// Cell in which it runs.
    pub cell: Option<u16>,
    /// The shard's process.
    pub shard_pid: Option<i32>,
    /// Thread id (`gettid`) on the host.
    pub thread_id: Option<i32>,
    /// Host CPUs that the thread may use.
    pub cpus: Option<Vec<usize>>,
    /// Host CPU that it used last.
    pub last_cpu: Option<usize>,
    /// Whether its user has pinned it to CPUs.
    pub is_pinned: bool,
    /// Origin of its move to a CPU of another cell than its VM's; none if it is at home.
    pub moved_by: Option<MovedBy>,
    /// Whether it is halted now.
    pub is_halted: Option<bool>,
    /// Counters since the guest's boot.
    #[serde(flatten)]
    pub counters: Counters,
}

/// Counters of a vCPU's thread. They begin at 0 with each boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// CPU time, in milliseconds.
    pub ran_ms: Option<u64>,
    /// Time that it was ready and waited for a CPU, in milliseconds.
    pub waited_ms: Option<u64>,
    /// Time that it spun for a lock of the guest, in milliseconds. No cell reports it yet.
    pub spun_ms: Option<u64>,
    /// Time that it was halted, in milliseconds, without a halt that goes on.
    pub halted_ms: Option<u64>,
    /// Number of halts.
    pub halts: Option<u64>,
    /// Number of exits from the guest.
    pub exits: Option<u64>,
    /// Number of moves between CPUs, by the host's scheduler.
    pub migrations: Option<u64>,
}
