//! To which cells this one has links, and what it makes of one that is silent, gone or over. Without I/O,
//! clock or threads; the simulator runs the same.
//!
//! Of the cells of its own host a cell judges by itself: the kernel tells the end of a process at once. Of
//! those of other hosts it only says that there is no more to be had from them; who of two has died is for
//! all to agree on ([`super::membership`]).

use std::collections::{BTreeMap, BTreeSet};

use protocol::CellId;

use super::membership::News;

/// Links, by the lives at their other ends. `L` is what sends.
#[derive(Debug)]
pub struct Contacts<L> {
    links: BTreeMap<CellId, L>,
    /// Cells of other hosts.
    elsewhere: BTreeSet<u16>,
    /// Cells whose calls are awaited. None: not known yet, or all have come.
    awaited: Option<BTreeSet<u16>>,
}

/// About a cell from which there is no more to be had. Its link is dropped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// It is dead.
    Dead,
    /// Its entry among the members is to be removed.
    Suspect,
}

/// After a look whether a cell that has ended its link lives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Parted {
    /// It died, or there is a new link.
    Settled,
    /// Its next life takes a moment to be told from it: to be looked at once more.
    LooksAlive,
    /// It takes this cell for dead, so this one has to be.
    StartsAnew,
}

impl<L> Contacts<L> {
    /// No links yet.
    pub fn new(elsewhere: impl IntoIterator<Item = u16>) -> Self {
        Self {
            links: BTreeMap::new(),
            elsewhere: elsewhere.into_iter().collect(),
            awaited: None,
        }
    }

    /// There are further cells of other hosts. Those of hosts that have left are of other hosts as ever.
    pub fn learn(&mut self, elsewhere: impl IntoIterator<Item = u16>) {
        self.elsewhere.extend(elsewhere);
    }

    /// The link to a cell.
    pub fn link(&mut self, cell: CellId) -> Option<&mut L> {
        self.links.get_mut(&cell)
    }

    /// Whether there is a link to this life of a cell.
    pub fn has(&self, cell: CellId) -> bool {
        self.links.contains_key(&cell)
    }

    /// The lives to which there are links.
    pub fn peers(&self) -> impl Iterator<Item = CellId> + '_ {
        self.links.keys().copied()
    }

    /// Whether there is a link to a later life of that cell: one that was made before it comes too late.
    pub fn is_outlived(&self, peer: CellId) -> bool {
        let mut peers = self.peers();
        peers.any(|known| known.number == peer.number && known.life > peer.life)
    }

    /// There is a link, in the place of any to another life of that cell.
    pub fn linked(&mut self, peer: CellId, link: L) {
        self.links.retain(|known, _| known.number != peer.number);
        self.links.insert(peer, link);
    }

    /// There is no more to be had from a cell: it has been silent for too long, or its link has ended.
    pub fn give_up(&mut self, cell: CellId) -> Verdict {
        self.links.remove(&cell);
        if self.elsewhere.contains(&cell.number) {
            Verdict::Suspect
        } else {
            Verdict::Dead
        }
    }

    /// Whether to look in a moment if a cell that ends its link died, or takes this one for dead.
    pub fn looks_after(&self, cell: CellId) -> bool {
        self.has(cell) && !self.elsewhere.contains(&cell.number)
    }

    /// A look at a cell that ended its link: whether this life of it runs, and did when last looked at.
    pub fn parted(&self, cell: CellId, runs: bool, ran: bool) -> Parted {
        match runs && !self.has(cell) {
            false => Parted::Settled,
            true if ran => Parted::StartsAnew,
            true => Parted::LooksAlive,
        }
    }

    /// What all have agreed on. The cell that is dead by it; its link is dropped.
    pub fn over(&mut self, news: News) -> Option<CellId> {
        match news {
            // Those of this host see each other's ends themselves.
            News::Over(cell) if self.elsewhere.contains(&cell.number) => {
                self.links.remove(&cell);
                Some(cell)
            }
            News::Over(_) | News::Outcast | News::Lapsed(_) => None,
        }
    }

    /// These are still to call; everybody else that is there has a link.
    pub fn wait_for(&mut self, cells: impl IntoIterator<Item = u16>) {
        self.awaited = Some(cells.into_iter().collect());
    }

    /// Whether the last one that was awaited has come; true once after each [`Contacts::wait_for`].
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
    fn who_of_this_host_is_silent_is_dead_and_of_another_only_suspected() {
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
    fn one_that_lives_and_has_ended_its_link_takes_this_one_for_dead() {
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
