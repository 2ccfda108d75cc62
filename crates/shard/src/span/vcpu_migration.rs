//! Migrating vCPU: the complete state of a vCPU in transit between two shards.

use std::fmt;

use apic::LocalApic;
use serde::{Deserialize, Serialize};

use super::pending_events::Signals;
use crate::arch::x86_64::state::Processor;

/// Activity state of a vCPU, after the states of the Intel SDM (vol. 3, 25.4.2).
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum ActivityState {
    /// Waits for a start-up interrupt (SDM vol. 3, 10.4).
    WaitForSipi,
    /// Executes instructions.
    Active,
    /// Halted: waits for an interrupt, which wakes it only if interrupts were enabled.
    Halted {
        /// Whether interrupts were enabled.
        interruptible: bool,
    },
}

/// Registers and local APIC of a vCPU, as they move to another shard.
#[derive(Serialize, Deserialize)]
pub struct VcpuState {
    /// Registers of the vCPU, and its pending events.
    pub processor: Processor,
    /// Local APIC with its pending interrupts and timer.
    pub apic: LocalApic,
    /// Whether it runs, is halted, or waits for a start-up interrupt.
    pub activity: ActivityState,
    /// Register of PV EOI ([`super::pv_eoi`]).
    pub pv_eoi: u64,
    /// Ticks that the guest has added to the TSC of this vCPU.
    pub tsc_adjustment: u64,
}

/// Order to a vCPU to migrate.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct MoveOrder {
    /// Target shard.
    pub to: u8,
    /// Number of the order, by which the home matches its outcome.
    pub number: u64,
}

/// Outcome of a move.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Number of its order.
    pub order: u64,
    /// Moves of the vCPU so far.
    pub version: u64,
    /// Time for which the vCPU was paused, nanoseconds.
    pub still_ns: u64,
    /// Whether the target refused the vCPU, which is back in its source.
    pub refused: bool,
}

/// Metadata of a move, for [`super::residency`].
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// Events that had arrived for the vCPU and were not served.
    pub signals: Signals,
    /// Number of its order.
    pub order: u64,
    /// Moves of the vCPU so far, this one included.
    pub version: u64,
    /// Source shard.
    pub from: u8,
    /// Whether the vCPU returns because its target refused it.
    pub refused: bool,
    /// Start of the vCPU's pause by the guest's clock, nanoseconds.
    pub still_since_ns: u64,
}

/// A vCPU in transit.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct MigratingVcpu<S = VcpuState> {
    /// State of the vCPU.
    pub state: S,
    /// Metadata of the move.
    pub transfer: Transfer,
}

impl fmt::Debug for VcpuState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("VcpuState")
            .field("activity", &self.activity)
            .finish_non_exhaustive()
    }
}
