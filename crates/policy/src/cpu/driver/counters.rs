//! Counts of a driver's decisions.

use super::super::message::{REFUSALS, Refusal};
use super::super::topology::MoveKind;

/// Counts since the driver began.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Counters {
    /// Changes of the vCPU that it runs.
    pub switches: u64,
    /// Starts of a vCPU by its VM's rank.
    pub entitled: u64,
    /// Starts of a vCPU in a hole of the schedule.
    pub fillers: u64,
    /// Fillers that were stopped because they spun.
    pub spins: u64,
    /// Gangs that it left because a CPU did not follow in time.
    pub stragglers: u64,
    /// Requests to other drivers to run the algorithm again.
    pub reconsiders: u64,
    /// Requests that it left out until the next tick, because it had sent the CPU many.
    pub calls_left_out: u64,
    /// vCPUs that came, by kind of move.
    pub moves: [u64; 3],
    /// Moves refused to it or by it, by [`Refusal`].
    pub refused: [u64; REFUSALS],
    /// Searches of the idle balancer.
    pub searches: u64,
    /// Passes of the periodic balancer.
    pub passes: u64,
    /// Nodes of the load tree that a pass left uneven for want of a candidate.
    pub unresolved: u64,
    /// Times that a vCPU left its gang because it halts often, or had to wait again.
    pub gate_changes: u64,
    /// Events of vCPUs that are neither here nor known to be elsewhere.
    pub lost_events: u64,
    /// vCPUs that came from a lost CPU, or by the cell, though another one of the VM was or would be here.
    pub doubled: u64,
}

impl Counters {
    /// Increments the count of moves of this kind.
    pub fn count_move(&mut self, kind: MoveKind) {
        self.moves[kind as usize] += 1;
    }

    /// Increments the count of refusals for this reason.
    pub fn count_refusal(&mut self, refusal: Refusal) {
        self.refused[refusal as usize] += 1;
    }
}
