//! Recovery from the failure of a cell of this host (Cellular Disco, SOSP '99, section 6): its CPUs and its
//! memory are lost, not only its process.
//!
//! 1. Each cell detects which cells live by its links, whose ends the host's kernel reports at once. A mark
//!    in a dead cell's directory, made before its process ends, says that the cell has failed, so all
//!    survivors have the same set.
//! 2. Claims and changes that wait for the dead cell are settled, as at each death of a process
//!    ([`State::dead`]).
//! 3. The VMs that depend on the failed cell end: those that run in it, those with a part in it, and those
//!    that have memory of it, borrowed or by a shared region, or a vCPU on one of its CPUs. Each survivor
//!    ends its own. The *heir*, the survivor with the lowest number, ends those of the failed cell. No memory
//!    is scanned: the memory that a VM uses of other cells is in its entry.
//! 4. When the host has none of these VMs any more, the failed cell is *buried*: its VMs' names are free, and
//!    the memory that it had borrowed is its lenders' again.

use std::collections::BTreeSet;

use registry::cluster::interface::{CellResponse, SHARD_SEPARATOR};

use super::{Action, Client, Key, State};

/// The recovery from a failed cell.
#[derive(Debug, Default)]
pub(super) struct Failure {
    /// Clients that wait until it is buried.
    waiting: Vec<Client>,
    /// Whether the end of its VMs is awaited.
    is_awaited: bool,
    is_buried: bool,
}

impl State {
    /// Records that a cell of this host has failed, and that its process is dead. Repeated calls are allowed.
    pub fn failed(&mut self, cell: u16) -> Vec<Action> {
        if cell == self.me.number {
            return Vec::new();
        }
        self.failures.entry(cell).or_default();
        // This cell may have become the heir of an earlier failure.
        let open: Vec<u16> = self.open_failures().collect();
        let mut acts = Vec::new();
        for failed in open {
            for (name, home) in self.dependents(failed) {
                if home == self.me.number || (home == failed && self.is_heir_of(failed)) {
                    acts.push(Action::EndVm { name, failed });
                }
            }
        }
        if let Some(failure) = self.failures.get_mut(&cell)
            && !std::mem::replace(&mut failure.is_awaited, true)
        {
            acts.push(Action::AwaitEnd(cell));
        }
        acts
    }

    /// Buries a failed cell, on which no VM of this host depends any more.
    pub fn bury(&mut self, cell: u16) -> Vec<Action> {
        let Some(failure) = self.failures.get_mut(&cell).filter(|failure| !failure.is_buried) else {
            return Vec::new();
        };
        failure.is_buried = true;
        let waiting = std::mem::take(&mut failure.waiting);
        self.node.forget(cell, |key| matches!(key, Key::Vm(_)));
        let effects = self.ledger.write_off(cell);
        let mut acts = self.lending_acts(effects);
        acts.extend(
            waiting
                .into_iter()
                .map(|client| Action::Answer(client, CellResponse::Done)),
        );
        acts
    }

    /// Answers a client when a failed cell is buried.
    pub(super) fn recover(&mut self, client: Client, cell: u16) -> Vec<Action> {
        let refused = |why| vec![Action::Answer(client, CellResponse::Refused { why })];
        if cell == self.me.number || self.life(cell).is_some() {
            return refused(format!("cell {cell} runs"));
        }
        if !self.cells().any(|known| known.number == cell) {
            return refused(format!("there is no cell {cell}"));
        }
        match self.failures.get_mut(&cell) {
            Some(failure) if failure.is_buried => vec![Action::Answer(client, CellResponse::Done)],
            Some(failure) => {
                failure.waiting.push(client);
                Vec::new()
            }
            None => {
                let waiting = vec![client];
                let failure = Failure {
                    waiting,
                    ..Failure::default()
                };
                self.failures.insert(cell, failure);
                self.failed(cell)
            }
        }
    }

    /// Whether a cell has failed.
    pub(super) fn has_failed(&self, cell: u16) -> bool {
        self.failures.contains_key(&cell)
    }

    /// The failed cells that are not buried.
    fn open_failures(&self) -> impl Iterator<Item = u16> {
        let open = self.failures.iter().filter(|(_, failure)| !failure.is_buried);
        open.map(|(cell, _)| *cell)
    }

    /// The VMs that depend on a cell, each with its home.
    fn dependents(&self, cell: u16) -> Vec<(String, u16)> {
        let base = |name: &str| name.split(SHARD_SEPARATOR).next().unwrap_or_default().to_owned();
        let depends = self.vms().filter(|vm| {
            let borrows = vm.borrowed.iter().any(|part| part.cell == cell);
            let has_cpu = || vm.borrowed_cpus.iter().any(|borrowed| borrowed.cell == cell);
            vm.cell == cell || borrows || has_cpu() || self.has_region_of(vm, cell)
        });
        let names: BTreeSet<String> = depends.map(|vm| base(vm.name)).collect();
        let home = |name: &String| self.vms().find(|vm| vm.name == name).map(|vm| vm.cell);
        names
            .into_iter()
            .filter_map(|name| home(&name).map(|home| (name, home)))
            .collect()
    }

    /// Whether this is the cell that ends the VMs of a failed one.
    fn is_heir_of(&self, failed: u16) -> bool {
        let host = self.host_of(failed);
        let links = self.node.links().map(|cell| cell.number);
        let mut survivors = links.filter(|cell| !self.has_failed(*cell) && self.host_of(*cell) == host);
        survivors.all(|cell| cell > self.me.number)
    }
}
