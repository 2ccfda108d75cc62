//! A vCPU on its way from one shard to another: everything that it is.

use std::fmt;

use apic::LocalApic;
use serde::{Deserialize, Serialize};

use super::pending_events::Signals;
use crate::arch::x86_64::state::Processor;

/// What a vCPU does when it is not running.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum ActivityState {
    /// It waits for a start-up interrupt (SDM vol. 3, 10.4).
    WaitForSipi,
    /// It runs.
    Active,
    /// It waits for an interrupt, which wakes it only if interrupts were enabled.
    Halted {
        /// They were.
        interruptible: bool,
    },
}

/// The vCPU itself.
#[derive(Serialize, Deserialize)]
pub struct VcpuState {
    /// Its registers.
    pub processor: Processor,
    /// Its interrupt controller.
    pub apic: LocalApic,
    /// What it does.
    pub activity: ActivityState,
    /// Where it shares the ends of interrupts ([`super::pv_eoi`]).
    pub pv_eoi: u64,
    /// What its guest has added to its time-stamp counter.
    pub tsc_adjustment: u64,
}

/// A vCPU is to move.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct MoveOrder {
    /// To this shard.
    pub to: u8,
    /// The home numbers its orders, and knows the outcome of each by that.
    pub number: u64,
}

/// How a move came out.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The number of its order.
    pub order: u64,
    /// Moves of that vCPU so far.
    pub version: u64,
    /// How long it stood still, nanoseconds.
    pub still_ns: u64,
    /// It is where it was.
    pub refused: bool,
}

/// What its move is, for [`super::residency`].
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// What had come for it and was not looked at.
    pub signals: Signals,
    /// The number of its order.
    pub order: u64,
    /// Its moves so far, this one included.
    pub version: u64,
    /// The shard that it comes from.
    pub from: u8,
    /// It comes back: the other shard could not take it.
    pub refused: bool,
    /// Since when it stands still, by the guest's clock, nanoseconds.
    pub still_since_ns: u64,
}

/// The vCPU and its move.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct MigratingVcpu<S = VcpuState> {
    /// What travels.
    pub state: S,
    /// How.
    pub transfer: Transfer,
}

impl fmt::Debug for VcpuState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("VcpuState")
            .field("activity", &self.activity)
            .finish_non_exhaustive()
    }
}
