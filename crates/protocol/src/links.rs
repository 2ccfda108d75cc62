//! Model of the links between cells, for model checking and stories: channels that deliver in order, and the
//! deaths that a cell has not yet received. The last packets of a dead cell may arrive or not.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::CellId;

/// Packets under way, and deaths not yet received.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Links<P> {
    /// Packets by sender and receiver. A link to a dead cell is absent.
    queues: BTreeMap<(CellId, CellId), VecDeque<P>>,
    /// Deaths that a cell has not yet received: cell, dead cell.
    unknown: BTreeSet<(CellId, CellId)>,
}

impl<P> Default for Links<P> {
    fn default() -> Self {
        Self {
            queues: BTreeMap::new(),
            unknown: BTreeSet::new(),
        }
    }
}

impl<P> Links<P> {
    /// Adds an empty link in each direction.
    pub fn connect(&mut self, one: CellId, other: CellId) {
        for link in [(one, other), (other, one)] {
            self.queues.insert(link, VecDeque::new());
        }
    }

    /// Removes the links in both directions, with their packets.
    pub fn disconnect(&mut self, one: CellId, other: CellId) {
        for link in [(one, other), (other, one)] {
            self.queues.remove(&link);
        }
    }

    /// Returns whether there is a link.
    pub fn contains(&self, from: CellId, to: CellId) -> bool {
        self.queues.contains_key(&(from, to))
    }

    /// Sends a packet. It is lost without a link, as to a dead cell.
    pub fn send(&mut self, from: CellId, to: CellId, packet: P) {
        if let Some(queue) = self.queues.get_mut(&(from, to)) {
            queue.push_back(packet);
        }
    }

    /// Takes the next packet of a link.
    pub fn receive(&mut self, from: CellId, to: CellId) -> Option<P> {
        self.queues.get_mut(&(from, to))?.pop_front()
    }

    /// Returns the next packet of a link.
    pub fn next(&self, from: CellId, to: CellId) -> Option<&P> {
        self.queues.get(&(from, to))?.front()
    }

    /// Drops the packets of a link.
    pub fn clear(&mut self, from: CellId, to: CellId) {
        if let Some(queue) = self.queues.get_mut(&(from, to)) {
            queue.clear();
        }
    }

    /// Returns all packets under way.
    pub fn packets(&self) -> impl Iterator<Item = &P> {
        self.queues.values().flatten()
    }

    /// Returns the links with packets: sender, receiver.
    pub fn under_way(&self) -> impl Iterator<Item = (CellId, CellId)> + '_ {
        let full = self.queues.iter().filter(|(_, packets)| !packets.is_empty());
        full.map(|(link, _)| *link)
    }

    /// Removes the links to a cell that dies, and notes its death for the survivors.
    pub fn crash(&mut self, cell: CellId, survivors: impl IntoIterator<Item = CellId>) {
        self.queues.retain(|(_, to), _| *to != cell);
        self.unknown.retain(|(at, _)| *at != cell);
        self.unknown.extend(survivors.into_iter().map(|at| (at, cell)));
    }

    /// Delivers a death to a cell. Undelivered packets of the dead cell are dropped.
    pub fn learn(&mut self, at: CellId, dead: CellId) {
        self.unknown.remove(&(at, dead));
        self.queues.remove(&(dead, at));
    }

    /// Returns the deaths that a cell has not yet received: cell, dead cell.
    pub fn unknown_deaths(&self) -> impl Iterator<Item = (CellId, CellId)> + '_ {
        self.unknown.iter().copied()
    }

    /// Returns whether all survivors have received the deaths of a cell.
    pub fn knows_deaths_of(&self, number: u16) -> bool {
        !self.unknown.iter().any(|(_, dead)| dead.number == number)
    }

    /// Returns whether no packet is under way and all deaths are received.
    pub fn is_quiet(&self) -> bool {
        self.under_way().next().is_none() && self.unknown.is_empty()
    }
}
