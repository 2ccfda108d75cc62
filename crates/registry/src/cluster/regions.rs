//! Regions of memory that VMs share, as cells grant and report them.

use config::cluster::RegionAccess;
use serde::{Deserialize, Serialize};

use super::interface::LentMemory;

/// A grant of a shared region to a VM. The VM depends on the region's home, and on the cells that lent memory
/// for the region.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RegionGrant {
    /// The region's name.
    pub name: String,
    /// The cell that gives the memory.
    pub home: u16,
    /// The region's size, in bytes.
    pub bytes: u64,
    /// Access of the VM.
    pub access: RegionAccess,
    /// Memory that other cells lent the home for it, by lender; empty before the VM has the region. While the
    /// memory moves, both the former and the new cells are in the list, and the home with its own part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub borrowed: Vec<LentMemory>,
}

impl RegionGrant {
    /// Whether the region's memory is in part of this cell.
    pub fn depends_on(&self, cell: u16) -> bool {
        self.home == cell || self.borrowed.iter().any(|part| part.cell == cell)
    }
}

/// A shared region that has members.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RegionStatus {
    /// The region's name.
    pub name: String,
    /// The region's size, in bytes.
    pub bytes: u64,
    /// Memory that other cells lent the cell for it, by lender.
    pub borrowed: Vec<LentMemory>,
    /// The VMs that have it.
    pub members: Vec<RegionMember>,
}

/// A VM that has a shared region.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RegionMember {
    /// The VM's name.
    pub vm: String,
    /// The VM's cell.
    pub cell: u16,
    /// Access of the VM.
    pub access: RegionAccess,
}

/// Outcome of a move of a shared region's memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RegionMoved {
    /// Bytes that were on other nodes of the host before.
    pub moved_bytes: u64,
    /// Members that did not record the new cell, each with the reason. They depend on the former cells, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_recorded: Vec<(String, String)>,
}
