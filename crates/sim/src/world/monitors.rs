//! The monitors of VMs, in the view of the cells.

use std::collections::BTreeSet;

use cell::cluster::limits::{HOPS_MAX, RETRY};
use cell::cluster::routes::WAKE_NS;
use cell::cluster::state::{CellMessage, CellPayload, Client, Key};
use protocol::CellId;
use protocol::agreement::Message;
use protocol::multicast::Packet;
use registry::cluster::interface::{AdmitVm, CellRequest, CellResponse, LentMemory};

use super::{Event, Input, World};
use crate::{Time, nanos};

/// A VM's monitor, on the host of its cell.
#[derive(Clone, Debug)]
pub(super) struct Monitor {
    pub(super) host: AdmitVm,
    /// The cell that it requests a place from, or that hosts it.
    pub(super) cell: u16,
    /// The life that it is connected to.
    pub(super) connected: Option<CellId>,
    pub(super) runs: bool,
    /// The lives with a record of its name: those that voted for it, and those that received it from them.
    pub(super) witnesses: BTreeSet<CellId>,
    /// Number of times that it was sent on.
    hops: usize,
    asked_at: Time,
    /// The cordon that the cell had at the last request.
    pub(super) asked_under: Option<u64>,
}

impl World {
    /// A VM's monitor requests a place from this cell.
    pub fn ask_for_place(&mut self, cell: u16, host: AdmitVm) {
        let client = self.clients;
        self.clients += 1;
        let monitor = Monitor {
            host,
            cell,
            connected: None,
            runs: false,
            witnesses: BTreeSet::new(),
            hops: 0,
            asked_at: self.now,
            asked_under: None,
        };
        self.monitors.insert(client, monitor);
        self.come(client);
    }

    /// A command sends a request to a cell.
    pub fn command(&mut self, cell: u16, ask: CellRequest) {
        let client = self.clients;
        self.clients += 1;
        if let Some(process) = self.processes.get(&cell) {
            let cell = process.id;
            self.say(|| format!("{cell} receives {ask:?}"));
            self.to(cell, self.now + WAKE_NS, Input::Asked(client, ask));
        }
    }

    /// A VM ends.
    pub fn end(&mut self, client: Client) {
        if let Some(monitor) = self.monitors.remove(&client) {
            self.say(|| format!("{} ends in cell {}", monitor.host.name, monitor.cell));
            if let Some(cell) = monitor.connected {
                self.to(cell, self.now + WAKE_NS, Input::Gone(client));
            }
        }
    }

    pub(super) fn come_again(&mut self, client: Client) {
        let monitor = self.monitors.get(&client);
        if monitor.is_some_and(|monitor| monitor.connected.is_none()) {
            self.come(client);
        }
    }

    fn come(&mut self, client: Client) {
        let Some(monitor) = self.monitors.get_mut(&client) else {
            return;
        };
        match self.processes.get(&monitor.cell) {
            Some(process) => {
                monitor.connected = Some(process.id);
                let host = AdmitVm {
                    runs: monitor.runs,
                    ..monitor.host.clone()
                };
                let (cell, name) = (process.id, host.name.clone());
                self.say(|| format!("{name} asks {cell}"));
                self.to(
                    cell,
                    self.now + WAKE_NS,
                    Input::Asked(client, CellRequest::AdmitVm(host)),
                );
            }
            None if monitor.runs => self.queue.put(self.now + nanos(RETRY), Event::Come(client)),
            // The command fails.
            None => _ = self.monitors.remove(&client),
        }
    }

    /// Another VM of this name that runs, and its cell.
    fn other_of(&self, client: Client, name: &str) -> Option<(Client, u16)> {
        let mut running = self.monitors.iter().filter(|(_, monitor)| monitor.runs);
        let other = running.find(|(other, monitor)| **other != client && monitor.host.name == name);
        other.map(|(other, monitor)| (*other, monitor.cell))
    }

    /// Whether a cell may have lost the name that it has just given a client's VM.
    pub(super) fn must_not_host(&self, at: CellId, client: Client) -> bool {
        self.is_lost(at) && self.monitors.get(&client).is_some_and(|monitor| !monitor.runs)
    }

    pub(super) fn answer(&mut self, at: CellId, client: Client, answer: CellResponse) {
        if !self.monitors.contains_key(&client) {
            // The reply to a command.
            self.counts.loans += u64::from(answer == CellResponse::Done);
            self.say(|| format!("{at} answers: {answer:?}"));
            return;
        }
        let connected = |monitor: &&mut Monitor| monitor.connected == Some(at);
        let Some(monitor) = self.monitors.get_mut(&client).filter(connected) else {
            return;
        };
        let name = monitor.host.name.clone();
        match answer {
            CellResponse::Hosted(_) if monitor.runs => {
                self.say(|| format!("{name} runs on in {at}"));
                self.add_witnesses(at, client);
            }
            CellResponse::Hosted(place) => self.hosted(at, client, &name, place.borrowed),
            CellResponse::Elsewhere { cell }
                if monitor.hops == HOPS_MAX || !self.cells.are_near(monitor.cell, cell) =>
            {
                // The VM's files are on this host.
                self.monitors.remove(&client);
                self.counts.refused += 1;
                self.to(at, self.now + WAKE_NS, Input::Gone(client));
            }
            CellResponse::Elsewhere { cell } => {
                monitor.hops += 1;
                monitor.cell = cell;
                monitor.host.sent = true;
                monitor.connected = None;
                self.say(|| format!("{at} sends {name} to cell {cell}"));
                self.to(at, self.now + WAKE_NS, Input::Gone(client));
                self.come(client);
            }
            CellResponse::Refused { why } => {
                if monitor.runs {
                    // It connects again.
                    monitor.connected = None;
                    self.queue.put(self.now + nanos(RETRY), Event::Come(client));
                } else {
                    self.monitors.remove(&client);
                    self.counts.refused += 1;
                }
                self.say(|| format!("{at} refuses {name}: {why}"));
            }
            CellResponse::Done
            | CellResponse::Later { .. }
            | CellResponse::Region { .. }
            | CellResponse::RegionMoved(_)
            | CellResponse::Status(_)
            | CellResponse::Vcpus { .. }
            | CellResponse::CpuLoad(_)
            | CellResponse::CpuLending(_)
            | CellResponse::Windows(_)
            | CellResponse::Protocols(_) => {}
        }
    }

    /// A new VM has its place, and runs.
    fn hosted(&mut self, at: CellId, client: Client, name: &str, borrowed: Vec<LentMemory>) {
        if let Some((other, cell)) = self.other_of(client, name) {
            if self.are_near(cell, at.number) {
                // The cell with its record is dead, but on one host no two VMs can have the directory of that
                // name.
                self.say(|| format!("{name} is hosted by {at} and runs already"));
                self.monitors.remove(&client);
                self.counts.refused += 1;
                self.to(at, self.now + WAKE_NS, Input::Gone(client));
                return;
            }
            if self.cells.stop() {
                self.broken = Some(format!("{at} hosts {name}, which runs in cell {cell}"));
                return;
            }
            if let Some(witness) = self.witness_of(other, at) {
                self.broken = Some(format!(
                    "{at} hosts {name}, which runs in cell {cell}, of which {witness} has a record"
                ));
                return;
            }
            self.counts.forgotten += 1;
            self.say(|| format!("{name} runs in cell {cell}, and no cell has a record"));
        }
        self.add_witnesses(at, client);
        let Some(monitor) = self.monitors.get_mut(&client) else {
            return;
        };
        let cordon = self.cordoned.get(&at.number);
        if cordon.is_some() && monitor.asked_under.as_ref() == cordon {
            self.broken = Some(format!("{at} takes {name}, and is cordoned"));
            return;
        }
        monitor.runs = true;
        self.counts.borrowing += u64::from(!borrowed.is_empty());
        monitor.host.borrowed = borrowed;
        self.counts.hosted += 1;
        self.counts.waits_ns.push(self.now - monitor.asked_at);
        self.say(|| format!("{name} runs in {at}"));
    }

    /// All cells with a link to the host have voted for its VM, so they have a record of it.
    fn add_witnesses(&mut self, at: CellId, client: Client) {
        let process = self.processes.get(&at.number);
        let peers: Vec<CellId> = process
            .map(|process| process.peers.peers().collect())
            .unwrap_or_default();
        if let Some(monitor) = self.monitors.get_mut(&client) {
            monitor.witnesses.extend(peers.into_iter().chain([at]));
        }
    }

    /// A live cell that has a record of a VM, and has a link to this cell, or is it.
    fn witness_of(&self, client: Client, at: CellId) -> Option<CellId> {
        let process = self.processes.get(&at.number)?;
        let mut asked = process.peers.peers().chain([at]);
        let monitor = self.monitors.get(&client)?;
        asked.find(|cell| monitor.witnesses.contains(cell))
    }

    /// A cell that receives another's VMs when they meet has a record of them from then on.
    pub(super) fn witness(&mut self, at: CellId, from: CellId, message: &CellMessage) {
        let Packet::Direct {
            body: CellPayload::Table(Message::Hello { mine, yours }),
            ..
        } = message
        else {
            return;
        };
        let told = mine.iter().map(|(key, _)| (key, from.number));
        let told = told.chain(yours.iter().map(|(key, _)| (key, at.number)));
        for (key, owner) in told {
            let Key::Vm(name) = key else { continue };
            let known = self.monitors.values_mut();
            let known =
                known.filter(|monitor| monitor.runs && monitor.cell == owner && monitor.host.name == *name);
            known.for_each(|monitor| _ = monitor.witnesses.insert(at));
        }
    }
}
