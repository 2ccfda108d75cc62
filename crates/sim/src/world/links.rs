//! Links between cells: rings within a host, streams between hosts.

use std::collections::VecDeque;

use cell::cluster::routes::WAKE_NS;
use cell::cluster::state::CellMessage;
use protocol::CellId;

use super::{Input, NOTICE_NS, World};
use crate::Time;

/// One direction of a link.
#[derive(Debug, Default)]
pub(super) struct Wire {
    /// Arrival of the last message: none overtakes another.
    last: Time,
    /// Messages that can't get through now.
    held: VecDeque<CellMessage>,
}

impl World {
    /// Gives two cells a link from `at` on.
    pub(super) fn link(&mut self, one: CellId, other: CellId, at: Time) {
        for (cell, peer) in [(one, other), (other, one)] {
            if let Some(process) = self.processes.get_mut(&cell.number) {
                process.wires.insert(peer);
            }
            // No message arrives before the link is there.
            let wire = Wire {
                last: at,
                held: VecDeque::new(),
            };
            self.wires.insert((peer, cell), wire);
            self.to(cell, at, Input::Linked(peer));
        }
    }

    /// A cell sends a message, the `sent`th of its present event.
    pub(super) fn send(&mut self, from: CellId, to: CellId, sent: Time, message: CellMessage) {
        self.counts.messages += 1;
        self.say(|| format!("{from} to {to}: {message:?}"));
        let way = self.way_ns(from.number, to.number);
        let (here, there) = (self.host_of(from.number), self.host_of(to.number));
        let is_cut = self.network.is_cut(here, there);
        let send_ns = self.cells.ways.send_ns();
        let Some(wire) = self.wires.get_mut(&(from, to)) else {
            return;
        };
        if is_cut || !wire.held.is_empty() {
            wire.held.push_back(message);
            return;
        }
        wire.last = wire.last.max(self.now + sent * send_ns + way);
        let at = wire.last;
        self.to(to, at, Input::Heard(from, message));
    }

    /// Time from one cell to another that has blocked.
    pub(super) fn way_ns(&self, from: u16, to: u16) -> Time {
        let (here, there) = (self.host_of(from), self.host_of(to));
        if here == there {
            self.cells.latency_ns(from, to) + WAKE_NS
        } else {
            self.network.way_ns(here, there) + WAKE_NS
        }
    }

    /// Ends the cut of a path: messages that were held arrive some time later, when they are sent again.
    pub(super) fn release(&mut self, from: u16, to: u16) {
        let cells = &self.cells;
        let on_it = |one: &CellId, other: &CellId| {
            cells.host_of(one.number) == from && cells.host_of(other.number) == to
        };
        let held = self.wires.iter_mut();
        let held = held.filter(|((one, other), wire)| on_it(one, other) && !wire.held.is_empty());
        let held: Vec<_> = held
            .map(|(link, wire)| (*link, std::mem::take(&mut wire.held)))
            .collect();
        let send_ns = self.cells.ways.send_ns();
        for ((one, other), messages) in held {
            let later = self.chance.below(200 * crate::MILLISECOND);
            let way = self.way_ns(one.number, other.number);
            let mut at = self.now + later + way;
            for message in messages {
                at += send_ns;
                self.to(other, at, Input::Heard(one, message));
            }
            if let Some(wire) = self.wires.get_mut(&(one, other)) {
                wire.last = wire.last.max(at);
            }
        }
    }

    /// One end of a link is closed, by its cell or by the end of its process.
    pub(super) fn hang_up(&mut self, from: CellId, to: CellId) {
        self.wires.remove(&(from, to));
        let (here, there) = (self.host_of(from.number), self.host_of(to.number));
        let at = if self.network.is_cut(here, there) {
            self.silent_at()
        } else {
            let way = if here == there {
                0
            } else {
                self.network.way_ns(here, there)
            };
            self.now + way + self.chance.below(NOTICE_NS)
        };
        self.to(to, at, Input::Ended(from));
    }
}
