//! Peer table and local failure detection. Without I/O, clock or threads; the simulator runs the same.
//!
//! A cell judges the cells of its own host by itself, since the kernel reports the end of a process at once.
//! For a cell of another host the kernel only reports that the connection has ended; all cells agree on its
//! death ([`super::membership`]).

use std::collections::{BTreeMap, BTreeSet};

use protocol::CellId;

use super::membership::MembershipEvent;

/// The peers of a cell, with the links to them, by incarnation. `L` is the sending end of a link.
#[derive(Debug)]
pub struct PeerTable<L> {
    links: BTreeMap<CellId, L>,
    /// Numbers of the cells of other hosts.
    remote: BTreeSet<u16>,
    /// Cells whose calls are awaited. None: not known yet, or all have called.
    awaited: Option<BTreeSet<u16>>,
}

/// The decision about a cell that has failed to answer, or whose link has ended. Its link is dropped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// The cell is dead.
    Dead,
    /// The cell is suspected: its entry among the members is to be removed.
    Suspect,
}

/// The result of a check whether a cell that has ended its link runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EndedLink {
    /// The cell is dead, or has a new link.
    Settled,
    /// The cell may have been restarted a moment ago: it must be checked again.
    LooksAlive,
    /// The cell takes this one for dead, so this one must start anew.
    StartsAnew,
}

impl<L> PeerTable<L> {
    /// A table without links.
    pub fn new(remote: impl IntoIterator<Item = u16>) -> Self {
        Self {
            links: BTreeMap::new(),
            remote: remote.into_iter().collect(),
            awaited: None,
        }
    }

    /// Adds cells of other hosts. A cell of a host that has left stays in the table.
    pub fn add_remote(&mut self, remote: impl IntoIterator<Item = u16>) {
        self.remote.extend(remote);
    }

    /// The link to a cell.
    pub fn link(&mut self, cell: CellId) -> Option<&mut L> {
        self.links.get_mut(&cell)
    }

    /// Whether there is a link to this incarnation of a cell.
    pub fn has(&self, cell: CellId) -> bool {
        self.links.contains_key(&cell)
    }

    /// The incarnations to which there are links.
    pub fn peers(&self) -> impl Iterator<Item = CellId> + '_ {
        self.links.keys().copied()
    }

    /// Whether there is a link to a later incarnation of that cell, so that a link to `peer` comes too late.
    pub fn has_later(&self, peer: CellId) -> bool {
        let mut peers = self.peers();
        peers.any(|known| known.number == peer.number && known.life > peer.life)
    }

    /// Adds a link, which replaces a link to another incarnation of that cell.
    pub fn linked(&mut self, peer: CellId, link: L) {
        self.links.retain(|known, _| known.number != peer.number);
        self.links.insert(peer, link);
    }

    /// Decides about a cell that has been silent for too long, or whose link has ended.
    pub fn lose(&mut self, cell: CellId) -> Verdict {
        self.links.remove(&cell);
        if self.remote.contains(&cell.number) {
            Verdict::Suspect
        } else {
            Verdict::Dead
        }
    }

    /// Whether to check in a moment if a cell that ended its link died, or takes this one for dead.
    pub fn must_check_end(&self, cell: CellId) -> bool {
        self.has(cell) && !self.remote.contains(&cell.number)
    }

    /// The result of such a check: `runs` says whether this incarnation runs, and `ran` whether it did at the
    /// check before.
    pub fn check_end(&self, cell: CellId, runs: bool, ran: bool) -> EndedLink {
        match runs && !self.has(cell) {
            false => EndedLink::Settled,
            true if ran => EndedLink::StartsAnew,
            true => EndedLink::LooksAlive,
        }
    }

    /// Applies an event on which all cells agreed. Returns the cell that is dead by it; its link is dropped.
    pub fn apply(&mut self, news: MembershipEvent) -> Option<CellId> {
        match news {
            // Cells of this host detect each other's end themselves.
            MembershipEvent::Died(cell) if self.remote.contains(&cell.number) => {
                self.links.remove(&cell);
                Some(cell)
            }
            MembershipEvent::Died(_) | MembershipEvent::Evicted | MembershipEvent::Lapsed(_) => None,
        }
    }

    /// Awaits the calls of these cells. Every other cell that runs has a link.
    pub fn await_calls(&mut self, cells: impl IntoIterator<Item = u16>) {
        self.awaited = Some(cells.into_iter().collect());
    }

    /// Whether the last awaited cell has called; true once after each [`PeerTable::await_calls`].
    pub fn have_all_called(&mut self) -> bool {
        let linked = |number: &u16| self.links.keys().any(|cell| cell.number == *number);
        let has_met = self
            .awaited
            .as_ref()
            .is_some_and(|awaited| awaited.iter().all(linked));
        if has_met {
            self.awaited = None;
        }
        has_met
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u16, life: u32) -> CellId {
        CellId { number, life }
    }

    #[test]
    fn silent_cell_of_this_host_is_dead_and_one_of_another_host_is_only_suspected() {
        let mut peers = PeerTable::new([2]);
        peers.linked(id(1, 1), ());
        peers.linked(id(2, 1), ());
        assert!(peers.must_check_end(id(1, 1)) && !peers.must_check_end(id(2, 1)));
        assert_eq!(peers.lose(id(1, 1)), Verdict::Dead);
        assert_eq!(peers.lose(id(2, 1)), Verdict::Suspect);
        assert_eq!(peers.peers().count(), 0);
        assert_eq!(peers.apply(MembershipEvent::Died(id(1, 1))), None);
        assert_eq!(peers.apply(MembershipEvent::Died(id(2, 1))), Some(id(2, 1)));
    }

    /// Promise CELL-24.
    #[test]
    fn cell_of_a_host_that_has_joined_is_only_suspected() {
        let mut peers = PeerTable::new([2]);
        peers.add_remote([2, 3]);
        peers.linked(id(3, 1), ());
        assert_eq!(peers.lose(id(3, 1)), Verdict::Suspect);
        assert_eq!(peers.lose(id(1, 1)), Verdict::Dead);
    }

    #[test]
    fn live_cell_that_has_ended_its_link_takes_this_one_for_dead() {
        let mut peers = PeerTable::new([]);
        assert_eq!(peers.check_end(id(1, 1), false, false), EndedLink::Settled);
        assert_eq!(peers.check_end(id(1, 1), true, false), EndedLink::LooksAlive);
        assert_eq!(peers.check_end(id(1, 1), true, true), EndedLink::StartsAnew);
        peers.linked(id(1, 1), ());
        assert_eq!(peers.check_end(id(1, 1), true, true), EndedLink::Settled);
    }

    #[test]
    fn a_link_to_an_earlier_life_comes_too_late() {
        let mut peers = PeerTable::new([2]);
        peers.linked(id(2, 3), ());
        assert!(peers.has_later(id(2, 2)));
        assert!(!peers.has_later(id(2, 3)) && !peers.has_later(id(2, 4)) && !peers.has_later(id(1, 1)));
    }

    #[test]
    fn all_have_met_once_the_last_call_has_come() {
        let mut peers = PeerTable::new([]);
        assert!(!peers.have_all_called());
        peers.await_calls([1, 2]);
        peers.linked(id(1, 1), ());
        assert!(!peers.have_all_called());
        peers.linked(id(2, 5), ());
        assert!(peers.have_all_called() && !peers.have_all_called());
    }
}
