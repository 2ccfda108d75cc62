//! The cells of a machine, and what messages between them cost.

use cell::known;
use config::ConfigError;
use config::cluster::CellPlan;
use knowledge::route::Costs;
use knowledge::{Base, Fact, Machine};

use crate::Time;

/// Waking a receiver that has blocked, measured: half of a round trip between two that block at once.
pub const WAKE_NS: Time = 12_000;

/// Cells of one host.
#[derive(Clone, Debug)]
pub struct Cells {
    /// What each has.
    pub plans: Vec<CellPlan>,
    /// What messages between them cost.
    costs: Costs,
}

impl Cells {
    /// `count` cells of the first host of a machine that is known; one for each node when none.
    ///
    /// # Errors
    /// If the machine has no CPUs for them.
    pub fn of(base: &Base, count: Option<u16>) -> Result<Self, ConfigError> {
        let machine = Machine::of(base);
        let plans = known::division(&machine, count)?;
        // A recorded machine may have had other cells.
        let is_of_machine = |fact: &&Fact| !fact.name.starts_with("cell");
        let mut base: Base = base.facts().filter(is_of_machine).cloned().collect();
        let host = machine.hosts.first().map_or("", |host| &host.name);
        base.learn(known::cells(&plans, host, None));
        let numbers: Vec<u16> = plans.iter().map(|plan| plan.number).collect();
        Ok(Self {
            costs: Costs::of(&base, &numbers),
            plans,
        })
    }

    /// From the send of a message to its receipt by one who polls.
    pub fn latency_ns(&self, from: u16, to: u16) -> Time {
        self.costs.latency_ns[usize::from(from)][usize::from(to)]
    }

    /// What a message costs its sender before the next.
    pub fn send_ns(&self) -> Time {
        self.costs.send_ns
    }
}
