//! Guards that end the VMs of cells whose hosts have lost their membership, as `cell::cluster::lost`.

use std::time::Duration;

use cell::cluster::membership::{LAPSE_MARGIN, lease_seconds};
use cell::cluster::state::Client;
use protocol::CellId;

use super::{Event, SILENCE_MS, World};
use crate::{MILLISECOND, SECOND, Time};

/// Time for which an entry outlasts its cell's last renewal.
const LEASE_NS: Time = lease_seconds(SILENCE_MS) * SECOND;
/// Time between two checks of a guard.
const POLL_NS: Time = 100 * MILLISECOND;
/// Longest time that the end of a VM takes.
const KILL_NS: Time = 2 * SECOND;

impl World {
    /// Time from the end of a cell's membership until nothing of it runs; none where VMs of lost hosts run
    /// on.
    pub(super) fn lapse(&self) -> Option<Duration> {
        let stops = self.cells.stop();
        stops.then(|| Duration::from_nanos(LEASE_NS) + LAPSE_MARGIN)
    }

    /// etcd has confirmed, to a request of that time, that a cell is a member.
    pub(super) fn confirm(&mut self, cell: CellId, asked: Time) {
        if !self.cells.stop() {
            return;
        }
        self.confirmed.insert(cell.number, asked);
        let late = self.chance.below(POLL_NS);
        self.queue
            .put(asked + LEASE_NS + late, Event::Lost(cell.number, asked));
    }

    /// Whether a cell may have lost its names by now.
    pub(super) fn is_lost(&self, cell: CellId) -> bool {
        let confirmed = self.confirmed.get(&cell.number);
        self.cells.stop() && confirmed.is_none_or(|at| self.now - at >= LEASE_NS)
    }

    pub(super) fn end_if_lost(&mut self, number: u16, at: Time) {
        if self.confirmed.get(&number) != Some(&at) {
            return;
        }
        let running = self.running();
        let lost: Vec<Client> = running
            .into_iter()
            .filter(|client| self.monitors[client].cell == number)
            .collect();
        // They take their time.
        if self.now >= at + LEASE_NS + KILL_NS || self.chance.once_in(10) {
            for client in lost {
                self.counts.stopped += 1;
                self.end(client);
            }
        }
        self.queue.put(self.now + POLL_NS, Event::Lost(number, at));
    }
}
