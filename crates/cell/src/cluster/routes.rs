//! By which cells a message to all goes: a tree by what messages between them cost, as far as that is known.
//!
//! [`Ways::costs`] is the one place that says what they cost.

use std::collections::BTreeMap;

use config::cluster::CellPlan;
use knowledge::machine::Host;
use knowledge::route::{Costs, Tree};
use protocol::CellId;
use protocol::multicast::Hop;

#[cfg(test)]
mod tests;

/// A message between two CPUs that share a cache, as `make bench-channels` measured it: half a round trip.
const NEAR_NS: u64 = 140;
/// ACPI's distance of a node to itself, and to another when it is not known.
const NEAR_DISTANCE: i64 = 10;
const OTHER_DISTANCE: i64 = 20;
/// A message between hosts; assumed.
const HOST_NS: u64 = 50_000;
/// What a message costs its sender before the next if the receiver has blocked, which it has unless it just heard something:
/// posting it, and the system call that wakes; measured.
pub const SEND_NS: u64 = 1_000;
/// Waking a receiver that has blocked, measured: half of a round trip between two that block at once.
pub const WAKE_NS: u64 = 12_000;
/// What any message costs its receiver beside what it sends then; assumed.
pub const HANDLE_NS: u64 = 2_000;

/// What is known of the ways between cells.
#[derive(Clone, Debug)]
pub struct Ways {
    /// Between the nodes of this host, relative to [`NEAR_DISTANCE`].
    distances: BTreeMap<(u32, u32), i64>,
    relay_ns: u64,
}

impl Default for Ways {
    fn default() -> Self {
        Self {
            distances: BTreeMap::new(),
            relay_ns: WAKE_NS + HANDLE_NS,
        }
    }
}

impl Ways {
    /// What is known of this host.
    pub fn of(host: &Host) -> Self {
        let numbers = || host.nodes.iter().map(|node| u32::try_from(node.number).ok());
        let mut distances = BTreeMap::new();
        for (from, row) in numbers().zip(&host.distances) {
            for (to, distance) in numbers().zip(row).filter(|(_, distance)| **distance > 0) {
                distances.extend(from.zip(to).map(|way| (way, *distance)));
            }
        }
        Self {
            distances,
            ..Self::default()
        }
    }

    /// The same, as if no cell could pass a message on in time.
    #[must_use]
    pub fn one_by_one(self) -> Self {
        Self {
            relay_ns: u64::MAX / 4,
            ..self
        }
    }

    /// From the send of a message to its receipt by one who polls; `here` is this host's name.
    pub fn latency_ns(&self, here: Option<&str>, from: &CellPlan, to: &CellPlan) -> u64 {
        if from.host != to.host {
            return HOST_NS;
        }
        let node = |cell: &CellPlan| cell.nodes.first().copied().unwrap_or(0);
        let (from_node, to_node) = (node(from), node(to));
        let known = self.distances.get(&(from_node, to_node));
        let distance = known.copied().filter(|_| from.host.as_deref() == here);
        let unknown = if from_node == to_node {
            NEAR_DISTANCE
        } else {
            OTHER_DISTANCE
        };
        NEAR_NS * distance.unwrap_or(unknown).unsigned_abs() / NEAR_DISTANCE.unsigned_abs()
    }

    /// What messages between these cells cost; the first one is this cell.
    pub fn costs(&self, cells: &[&CellPlan]) -> Costs {
        let here = cells.first().and_then(|cell| cell.host.as_deref());
        let latencies = |from: &&CellPlan| {
            let row = cells.iter().map(|to| self.latency_ns(here, from, to));
            row.collect()
        };
        let mut nodes = BTreeMap::new();
        let node = |cell: &&CellPlan| {
            let next = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
            *nodes
                .entry((cell.host.clone(), cell.nodes.first().copied()))
                .or_insert(next)
        };
        Costs {
            latency_ns: cells.iter().map(latencies).collect(),
            send_ns: SEND_NS,
            relay_ns: self.relay_ns,
            node: cells.iter().map(node).collect(),
        }
    }
}

/// The tree of one cell.
#[derive(Clone, Debug, Default)]
pub struct Route {
    ways: Ways,
    cells: Vec<CellId>,
    hops: Vec<Hop>,
}

impl Route {
    /// By what is known of the ways.
    pub fn new(ways: Ways) -> Self {
        Self {
            ways,
            ..Self::default()
        }
    }

    /// The cells that it was made for.
    pub fn cells(&self) -> &[CellId] {
        &self.cells
    }

    /// Each cell before those below it.
    pub fn hops(&self) -> &[Hop] {
        &self.hops
    }

    /// Makes it for other cells; those without a plan are left out.
    pub fn lead(&mut self, own: &CellPlan, cells: Vec<CellId>, plan: impl Fn(CellId) -> Option<CellPlan>) {
        let known: Vec<(CellId, CellPlan)> = cells
            .iter()
            .filter_map(|cell| Some((*cell, plan(*cell)?)))
            .collect();
        let plans: Vec<&CellPlan> = [own]
            .into_iter()
            .chain(known.iter().map(|(_, plan)| plan))
            .collect();
        let tree = Tree::best(&self.ways.costs(&plans), 0);
        self.cells = cells;
        self.hops = below(&tree, 0, &|place| known[place - 1].0);
    }
}

fn below(tree: &Tree, place: usize, cell: &impl Fn(usize) -> CellId) -> Vec<Hop> {
    let mut hops = Vec::new();
    for child in &tree.children[place] {
        let rest = below(tree, *child, cell);
        hops.push(Hop {
            cell: cell(*child),
            below: u16::try_from(rest.len()).unwrap_or(u16::MAX),
        });
        hops.extend(rest);
    }
    hops
}
