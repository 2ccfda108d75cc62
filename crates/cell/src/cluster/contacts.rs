//! Peer table and local failure detection. Without I/O, clock or threads; the simulator runs the same.
//!
//! A cell judges the cells of its own host by itself, since the kernel reports the end of a process at once.
//! For a cell of another host the kernel only reports that the connection has ended; all cells agree on its
//! death ([`super::membership`]).

use std::collections::{BTreeMap, BTreeSet};

use protocol::CellId;

use super::membership::News;

/// The peers of a cell, with the links to them, by incarnation. `L` is the sending end of a link.
#[derive(Debug)]
pub struct Contacts<L> {
    links: BTreeMap<CellId, L>,
    /// Numbers of the cells of other hosts.
    elsewhere: BTreeSet<u16>,
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

/// The result of a check whether a cell that has ended its link lives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Parted {
    /// The cell is dead, or has a new link.
    Settled,
    /// The cell may have been restarted a moment ago: it must be checked once more.
    LooksAlive,
    /// The cell takes this one for dead, so this one must start anew.
    StartsAnew,
}

impl<L> Contacts<L> {
    /// A table without links.
    pub fn new(elsewhere: impl IntoIterator<Item = u16>) -> Self {
        Self {
            links: BTreeMap::new(),
            elsewhere: elsewhere.into_iter().collect(),
            awaited: None,
        }
    }

    /// Adds cells of other hosts. A cell of a host that has left stays in the table.
    pub fn learn(&mut self, elsewhere: impl IntoIterator<Item = u16>) {
        self.elsewhere.extend(elsewhere);
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
    pub fn is_outlived(&self, peer: CellId) -> bool {
        let mut peers = self.peers();
        peers.any(|known| known.number == peer.number && known.life > peer.life)
    }

    /// Adds a link, which replaces a link to another incarnation of that cell.
    pub fn linked(&mut self, peer: CellId, link: L) {
        self.links.retain(|known, _| known.number != peer.number);
        self.links.insert(peer, link);
    }

    /// Decides about a cell that has been silent for too long, or whose link has ended.
    pub fn give_up(&mut self, cell: CellId) -> Verdict {
        self.links.remove(&cell);
        if self.elsewhere.contains(&cell.number) {
            Verdict::Suspect
        } else {
            Verdict::Dead
        }
    }

    /// Whether to check in a moment if a cell that ended its link died, or takes this one for dead.
    pub fn looks_after(&self, cell: CellId) -> bool {
        self.has(cell) && !self.elsewhere.contains(&cell.number)
    }

    /// The result of such a check: `runs` says whether this incarnation runs, and `ran` whether it did at the
    /// check before.
    pub fn parted(&self, cell: CellId, runs: bool, ran: bool) -> Parted {
        match runs && !self.has(cell) {
            false => Parted::Settled,
            true if ran => Parted::StartsAnew,
            true => Parted::LooksAlive,
        }
    }

    /// Applies an event on which all cells agreed. Returns the cell that is dead by it; its link is dropped.
    pub fn over(&mut self, news: News) -> Option<CellId> {
        match news {
            // Cells of this host detect each other's end themselves.
            News::Over(cell) if self.elsewhere.contains(&cell.number) => {
                self.links.remove(&cell);
                Some(cell)
            }
            News::Over(_) | News::Outcast | News::Lapsed(_) => None,
        }
    }

    /// Awaits the calls of these cells. Every other cell that runs has a link.
    pub fn wait_for(&mut self, cells: impl IntoIterator<Item = u16>) {
        self.awaited = Some(cells.into_iter().collect());
    }

    /// Whether the last awaited cell has called; true once after each [`Contacts::wait_for`].
    pub fn has_met(&mut self) -> bool {
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
        let mut contacts = Contacts::new([2]);
        contacts.linked(id(1, 1), ());
        contacts.linked(id(2, 1), ());
        assert!(contacts.looks_after(id(1, 1)) && !contacts.looks_after(id(2, 1)));
        assert_eq!(contacts.give_up(id(1, 1)), Verdict::Dead);
        assert_eq!(contacts.give_up(id(2, 1)), Verdict::Suspect);
        assert_eq!(contacts.peers().count(), 0);
        assert_eq!(contacts.over(News::Over(id(1, 1))), None);
        assert_eq!(contacts.over(News::Over(id(2, 1))), Some(id(2, 1)));
    }

    #[test]
    fn cell_of_a_host_that_has_joined_is_only_suspected() {
        let mut contacts = Contacts::new([2]);
        contacts.learn([2, 3]);
        contacts.linked(id(3, 1), ());
        assert_eq!(contacts.give_up(id(3, 1)), Verdict::Suspect);
        assert_eq!(contacts.give_up(id(1, 1)), Verdict::Dead);
    }

    #[test]
    fn live_cell_that_has_ended_its_link_takes_this_one_for_dead() {
        let mut contacts = Contacts::new([]);
        assert_eq!(contacts.parted(id(1, 1), false, false), Parted::Settled);
        assert_eq!(contacts.parted(id(1, 1), true, false), Parted::LooksAlive);
        assert_eq!(contacts.parted(id(1, 1), true, true), Parted::StartsAnew);
        contacts.linked(id(1, 1), ());
        assert_eq!(contacts.parted(id(1, 1), true, true), Parted::Settled);
    }

    #[test]
    fn a_link_to_an_earlier_life_comes_too_late() {
        let mut contacts = Contacts::new([2]);
        contacts.linked(id(2, 3), ());
        assert!(contacts.is_outlived(id(2, 2)));
        assert!(
            !contacts.is_outlived(id(2, 3))
                && !contacts.is_outlived(id(2, 4))
                && !contacts.is_outlived(id(1, 1))
        );
    }

    #[test]
    fn all_have_met_once_the_last_call_has_come() {
        let mut contacts = Contacts::new([]);
        assert!(!contacts.has_met());
        contacts.wait_for([1, 2]);
        contacts.linked(id(1, 1), ());
        assert!(!contacts.has_met());
        contacts.linked(id(2, 5), ());
        assert!(contacts.has_met() && !contacts.has_met());
    }
}
