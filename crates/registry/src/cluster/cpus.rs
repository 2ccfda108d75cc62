//! CPUs of cells: their run queues and loads, and those that cells lend one another.

use std::ops::Not;

use serde::{Deserialize, Serialize};

/// vCPU that runs on a CPU of another cell of the host than its VM's.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct BorrowedCpu {
    /// The vCPU's number.
    pub vcpu: u8,
    /// The lender: the cell that has the CPU.
    pub cell: u16,
    /// The host's number of the CPU.
    pub cpu: usize,
    /// Whether its cell has decided on the move, and decides when it ends; a command ends its own moves.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub is_automatic: bool,
}

/// CPU of a cell on which a vCPU of another cell's VM runs.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LentCpu {
    /// The host's number of the CPU.
    pub cpu: usize,
    /// The cell that serves the VM.
    pub cell: u16,
    /// The VM's name.
    pub vm: String,
    /// The vCPU's number.
    pub vcpu: u8,
    /// Whether the VM's cell has decided on the move.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub is_automatic: bool,
}

/// Run queue of a CPU whose driver chooses the vCPU that it runs. Counts begin with the cell's process.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CpuQueue {
    /// The host's number of the CPU.
    pub cpu: usize,
    /// VM that it runs.
    pub gang: Option<String>,
    /// vCPUs that are ready and wait.
    pub waiting: u32,
    /// vCPUs that halt often, so that Linux runs them without their gangs.
    pub ungated: u32,
    /// vCPUs that are not idle, running and waiting.
    pub load: u32,
    /// vCPUs that came by the idle balancer.
    pub moved_idle: u64,
    /// vCPUs that came by the periodic balancer.
    pub moved_periodic: u64,
    /// vCPUs that came by an order.
    pub moved_ordered: u64,
    /// Moves that it refused, or that were refused to it.
    pub refused: u64,
}

/// Load of a cell's CPUs, as it was in the last second.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct CpuLoad {
    /// Number of its CPUs.
    pub cpus: u32,
    /// Busy vCPUs of its VMs on them.
    pub busy: u32,
    /// vCPUs of other cells' VMs on them, and CPUs that it has promised.
    pub lent: u32,
    /// The CPU that it would lend.
    pub cpu: usize,
}

/// Moves of vCPUs between cells by decision, and reasons why none moved, since the cell's process began.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CpuLending {
    /// Evaluations in which one of its vCPUs wanted another cell. A release before the key counts none.
    pub sought: u64,
    /// vCPUs of its VMs that moved to CPUs of other cells.
    pub moved: u64,
    /// vCPUs of its VMs that it took back to its own CPUs.
    pub returned: u64,
    /// vCPUs of other cells' VMs that it has sent back from its CPUs.
    pub recalled: u64,
    /// Evaluations in which a vCPU wanted another cell, and none had an idle CPU.
    pub no_idle_cpu: u64,
    /// Evaluations in which one had, and its load was too much like this cell's.
    pub balanced: u64,
    /// Evaluations in which no cell reported its load.
    pub no_load: u64,
    /// Moves and returns that a cell, the host or the VM refused.
    pub refused: u64,
}
