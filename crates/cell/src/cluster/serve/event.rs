//! Events of a cell.

use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;

use protocol::CellId;
use registry::cluster::interface::{CellRequest, CellResponse, LentCpu};

use super::assertions::Asserted;
use super::region_actions::SoughtRegion;
use crate::cluster::link::Link;
use crate::cluster::membership::MembershipEvent;
use crate::cluster::state::{Awaited, BusyCpus, CellMessage, Client, PagesMoved};

/// An event that changes the cell's state.
pub(super) enum Event {
    Linked(Box<Link>),
    /// The cells among those that were calling this one which are awaited; empty: no further one.
    Called(Vec<u16>),
    Waited,
    Received(CellId, CellMessage),
    Dead(CellId),
    Connected(Client, UnixStream),
    Requested(Client, CellRequest),
    Disconnected(Client),
    /// Whether this client still waits for these cells.
    Overdue(Client, Awaited),
    /// Whether this cell has sent its hello.
    HelloDue(CellId),
    /// This cell ended its link some time ago. Says whether it was seen to live since: its next incarnation
    /// takes a moment to be told apart.
    LinkEnded(CellId, bool),
    OrphansLate,
    /// Time is up for a VM's next process to come.
    LeftLate(String, u64),
    /// The asserted facts have changed.
    Asserted(Box<Asserted>),
    /// The response to a client's request is ready.
    Responded(Client, CellResponse),
    /// No VM of the host depends on this failed cell any more.
    NoDependents(u16),
    /// The search for the file of a shared region has ended.
    RegionSought(SoughtRegion),
    /// A shared region that had no member and was used is to be probed again.
    RegionProbeDue(String),
    /// Members that have not recorded the cells of a shared region's memory, each with the reason, by region
    /// and number of the move.
    LendersRecorded(String, u64, Vec<(String, String)>),
    /// The move of a shared region's pages has ended, by region and number of the move.
    RegionPagesMoved(String, u64, PagesMoved),
    Tick,
    /// Memory may be missing, or to be returned.
    Pass,
    /// The busy vCPUs of the cell. The answer is sent to the balancer of cells.
    CpusMeasured(BusyCpus, Sender<Vec<LentCpu>>),
    /// A cell of this host has no version in common with this one.
    VersionMismatch(String),
    /// The membership of the cells of all hosts has changed.
    Changed(MembershipEvent),
}
