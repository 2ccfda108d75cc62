//! Links to other cells: their beginning and end.

use std::io;

use protocol::CellId;
use tracing::{info, warn};

use super::{Cell, Event, later};
use crate::cluster::limits::{HELLO_TIMEOUT, LINK_END_CHECK_DELAY, ORPHANS_LIMIT};
use crate::cluster::link::{GATHERS_REPLIES, Link};
use crate::cluster::membership::MembershipEvent;
use crate::cluster::peer_table::{EndedLink, Verdict};
use crate::cluster::state::Action;

impl Cell {
    /// Begins to read a new link.
    pub(super) fn linked(&mut self, link: Link) -> Vec<Action> {
        let peer = link.peer;
        if self.peers.has_later(peer) {
            return Vec::new();
        }
        let Link {
            version,
            transport,
            sending,
            receiving,
            ..
        } = link;
        let (heard, dead) = (self.events.clone(), self.events.clone());
        let reader = std::thread::Builder::new()
            .name(format!("from {peer}"))
            .spawn(move || {
                // The main thread ends with the process.
                receiving.run(|message| _ = heard.send(Event::Received(peer, message)));
                let _ = dead.send(Event::Dead(peer));
            });
        if reader.is_err() {
            return Vec::new();
        }
        info!("linked to cell {peer} by {transport}");
        self.peers.linked(peer, sending);
        let _ = later(HELLO_TIMEOUT, Event::HelloDue(peer), &self.events);
        // The cell may have a record of VMs here that no process holds.
        let _ = later(ORPHANS_LIMIT, Event::OrphansLate, &self.events);
        self.state.linked(peer, version >= GATHERS_REPLIES)
    }

    /// Handles the end of a cell's link: checks after a while whether the cell died, or takes this one for
    /// dead.
    pub(super) fn parted(&self, cell: CellId) {
        if self.peers.must_check_end(cell) {
            let _ = later(LINK_END_CHECK_DELAY, Event::LinkEnded(cell, false), &self.events);
        }
    }

    /// Checks a cell that ended its link some time ago. `was_alive` tells whether it was seen to live since.
    ///
    /// # Errors
    /// If the cell takes this one for dead.
    pub(super) fn link_ended(&mut self, cell: CellId, was_alive: bool) -> io::Result<()> {
        let other = self.files.cell(cell.number);
        let runs = other.runs() && other.life() == cell.life;
        match self.peers.check_end(cell, runs, was_alive) {
            EndedLink::Settled => {}
            EndedLink::LooksAlive => {
                _ = later(LINK_END_CHECK_DELAY, Event::LinkEnded(cell, true), &self.events);
            }
            EndedLink::StartsAnew => {
                return Err(io::Error::other(format!("cell {cell} takes this one for dead")));
            }
        }
        Ok(())
    }

    /// Applies a change of the membership of all hosts' cells.
    ///
    /// # Errors
    /// If the other hosts have evicted this cell.
    pub(super) fn membership_changed(&mut self, change: MembershipEvent) -> io::Result<Vec<Action>> {
        match change {
            MembershipEvent::Evicted => Err(io::Error::other("the other hosts take this cell for dead")),
            MembershipEvent::Lapsed(cell) => {
                info!("the names of cell {cell}'s VMs are free: its host has ended them");
                Ok(self.state.lapsed(cell))
            }
            other => {
                let died = self.peers.apply(other);
                Ok(died.map_or_else(Vec::new, |cell| self.dead(cell)))
            }
        }
    }

    /// Drops a cell that has failed to answer. One of another host is dead only when all agree.
    pub(super) fn give_up(&mut self, cell: CellId) -> Vec<Action> {
        if self.peers.has(cell) {
            warn!("no link to cell {cell}");
        }
        match self.peers.lose(cell) {
            Verdict::Dead => self.dead(cell),
            Verdict::Suspect => {
                if let Some(remote_cells) = &self.remote_cells {
                    let _ = remote_cells.suspects.send(cell);
                }
                Vec::new()
            }
        }
    }

    fn dead(&mut self, cell: CellId) -> Vec<Action> {
        warn!("cell {cell} is dead");
        let mut acts = self.state.dead(cell);
        // The dead cell may have failed, or have been the one to end the VMs of a failed one. Failures on
        // another host are handled there.
        for failed in self.failed_here() {
            acts.extend(self.state.failed(failed));
        }
        acts
    }

    /// The cells of this host that have failed.
    pub(super) fn failed_here(&self) -> Vec<u16> {
        let plan = self.files.plan().unwrap_or_default();
        let numbers = plan.into_iter().map(|cell| cell.number);
        numbers
            .filter(|number| self.files.cell(*number).has_failed())
            .collect()
    }
}
