//! The cells of a machine, and what messages between them cost.

use cell::cluster::routes::Ways;
use config::ConfigError;
use config::cluster::{CellPlan, ClusterSpec, HostNode, HostNodes};
use knowledge::Machine;

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
    /// `count` cells of a machine's first host; one for each node when none.
    ///
    /// # Errors
    /// If the machine has no CPUs for them.
    pub fn of(machine: &Machine, count: Option<u16>) -> Result<Self, ConfigError> {
        let host = machine.hosts.first().cloned().unwrap_or_default();
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
        let ways = Ways::of(&host);
        Ok(Self { plans, ways })
    }

    /// From the send of a message to its receipt by one who polls.
    pub fn latency_ns(&self, from: u16, to: u16) -> Time {
        let plan = |number| &self.plans[usize::from(number)];
        self.ways.latency_ns(None, plan(from), plan(to))
    }
}
