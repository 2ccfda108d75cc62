//! The protocols between cells, as state machines without I/O, clock or threads. The inputs are events, the
//! outputs packets and other effects. The product, the simulator and the model checker drive the same state
//! machines.
//!
//! - [`agreement`]: a replicated table with unique keys;
//! - [`grant`]: memory that cells lend one another;
//! - [`multicast`]: ordered multicast along trees, and unicast;
//! - [`region`]: regions of memory that VMs share.
//!
//! Assumptions: a *packet* may be lost, duplicated, delayed or reordered. Cells fail by stopping: a dead cell
//! never returns, since a restarted cell has another [`CellId`]. Membership is agreed on elsewhere, and each
//! state machine receives the deaths in the same order. A state machine that has received a death drops the
//! packets of the dead cell.

pub mod agreement;
pub mod grant;
#[cfg(any(test, feature = "stories"))]
pub mod links;
pub mod multicast;
pub mod region;
#[cfg(any(test, feature = "stories"))]
pub mod rng;

use std::fmt;

use serde::{Deserialize, Serialize};

/// One incarnation of a cell. Ordered by cell number.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct CellId {
    /// The cell's number in the cluster.
    pub number: u16,
    /// Incarnation: the number of monitors that this cell has had.
    pub life: u32,
}

impl fmt::Display for CellId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}", self.number, self.life)
    }
}
