//! Hosts, cells, the links between them, the monitors of VMs; what happens, and what must hold.
//!
//! A link delivers in order. A cell handles one event at a time, and each costs it time; one that hangs
//! handles them later. The end of a cell's process reaches the others of its host a little later, and what it
//! sent last may be lost. Between hosts a link whose way is cut keeps what was sent, until it is mended or
//! one end has heard nothing for too long.

mod cells;
mod links;
mod lost;
mod members;
mod monitors;
mod network;
mod rules;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use cell::cluster::membership::News;
use cell::cluster::membership::lease_seconds;
use cell::cluster::membership::member::{Answer, Question};
use cell::cluster::routes::HANDLE_NS;
use cell::cluster::state::{Awaited, CellMessage, Client};
use protocol::CellId;
use protocol::grant::Amounts;
use registry::cluster::interface::CellRequest;

use crate::chance::Chance;
use crate::etcd::{Etcd, Lease};
use crate::machine::Cells;
use crate::queue::Queue;
use crate::trace::Trace;
use crate::{MILLISECOND, SECOND, Time};
use cells::Process;
use links::Wire;
use members::{Asker, Joiner};
use monitors::Monitor;
use network::Network;

/// What any event costs a cell beside what it sends.
const EVENT_NS: Time = HANDLE_NS;
/// The end of a process, until another sees its sockets end, at most.
const NOTICE_NS: Time = 5 * MILLISECOND;
/// A process, from its start until its links are there.
const START_NS: Time = 10 * MILLISECOND;
/// How long a cell of another host may say nothing: what a cluster's file says when it says nothing.
const SILENCE_MS: u64 = 200;

/// What happens.
#[derive(Clone, Debug)]
enum Event {
    /// To a life of a cell.
    Cell(CellId, Input),
    /// A cell handles what came first.
    Turn(CellId),
    /// A monitor tries to come to its cell.
    Come(Client),
    /// A cell's guard starts it again.
    Restart(u16),
    /// A cell calls those that lived when it joined, the last one first; the current call began then.
    Call(CellId, Vec<CellId>, Time),
    /// A cell looks at who lives.
    Round(CellId),
    /// A question comes to etcd.
    Question(Asker, Question<Lease>),
    /// And the answer, if any.
    Answer(Asker, Option<Answer<Lease>>),
    /// What is wrong with the network or a cell is over.
    Heal(Fault),
    /// A cell was a member for certain at that time last, if it has not been since: its guard ends its VMs.
    Lost(u16, Time),
    /// One end of a link has heard nothing for too long, if its way is still cut as this often: from, to.
    Silent(CellId, CellId, u64),
}

/// What comes to a cell.
#[derive(Clone, Debug)]
enum Input {
    Linked(CellId),
    Called,
    Heard(CellId, CellMessage),
    Ended(CellId),
    Asked(Client, CellRequest),
    Gone(Client),
    Overdue(Client, Awaited),
    HelloDue(CellId),
    Parted(CellId, bool),
    Orphans,
    Tick,
    Changed(News),
}

/// What can be wrong for a while. Hosts by their numbers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// Nothing gets from one host to another.
    Cut(u16, u16),
    /// Nothing gets from a host to etcd, nor back.
    CutOff(u16),
    /// There is no etcd.
    NoEtcd,
    /// A stranger deletes all keys of etcd.
    LostKeys,
    /// A cell takes so many times as long for everything.
    Slow(u16, u64),
    /// Messages between two hosts take so much longer.
    Delay(u16, u16, Time),
    /// A host is dead, with all VMs.
    Down(u16),
}

/// What was counted.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Messages between cells.
    pub messages: u64,
    /// VMs that got a place.
    pub hosted: u64,
    /// VMs that were refused one.
    pub refused: u64,
    /// VMs that got a place with memory of other cells.
    pub borrowing: u64,
    /// Loans, and returns of them, that were done.
    pub loans: u64,
    /// Cordons, and ends of them, that were asked for.
    pub cordons: u64,
    /// Ends of cells' processes.
    pub deaths: u64,
    /// Of them, those that started anew because others took them for dead.
    pub outcasts: u64,
    /// Cuts, losses of etcd, slow cells and links, dead hosts.
    pub faults: u64,
    /// Names given again while a VM of that name ran that no cell knew of any more.
    pub forgotten: u64,
    /// VMs that their cells' guards ended, as their hosts had lost their membership.
    pub stopped: u64,
    /// From a monitor's question to the place, for each that got one, nanoseconds.
    pub waits_ns: Vec<Time>,
}

/// Everything.
#[derive(Debug)]
pub struct World {
    cells: Cells,
    chance: Chance,
    now: Time,
    queue: Queue<Event>,
    processes: BTreeMap<u16, Process>,
    /// Processes that have not entered yet.
    joiners: BTreeMap<u16, Joiner>,
    lives: Vec<u32>,
    /// How often in a row each has started anew soon after its start.
    short_lives: Vec<u32>,
    /// What each cell has in writing.
    lent: BTreeMap<u16, Amounts>,
    /// Cells that have a cordon in writing, each with the number of the cordon.
    cordoned: BTreeMap<u16, u64>,
    monitors: BTreeMap<Client, Monitor>,
    clients: Client,
    wires: BTreeMap<(CellId, CellId), Wire>,
    etcd: Etcd,
    network: Network,
    /// Hosts that are dead.
    down: BTreeSet<u16>,
    /// When each cell was a member for certain, where VMs of lost hosts end.
    confirmed: BTreeMap<u16, Time>,
    /// What does not hold, if it was seen while something happened.
    broken: Option<String>,
    /// What was counted.
    pub counts: Counts,
    trace: Trace,
}

impl World {
    /// All cells start.
    pub fn new(cells: Cells, chance: Chance) -> Self {
        let count = cells.plans.len();
        let mut world = Self {
            cells,
            chance,
            now: 0,
            queue: Queue::default(),
            processes: BTreeMap::new(),
            joiners: BTreeMap::new(),
            lives: vec![0; count],
            short_lives: vec![0; count],
            lent: BTreeMap::new(),
            cordoned: BTreeMap::new(),
            monitors: BTreeMap::new(),
            clients: 0,
            wires: BTreeMap::new(),
            etcd: Etcd::new(lease_seconds(SILENCE_MS) * SECOND),
            network: Network::default(),
            down: BTreeSet::new(),
            confirmed: BTreeMap::new(),
            broken: None,
            counts: Counts::default(),
            trace: Trace::default(),
        };
        for number in world.numbers() {
            world.start(number);
        }
        world
    }

    /// Remembers the last steps, for an error; that takes most of the time.
    pub fn trace(&mut self) {
        self.trace.begin();
    }

    /// The time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// The cells.
    pub fn numbers(&self) -> std::ops::Range<u16> {
        0..u16::try_from(self.lives.len()).unwrap_or(u16::MAX)
    }

    /// The hosts.
    pub fn hosts(&self) -> std::ops::Range<u16> {
        0..self.cells.hosts()
    }

    /// VMs that run.
    pub fn running(&self) -> Vec<Client> {
        let running = self.monitors.iter().filter(|(_, monitor)| monitor.runs);
        running.map(|(client, _)| *client).collect()
    }

    /// The lives that run and have entered.
    pub fn living(&self) -> Vec<CellId> {
        self.processes.values().map(|process| process.id).collect()
    }

    /// Lets happen what happens until then.
    ///
    /// # Errors
    /// With what does not hold and how it came to that.
    pub fn run(&mut self, until: Time) -> Result<(), String> {
        while let Some((at, event)) = self.queue.take() {
            if at > until {
                self.queue.put(at, event);
                break;
            }
            self.now = at;
            let hosted = self.counts.hosted;
            self.happen(event);
            if self.counts.hosted != hosted {
                self.check()?;
            }
            if let Some(what) = self.broken.take() {
                return self.fail(what);
            }
        }
        self.now = until;
        Ok(())
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Cell(cell, input) => self.arrive(cell, input),
            Event::Turn(cell) => self.turn(cell),
            Event::Come(client) => self.come_again(client),
            Event::Restart(number) => self.start(number),
            Event::Call(cell, members, since) => self.call(cell, members, since),
            Event::Round(cell) => self.begin_round(cell),
            Event::Question(asker, question) => self.question(asker, question),
            Event::Answer(asker, answer) => self.answered(asker, answer),
            Event::Heal(fault) => self.heal(fault),
            Event::Lost(number, at) => self.end_if_lost(number, at),
            Event::Silent(from, to, cut) => self.fall_silent(from, to, cut),
        }
    }

    fn say(&mut self, what: impl FnOnce() -> String) {
        self.trace.say(self.now, what);
    }

    fn to(&mut self, cell: CellId, at: Time, input: Input) {
        self.queue.put(at, Event::Cell(cell, input));
    }

    fn host_of(&self, number: u16) -> u16 {
        self.cells.host_of(number)
    }

    /// Whether two cells are on one host.
    fn are_near(&self, one: u16, other: u16) -> bool {
        self.cells.are_near(one, other)
    }
}
