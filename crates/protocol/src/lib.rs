//! What cells say to one another, as state machines without I/O, clock or threads. An event goes in, packets to send and
//! things to do come out; the product, the simulator and the model checker drive the same ones.
//!
//! - [`agreement`]: a table that all cells have, whose keys are unique;
//! - [`grant`]: memory that cells give one another;
//! - [`multicast`]: messages to all along trees, and to one, in order.
//!
//! What all rely on: a *packet* may be lost, come twice, late, or before an earlier one. A cell is dead or alive; dead ones
//! never come back, since a cell that starts anew has another [`CellId`]. Who is alive is agreed on elsewhere and told to
//! each machine, in the same order to all; packets of the dead are dropped by whoever has been told.

pub mod agreement;
pub mod grant;
pub mod multicast;
#[cfg(any(test, feature = "stories"))]
pub mod rng;

use std::fmt;

use serde::{Deserialize, Serialize};

/// One life of a cell. Ordered as cells are numbered.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct CellId {
    /// The cell's place in the cluster.
    pub number: u16,
    /// Counts the monitors that this cell has had.
    pub life: u32,
}

impl fmt::Display for CellId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}", self.number, self.life)
    }
}
