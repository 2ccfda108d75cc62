//! The rules that hold at each step, and at rest.

use std::collections::BTreeSet;

use cell::cluster::membership::Members;
use cell::cluster::state::{Action, Client};
use protocol::grant::Amounts;
use registry::cluster::interface::{CellRequest, CellResponse};

use super::World;
use crate::trace::Violation;
use crate::{SECOND, Time};

/// Time at rest by which all passes over loans must have ended.
const PASSES_LIMIT: Time = 20 * SECOND;

impl World {
    /// Runs until all activity has ended, and checks that all cells agree.
    ///
    /// # Errors
    /// As [`World::run`].
    pub fn rest(&mut self) -> Result<(), Violation> {
        self.run(self.now + 60 * SECOND)?;
        if self.now - self.last_pass < PASSES_LIMIT && self.counts.passes > 0 {
            let ago = (self.now - self.last_pass) / SECOND;
            return self.fail(format!("a cell made a pass over its loans {ago} s ago, at rest"));
        }
        let mut running = BTreeSet::new();
        for monitor in self.monitors.values() {
            if monitor.connected.is_none() || !monitor.runs {
                return self.fail(format!("{} waits for a place at rest", monitor.host.name));
            }
            running.insert((monitor.host.name.clone(), monitor.cell));
        }
        if self.cells.hosts() > 1 {
            self.etcd.expire(self.now);
            let living = self.living().into_iter().map(|cell| (cell.number, cell.life));
            let (living, members) = (living.collect::<Members>(), self.etcd.members());
            if living != members {
                return self.fail(format!("{living:?} run, and {members:?} are members"));
            }
        }
        for number in self.numbers() {
            let links = self.living().len() - 1;
            let Some(process) = self.processes.get_mut(&number) else {
                return self.fail(format!("cell {number} is dead at rest"));
            };
            if process.peers.peers().count() != links {
                let peers: Vec<String> = process.peers.peers().map(|peer| peer.to_string()).collect();
                return self.fail(format!("cell {number} has links to {} only", peers.join(", ")));
            }
            let acts = process.state.handle_request(Client::MAX, CellRequest::Status);
            let [Action::Answer(_, CellResponse::Status(status))] = &acts[..] else {
                return self.fail(format!("cell {number} has not reported its table"));
            };
            for cell in &status.cells {
                if cell.cordoned != self.cordoned.contains_key(&cell.plan.number) {
                    let what = format!("cell {number} is wrong about the cordon of {}", cell.plan.number);
                    return self.fail(what);
                }
                let written = self.lent.get(&cell.plan.number).cloned().unwrap_or_default();
                let lent: Amounts = cell.lent.iter().map(|part| (part.cell, part.bytes)).collect();
                if lent != written {
                    let what = format!(
                        "cell {number} knows that {} has lent {lent:?}, not {written:?}",
                        cell.pid
                    );
                    return self.fail(what);
                }
                let number_of_cell = cell.plan.number;
                let requested = self.requested.get(&number_of_cell).cloned().unwrap_or_default();
                let known = cell.lent_on_request.iter();
                let known: Amounts = known.map(|part| (part.cell, part.bytes)).collect();
                if known != requested || known.iter().any(|(holder, bytes)| lent.get(holder) < Some(bytes)) {
                    return self.fail(format!(
                        "cell {number} knows that {number_of_cell} has lent {known:?} on request, not \
                         {requested:?}, of {lent:?}"
                    ));
                }
            }
            let known = status.cells.iter().flat_map(|cell| {
                let number = cell.plan.number;
                cell.vms.iter().map(move |name| (name.clone(), number))
            });
            let known: BTreeSet<(String, u16)> = known.collect();
            if known != running {
                return self.fail(format!("cell {number} knows {known:?}, and {running:?} runs"));
            }
        }
        Ok(())
    }

    /// Checks the rules of each step: no cell's memory has been promised twice, by itself or by a borrower.
    pub(super) fn check(&self) -> Result<(), Violation> {
        let mut given = vec![0; self.lives.len()];
        for monitor in self.monitors.values().filter(|monitor| monitor.runs) {
            given[usize::from(monitor.cell)] += monitor.host.share.memory_bytes;
            for part in &monitor.host.borrowed {
                given[usize::from(monitor.cell)] -= part.bytes;
                given[usize::from(part.cell)] += part.bytes;
            }
        }
        for (plan, given) in self.cells.plans.iter().zip(given) {
            if given > plan.memory_bytes {
                return self.fail(format!(
                    "of cell {}'s memory {given} of {} are given out",
                    plan.number, plan.memory_bytes
                ));
            }
        }
        Ok(())
    }

    pub(super) fn fail<T>(&self, what: String) -> Result<T, Violation> {
        Err(self.trace.before(what))
    }
}
