//! Links to other cells: their beginning and end.

use std::io;

use protocol::CellId;
use tracing::{info, warn};

use super::{Cell, Event};
use crate::cluster::limits::{HELLO_TIMEOUT, LINK_END_CHECK_DELAY, ORPHANS_LIMIT};
use crate::cluster::link::{GATHERS_REPLIES, Link};
use crate::cluster::membership::MembershipEvent;
use crate::cluster::peer_table::{EndedLink, Verdict};
use crate::cluster::state::Action;

/// Maximum length of a message that a link's thread handles itself, in bytes. While such a thread waits for
/// room in a channel to another cell, it receives nothing, and two cells could wait for each other. So the
/// messages that it sends meanwhile must be few and short. A channel takes some 50 KiB, even if nobody reads.
pub(super) const SHORT_MESSAGE_BYTES_MAX: usize = 2 << 10;

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
                receiving.run(|message, length| {
                    let event = Event::Received(peer, message);
                    match length <= SHORT_MESSAGE_BYTES_MAX {
                        true => heard.handle(event),
                        false => heard.post(event),
                    }
                });
                dead.post(Event::Dead(peer));
            });
        if reader.is_err() {
            return Vec::new();
        }
        info!("linked to cell {peer} by {transport}");
        self.peers.linked(peer, sending);
        self.events.post_after(HELLO_TIMEOUT, Event::HelloDue(peer));
        // The cell may have a record of VMs here that no process holds.
        self.events.post_after(ORPHANS_LIMIT, Event::OrphansLate);
        self.state.linked(peer, version >= GATHERS_REPLIES)
    }

    /// Handles the end of a cell's link: checks after a while whether the cell died, or takes this one for
    /// dead.
    pub(super) fn parted(&self, cell: CellId) {
        if self.peers.must_check_end(cell) {
            let event = Event::LinkEnded(cell, false);
            self.events.post_after(LINK_END_CHECK_DELAY, event);
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
                let event = Event::LinkEnded(cell, true);
                self.events.post_after(LINK_END_CHECK_DELAY, event);
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
