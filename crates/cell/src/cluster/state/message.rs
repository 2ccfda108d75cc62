//! Messages between cells, and the entries of the table that every cell has a copy of.

use config::cluster::CellPlan;
use protocol::agreement::Message;
use protocol::grant::{self, Amounts};
use protocol::multicast::Packet;
use registry::cluster::interface::{BorrowedCpu, LentMemory, RegionGrant, VmShare};
use serde::{Deserialize, Serialize};

/// Key of an entry of the table.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub enum Key {
    /// A cell, by its number.
    Cell(u16),
    /// A VM, by its name.
    Vm(String),
}

/// Value of an entry of the table.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Value {
    /// Resources of a cell; its owner is the cell itself.
    Cell {
        /// The id of its process.
        pid: u32,
        /// The cell's CPUs, nodes and memory.
        plan: CellPlan,
        /// Memory that the cell has lent, by borrower.
        lent: Amounts,
        /// The part of it that the borrowers requested by themselves.
        #[serde(default)]
        lent_on_request: Amounts,
        /// Whether the cell takes no new VM.
        #[serde(default)]
        is_cordoned: bool,
        /// Shared regions of its memory that have a file.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        regions: Vec<RegionEntry>,
    },
    /// Resources that a VM takes; its owner is the cell that runs it, or its home.
    Vm {
        /// The part of a cell that the VM takes.
        share: VmShare,
        /// The VM's memory that is not its cell's, by lender.
        borrowed: Vec<LentMemory>,
        /// The only cells that it may depend on; any cell when empty.
        #[serde(default)]
        cells: Vec<u16>,
        /// Its vCPUs on CPUs of other cells.
        #[serde(default)]
        borrowed_cpus: Vec<BorrowedCpu>,
        /// Its grants of shared regions. Those of the entry name no lenders, which are in the home's entry.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        regions: Vec<RegionGrant>,
    },
}

/// A shared region in its home's entry.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RegionEntry {
    /// Name of the region.
    pub name: String,
    /// Its size, in bytes.
    pub bytes: u64,
    /// The part of it that is not the home's, by lender.
    pub borrowed: Vec<LentMemory>,
}

/// A packet between cells.
pub type CellMessage = Packet<CellPayload>;

/// A message between cells, over whichever transport.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum CellPayload {
    /// About the table that all cells have.
    Table(Message<Key, Value>),
    /// About memory that one cell has from another.
    Grant(grant::Message),
}
