//! The cells of a machine, and the costs of messages between them.

use cell::cluster::routes::MulticastRoutes;
use config::ConfigError;
use config::cluster::CellPlan;
use hostinfo::facts;
use knowledge::{Base, Fact, Machine};
use policy::memory::borrowing::Limits;

use crate::Time;

/// Rate at which a CPU allocates memory, in bytes per second: the order of magnitude of a host of today.
const ALLOCATION_RATE: u64 = 1 << 30;

/// Cells of one host, or of several.
#[derive(Clone, Debug)]
pub struct Cells {
    /// Resources of each cell.
    pub plans: Vec<CellPlan>,
    /// Costs of messages between them, as if all were on one host.
    pub ways: MulticastRoutes,
    /// The cells' own facts on these costs.
    pub known: MulticastRoutes,
    hosts: u16,
    stops: bool,
    borrows: bool,
}

impl Cells {
    /// `count` cells of the first host of a recorded machine; one for each node when none.
    ///
    /// # Errors
    /// If the machine has no CPUs for them.
    pub fn of(base: &Base, count: Option<u16>) -> Result<Self, ConfigError> {
        let machine = Machine::of(base);
        let plans = facts::division(&machine, count)?;
        // A recorded machine may have had other cells.
        let is_of_machine = |fact: &&Fact| !fact.name.starts_with("cell");
        let mut base: Base = base.facts().filter(is_of_machine).cloned().collect();
        let host = machine.hosts.first().map_or("", |host| &host.name);
        base.learn(facts::cells(&plans, host, None));
        let ways = MulticastRoutes::of(&base);
        Ok(Self {
            known: ways.clone(),
            ways,
            plans,
            hosts: 1,
            stops: false,
            borrows: false,
        })
    }

    /// The same cells on `hosts` hosts, neighbours together; on as many as there are cells at most.
    #[must_use]
    pub fn on_hosts(mut self, hosts: u16) -> Self {
        let cells = u16::try_from(self.plans.len()).unwrap_or(u16::MAX);
        self.hosts = hosts.clamp(1, cells.max(1));
        if self.hosts > 1 {
            for number in 0..cells {
                let host = self.host_of(number);
                self.plans[usize::from(number)].host = Some(format!("host{host}"));
            }
            let cell = |plan: &CellPlan| {
                let host = plan.host.as_deref().unwrap_or_default();
                Fact::new("cell", [i64::from(plan.number).into(), host.into()])
            };
            self.known = MulticastRoutes::of(&self.plans.iter().map(cell).collect());
        }
        self
    }

    /// The same cells, whose VMs end when their host has lost its membership.
    #[must_use]
    pub fn that_stop(self) -> Self {
        Self { stops: true, ..self }
    }

    /// The same cells, which borrow memory by themselves.
    #[must_use]
    pub fn that_borrow(self) -> Self {
        Self {
            borrows: true,
            ..self
        }
    }

    /// Amounts at which a cell borrows; none if cells lend by command only.
    pub fn limits(&self, plan: &CellPlan) -> Option<Limits> {
        let measured = Limits::measured(ALLOCATION_RATE, plan.cpus.len(), plan.memory_bytes);
        self.borrows.then_some(measured)
    }

    /// Whether the VMs of a lost host end.
    pub fn stop(&self) -> bool {
        self.stops
    }

    /// Number of hosts.
    pub fn hosts(&self) -> u16 {
        self.hosts
    }

    /// A cell's host.
    pub fn host_of(&self, number: u16) -> u16 {
        let cells = self.plans.len().max(1);
        // Below the number of hosts.
        (usize::from(number) * usize::from(self.hosts) / cells) as u16
    }

    /// Whether two cells are on one host.
    pub fn are_near(&self, one: u16, other: u16) -> bool {
        self.host_of(one) == self.host_of(other)
    }

    /// Time from the send of a message to its receipt by a polling receiver.
    pub fn latency_ns(&self, from: u16, to: u16) -> Time {
        self.ways.latency_ns(from, to)
    }
}
