//! Effects that a cell's state has decided.

use config::cluster::RegionAccess;
use protocol::CellId;
use protocol::grant::Amounts;
use registry::cluster::interface::{CellResponse, LentMemory};
use registry::cluster::windows::CellReport;

use super::{CellMessage, Client};

/// An effect that the caller of a state carries out.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Action {
    /// Writes the amounts that are lent, all of them, before the effects that follow.
    PersistLent(Amounts),
    /// Writes the part of them that borrowers requested, before the effects that follow.
    PersistLentOnRequest(Amounts),
    /// Sends a message to a cell.
    Send(CellId, CellMessage),
    /// Answers a client.
    Answer(Client, CellResponse),
    /// Serves a VM of this cell, and answers the client that requests it; also one that was set aside, if
    /// the flag is set.
    Adopt(Client, String, bool),
    /// Creates the file of a shared region, with these nodes for its memory, before the actions that follow.
    CreateRegion {
        /// Name of the region.
        name: String,
        /// Size of the region.
        bytes: u64,
        /// Nodes of the host.
        nodes: Vec<u32>,
    },
    /// Sends a client a descriptor of a shared region's file.
    SendRegion {
        /// Client that receives the descriptor.
        client: Client,
        /// Name of the region.
        name: String,
        /// Access of the client's VM.
        access: RegionAccess,
        /// Memory of other cells that the region has, by lender.
        borrowed: Vec<LentMemory>,
    },
    /// Seeks the file of a shared region at its members, and reports it (`State::region_sought`). The VMs
    /// of the list have requested it, and don't have it.
    SearchRegion {
        /// Name of the region.
        name: String,
        /// Size of the region.
        bytes: u64,
        /// The VMs without it.
        without: Vec<String>,
    },
    /// Checks whether a VM has the file of a shared region, and reports it (`State::region_probed`).
    ProbeRegion {
        /// Name of the region.
        name: String,
        /// Whether this process has the file.
        is_held: bool,
    },
    /// Closes the file of a shared region.
    CloseRegion(String),
    /// Has the members of a shared region record the cells of its memory, and reports it
    /// (`State::lenders_recorded`).
    RecordLenders {
        /// Name of the region.
        name: String,
        /// Number of the move.
        number: u64,
        /// Memory of the region by cell.
        borrowed: Vec<LentMemory>,
    },
    /// Moves the pages of a shared region, and reports it (`State::region_pages_moved`).
    MoveRegionPages {
        /// Name of the region.
        name: String,
        /// Number of the move.
        number: u64,
        /// Size of the region.
        bytes: u64,
        /// Nodes of the host for its memory.
        nodes: Vec<u32>,
        /// Nodes that it may have had so far.
        former: Vec<u32>,
    },
    /// Reports to a client where the vCPUs of the cell's VMs are.
    ReportVcpus(Client),
    /// Reports to a client the moves of vCPUs between cells by decision.
    ReportCpuLending(Client),
    /// Takes the report of a cell as the arbiter of windows, and replies to the client.
    ArrangeWindows(Client, CellReport),
    /// Takes a vCPU of a VM of this cell back from a lender that needs its CPU.
    ReturnCpu {
        /// The client that waits for it.
        client: Client,
        /// The VM's name.
        vm: String,
        /// The vCPU's number.
        vcpu: u8,
        /// The lender.
        lender: u16,
    },
    /// Reports to a client the protocols that this program speaks.
    ReportProtocols(Client),
    /// Reports to a client when the VMs of the cell's last process are adopted.
    ReportAdopted(Client),
    /// Ends a VM that depends on a failed cell, in which it may have run.
    EndVm {
        /// Name of the VM.
        name: String,
        /// Number of the failed cell.
        failed: u16,
    },
    /// Gives a VM that was left up after a while, unless its next process has come (`State::give_up`).
    AwaitLeft(String, u64),
    /// Reports when the host has no VM any more that depends on this cell (`State::bury`).
    AwaitEnd(u16),
    /// Ends the process.
    End,
}
