//! The cells of a machine, and what messages between them cost.

use config::ConfigError;
use config::cluster::{CellPlan, ClusterSpec, HostNode, HostNodes};
use knowledge::Machine;

use crate::Time;

/// A message between two CPUs that share a cache, as `make bench-channels` measured it: half a round trip.
const NEAR_NS: Time = 140;
/// ACPI's distance of a node to itself.
const NEAR_DISTANCE: i64 = 10;
/// What a message costs its sender before the next: 36 million a second, measured.
pub const SEND_NS: Time = 28;
/// Waking a receiver that has blocked, measured: half of a round trip between two that block at once.
pub const WAKE_NS: Time = 12_000;

/// Cells of one host, or of several.
#[derive(Clone, Debug)]
pub struct Cells {
    /// What each has.
    pub plans: Vec<CellPlan>,
    /// From each to each.
    latency_ns: Vec<Vec<Time>>,
    hosts: u16,
}

impl Cells {
    /// `count` cells of a machine's first host; one for each node when none.
    ///
    /// # Errors
    /// If the machine has no CPUs for them.
    pub fn of(machine: &Machine, count: Option<u16>) -> Result<Self, ConfigError> {
        let host = machine.hosts.first().cloned().unwrap_or_default();
        let numbers: Vec<i64> = host.nodes.iter().map(|node| node.number).collect();
        let nodes = host.nodes.iter().filter_map(|node| {
            let cpus = node
                .cpus
                .iter()
                .filter_map(|cpu| usize::try_from(cpu.number).ok());
            let known = HostNode {
                cpus: cpus.collect(),
                memory_bytes: u64::try_from(node.memory_bytes).ok()?,
            };
            Some((u32::try_from(node.number).ok()?, known))
        });
        let nodes = HostNodes(nodes.collect());
        let spec = match count {
            Some(count) => ClusterSpec::of_count(&nodes, count)?,
            None => ClusterSpec::of_nodes(&nodes),
        };
        let plans = spec.cells(&nodes, None, "the machine", "")?;
        let place = |plan: &CellPlan| {
            let node = plan.nodes.first().copied().map_or(0, i64::from);
            numbers.iter().position(|number| *number == node)
        };
        let latency = |from: &CellPlan, to: &CellPlan| {
            let known = place(from).zip(place(to));
            let distance = known.and_then(|(from, to)| host.distances.get(from)?.get(to).copied());
            let distance = distance.filter(|distance| *distance > 0).unwrap_or(NEAR_DISTANCE);
            NEAR_NS * distance.unsigned_abs() / NEAR_DISTANCE.unsigned_abs()
        };
        let latency_ns = plans
            .iter()
            .map(|from| plans.iter().map(|to| latency(from, to)).collect());
        Ok(Self {
            latency_ns: latency_ns.collect(),
            plans,
            hosts: 1,
        })
    }

    /// The same cells on that many hosts, neighbours together; on as many as there are cells at most.
    #[must_use]
    pub fn on_hosts(mut self, hosts: u16) -> Self {
        let cells = u16::try_from(self.plans.len()).unwrap_or(u16::MAX);
        self.hosts = hosts.clamp(1, cells.max(1));
        if self.hosts > 1 {
            for number in 0..cells {
                let host = self.host_of(number);
                self.plans[usize::from(number)].host = Some(format!("host{host}"));
            }
        }
        self
    }

    /// How many hosts.
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

    /// From the send of a message to its receipt by one who polls.
    pub fn latency_ns(&self, from: u16, to: u16) -> Time {
        self.latency_ns[usize::from(from)][usize::from(to)]
    }
}
