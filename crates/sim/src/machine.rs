//! The cells of a machine, and what messages between them cost.

use cell::cluster::routes::Ways;
use cell::known;
use config::ConfigError;
use config::cluster::CellPlan;
use knowledge::{Base, Fact, Machine};

use crate::Time;

/// Cells of one host.
#[derive(Clone, Debug)]
pub struct Cells {
    /// What each has.
    pub plans: Vec<CellPlan>,
    /// What messages between them cost.
    pub ways: Ways,
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
        Ok(Self {
            ways: Ways::of(&base),
            plans,
        })
    }

    /// From the send of a message to its receipt by one who polls.
    pub fn latency_ns(&self, from: u16, to: u16) -> Time {
        self.ways.latency_ns(from, to)
    }
}
