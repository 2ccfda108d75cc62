//! What must hold.

use std::collections::BTreeSet;

use cell::cluster::interface::{Answer, Ask};
use cell::cluster::state::{Act, Client};
use protocol::grant::Amounts;

use super::World;
use crate::SECOND;

impl World {
    /// Lets everything come to rest, and looks whether all agree.
    ///
    /// # Errors
    /// As [`World::run`].
    pub fn rest(&mut self) -> Result<(), String> {
        self.run(self.now + 60 * SECOND)?;
        let mut running = BTreeSet::new();
        for monitor in self.monitors.values() {
            if monitor.connected.is_none() || !monitor.runs {
                return self.broken(format!("{} waits for a place at rest", monitor.host.name));
            }
            running.insert((monitor.host.name.clone(), monitor.cell));
        }
        for number in self.numbers() {
            let Some(process) = self.processes.get_mut(&number) else {
                return self.broken(format!("cell {number} is dead at rest"));
            };
            let acts = process.state.asked(Client::MAX, Ask::Status);
            let [Act::Answer(_, Answer::Status(status))] = &acts[..] else {
                return self.broken(format!("cell {number} tells nothing"));
            };
            for cell in &status.cells {
                let written = self.lent.get(&cell.plan.number).cloned().unwrap_or_default();
                let lent: Amounts = cell.lent.iter().map(|part| (part.cell, part.bytes)).collect();
                if lent != written {
                    let what = format!(
                        "cell {number} knows that {} has lent {lent:?}, not {written:?}",
                        cell.pid
                    );
                    return self.broken(what);
                }
            }
            let known = status.cells.iter().flat_map(|cell| {
                let number = cell.plan.number;
                cell.vms.iter().map(move |name| (name.clone(), number))
            });
            let known: BTreeSet<(String, u16)> = known.collect();
            if known != running {
                return self.broken(format!("cell {number} knows {known:?}, and {running:?} runs"));
            }
        }
        Ok(())
    }

    /// What must hold at all times: no two VMs of one name run, and no cell's memory has been promised twice, by itself or by who has borrowed it.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut names = BTreeSet::new();
        let mut given = vec![0; self.lives.len()];
        for monitor in self.monitors.values().filter(|monitor| monitor.runs) {
            if !names.insert(&monitor.host.name) {
                return self.broken(format!("two VMs named {} run", monitor.host.name));
            }
            given[usize::from(monitor.cell)] += monitor.host.share.memory_bytes;
            for part in &monitor.host.borrowed {
                given[usize::from(monitor.cell)] -= part.bytes;
                given[usize::from(part.cell)] += part.bytes;
            }
        }
        for (plan, given) in self.cells.plans.iter().zip(given) {
            if given > plan.memory_bytes {
                return self.broken(format!(
                    "of cell {}'s memory {given} of {} are given out",
                    plan.number, plan.memory_bytes
                ));
            }
        }
        Ok(())
    }

    fn broken<T>(&self, what: String) -> Result<T, String> {
        Err(self.trace.before(&what))
    }
}
