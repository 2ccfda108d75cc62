//! What a cell can be asked, and what it answers: a line of JSON each way.

use config::cluster::CellPlan;
use serde::{Deserialize, Serialize};

/// What a VM takes of its cell.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmShare {
    /// vCPUs.
    pub vcpus: u32,
    /// Guest memory.
    pub memory_bytes: u64,
}

/// A VM that is to run in the cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// What it takes.
    pub share: VmShare,
    /// Only this cell will do.
    pub only: Option<u16>,
    /// Another cell has said that there is room here.
    pub sent: bool,
    /// It runs in this cell already, whose process has died since.
    pub runs: bool,
}

/// What a client asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum Ask {
    /// A place for a VM. It is the VM's until the connection ends.
    Host(Host),
    /// A VM of this cell has ended. Answered when all cells have heard of it, so that the name is free.
    Leave {
        /// Its name.
        name: String,
    },
    /// What there is in the cluster.
    Status,
    /// The cell's process is to end. VMs run on.
    End,
}

/// The answer.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// The VM runs in this cell, with these CPUs and nodes.
    Hosted(CellPlan),
    /// Ask this cell.
    Elsewhere {
        /// Which.
        cell: u16,
    },
    /// It can't be.
    Refused {
        /// Why, and what to do about it.
        why: String,
    },
    /// Done.
    Done,
    /// What there is.
    Status(Status),
}

/// The cluster as one cell knows it.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The cells, by number.
    pub cells: Vec<CellStatus>,
    /// Who says so has heard from all cells that it has links to.
    pub ready: bool,
}

/// One cell.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CellStatus {
    /// What it has.
    #[serde(flatten)]
    pub plan: CellPlan,
    /// Its process.
    pub pid: u32,
    /// Counts its processes; none when it does not answer.
    pub life: Option<u32>,
    /// What it has given out.
    pub given_bytes: u64,
    /// vCPUs of its VMs.
    pub vcpus: u32,
    /// The VMs that run there.
    pub vms: Vec<String>,
}
