//! Multicast trees between cells, from the measured costs of messages as far as they are known.
//!
//! [`MulticastRoutes::tree`] decides it, and [`MulticastRoutes::costs`] has the costs of messages.

use std::sync::Arc;

use knowledge::Base;
use knowledge::route::{Costs, Tree};
use protocol::CellId;
use protocol::multicast::Hop;

#[cfg(test)]
mod tests;

/// Additional cost for the sender of a message if the receiver has blocked, in ns: the system call that wakes
/// it; measured.
pub const CALL_NS: u64 = 1_000;
/// Time to wake a receiver that has blocked, in ns; measured: half of a round trip between two that block at
/// once.
pub const WAKE_NS: u64 = 12_000;
/// Cost of any message for its receiver before it sends messages on, in ns; assumed.
pub const HANDLE_NS: u64 = 2_000;

/// Plans multicast trees by the message costs between cells.
#[derive(Clone, Debug)]
pub struct MulticastRoutes {
    known: Arc<knowledge::RouteCosts>,
    relay_ns: u64,
}

impl Default for MulticastRoutes {
    fn default() -> Self {
        Self::of(&Base::default())
    }
}

impl MulticastRoutes {
    /// Plans from the facts on this host, its cells and those of others.
    pub fn of(base: &Base) -> Self {
        Self {
            known: Arc::new(knowledge::RouteCosts::of(base)),
            relay_ns: WAKE_NS + HANDLE_NS,
        }
    }

    /// The same, as if no cell could pass a message on in time, so that trees have no relays.
    #[must_use]
    pub fn one_by_one(self) -> Self {
        Self {
            relay_ns: u64::MAX / 8,
            ..self
        }
    }

    /// The known costs of routes, for a choice of transport.
    pub fn route_costs(&self) -> Arc<knowledge::RouteCosts> {
        self.known.clone()
    }

    /// Time from the send of a message to its receipt by a cell that polls.
    pub fn latency_ns(&self, from: u16, to: u16) -> u64 {
        self.known.fastest_ns(from, to)
    }

    /// Time that a message costs its sender before the next.
    pub fn send_ns(&self) -> u64 {
        CALL_NS + self.known.send_ns()
    }

    /// The tree by which the first of these cells sends to the others, and the costs that it follows from.
    ///
    /// Cells send along it, and `mirrorball knowledge route` shows it.
    pub fn tree(&self, cells: &[u16]) -> (Tree, Costs) {
        let costs = self.costs(cells);
        (Tree::best(&costs, 0), costs)
    }

    /// The costs of messages between these cells.
    pub fn costs(&self, cells: &[u16]) -> Costs {
        Costs {
            send_ns: self.send_ns(),
            relay_ns: self.relay_ns,
            take_ns: HANDLE_NS,
            ..Costs::of(&self.known, cells)
        }
    }
}

/// The tree of one cell.
#[derive(Clone, Debug, Default)]
pub struct Route {
    costs: MulticastRoutes,
    cells: Vec<CellId>,
    hops: Vec<Hop>,
}

impl Route {
    /// A route from these costs.
    pub fn new(costs: MulticastRoutes) -> Self {
        Self {
            costs,
            ..Self::default()
        }
    }

    /// The cells of the route.
    pub fn cells(&self) -> &[CellId] {
        &self.cells
    }

    /// The hops, each cell before those below it.
    pub fn hops(&self) -> &[Hop] {
        &self.hops
    }

    /// Plans the route anew for other cells; `own` is the one that sends.
    pub fn lead(&mut self, own: u16, cells: Vec<CellId>) {
        let numbers: Vec<u16> = [own]
            .into_iter()
            .chain(cells.iter().map(|cell| cell.number))
            .collect();
        let (tree, _) = self.costs.tree(&numbers);
        self.hops = below(&tree, 0, &|place| cells[place - 1]);
        self.cells = cells;
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
