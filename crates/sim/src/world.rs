//! Hosts, cells, the links between them and the monitors of VMs; their events, and the rules that hold.
//!
//! A link delivers in order. A cell handles one event at a time, and each costs it time; one that hangs
//! handles them later. The end of a cell's process reaches the others of its host a little later, and its
//! last messages may be lost. Between hosts a link whose path is cut keeps its messages, until the path works
//! again or one end has received nothing for too long.

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

use cell::cluster::membership::MembershipEvent;
use cell::cluster::membership::lease_seconds;
use cell::cluster::membership::member::{EtcdAnswer, EtcdRequest};
use cell::cluster::routes::HANDLE_NS;
use cell::cluster::state::{Awaited, CellMessage, Client};
use protocol::CellId;
use protocol::grant::Amounts;
use registry::cluster::interface::CellRequest;

use crate::chance::Chance;
use crate::etcd::{Etcd, Lease};
use crate::machine::Cells;
use crate::queue::Queue;
use crate::trace::{Trace, Violation};
use crate::{MILLISECOND, SECOND, Time};
use cells::Process;
use links::Wire;
use members::{Asker, Joiner};
use monitors::Monitor;
use network::Network;

/// Cost of any event for a cell, beside that of the messages that it sends.
const EVENT_NS: Time = HANDLE_NS;
/// Longest time from the end of a process until another sees its sockets end.
const NOTICE_NS: Time = 5 * MILLISECOND;
/// Time from the start of a process until its links are there.
const START_NS: Time = 10 * MILLISECOND;
/// Time for which a cell of another host may be silent: the default of a cluster's file.
const SILENCE_MS: u64 = 200;

#[derive(Clone, Debug)]
enum Event {
    /// An input of a life of a cell.
    Cell(CellId, Input),
    /// A cell handles its first input.
    Turn(CellId),
    /// A monitor tries to connect to its cell.
    Come(Client),
    /// A cell's guard starts it again.
    Restart(u16),
    /// A cell connects to those that lived when it joined, the last one first; the current attempt began
    /// then.
    Call(CellId, Vec<CellId>, Time),
    /// A cell reads the members.
    Round(CellId),
    /// A request reaches etcd.
    EtcdRequest(Asker, EtcdRequest<Lease>),
    /// Its reply, if any.
    Answer(Asker, Option<EtcdAnswer<Lease>>),
    /// A fault of the network or a cell is over.
    Heal(Fault),
    /// The time at which a cell was last known to be a member, if it has not been since: its guard ends its
    /// VMs.
    Lost(u16, Time),
    /// One end of a link has received nothing for too long, if its path is still cut for the same time: from,
    /// to.
    Silent(CellId, CellId, u64),
}

/// An input of a cell.
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
    LinkEnded(CellId, bool),
    Orphans,
    Tick,
    Pass,
    Changed(MembershipEvent),
}

/// A temporary fault. Hosts by their numbers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// No message gets from one host to another.
    Cut(u16, u16),
    /// No message gets from a host to etcd, nor back.
    CutOff(u16),
    /// etcd is away.
    NoEtcd,
    /// All keys of etcd are deleted.
    LostKeys,
    /// A cell takes this many times as long for everything.
    Slow(u16, u64),
    /// Messages between two hosts take this much longer.
    Delay(u16, u16, Time),
    /// A host is dead, with all VMs.
    Down(u16),
}

/// Counts of a run.
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
    /// Loans, and returns of them, that were carried out.
    pub loans: u64,
    /// Passes of cells over their loans.
    pub passes: u64,
    /// Changes of the amounts that borrowers have requested.
    pub requested: u64,
    /// Requested cordons, and ends of them.
    pub cordons: u64,
    /// Ends of cells' processes.
    pub deaths: u64,
    /// Deaths of processes that started anew because others took them for dead.
    pub evicted: u64,
    /// Cuts, losses of etcd, slow cells and links, dead hosts.
    pub faults: u64,
    /// Names given again while a VM of that name ran of which no cell had a record any more.
    pub forgotten: u64,
    /// VMs that their cells' guards ended, as their hosts had lost their membership.
    pub stopped: u64,
    /// Time from a monitor's request to the place, for each that got one, nanoseconds.
    pub waits_ns: Vec<Time>,
}

/// The simulated cluster.
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
    /// Number of times in a row that each has started anew soon after its start.
    short_lives: Vec<u32>,
    /// The written record of each cell's loans.
    lent: BTreeMap<u16, Amounts>,
    /// The written record of the part that borrowers requested.
    requested: BTreeMap<u16, Amounts>,
    /// Time of the last pass of any cell over its loans.
    last_pass: Time,
    /// Cells with a written cordon, each with the number of the cordon.
    cordoned: BTreeMap<u16, u64>,
    monitors: BTreeMap<Client, Monitor>,
    clients: Client,
    wires: BTreeMap<(CellId, CellId), Wire>,
    etcd: Etcd,
    network: Network,
    /// Hosts that are dead.
    down: BTreeSet<u16>,
    /// Time at which each cell was last known to be a member, where VMs of lost hosts end.
    confirmed: BTreeMap<u16, Time>,
    /// The first broken rule, if an event found one.
    broken: Option<String>,
    /// Counts so far.
    pub counts: Counts,
    trace: Trace,
}

impl World {
    /// Starts all cells.
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
            requested: BTreeMap::new(),
            last_pass: 0,
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

    /// Records the last steps, for an error; that takes most of the time.
    pub fn trace(&mut self) {
        self.trace.begin();
    }

    /// Virtual time, nanoseconds since the start.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Numbers of all cells, those without a process among them.
    pub fn numbers(&self) -> std::ops::Range<u16> {
        0..u16::try_from(self.lives.len()).unwrap_or(u16::MAX)
    }

    /// Numbers of the hosts, from 0.
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

    /// Runs all events up to `until`.
    ///
    /// # Errors
    /// The rule that does not hold and the steps before it.
    pub fn run(&mut self, until: Time) -> Result<(), Violation> {
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
            Event::EtcdRequest(asker, question) => self.request(asker, question),
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
