//! Cells, the links between them, the monitors of VMs; what happens, and what must hold.
//!
//! A link delivers in order. A cell handles one event at a time, and each costs it time; one that hangs handles them later.
//! The end of a cell's process reaches each of the others a little later, and what it sent last may be lost.

mod rules;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cell::cluster::interface::{Answer, Ask, Host, Running};
use cell::cluster::limits::{HELLO_LIMIT, HOPS_MAX, LOOK_AFTER, ORPHANS_LIMIT, RETRY, WORD_LIMIT};
use cell::cluster::state::{Act, Awaited, CellMessage, Client, State};
use protocol::CellId;
use protocol::grant::Amounts;

use crate::chance::Chance;
use crate::machine::{Cells, SEND_NS, WAKE_NS};
use crate::queue::Queue;
use crate::trace::Trace;
use crate::{MILLISECOND, Time, nanos};

/// What any event costs a cell beside what it sends.
const EVENT_NS: Time = 2_000;
/// The end of a process, until another sees its sockets end, at most.
const NOTICE_NS: Time = 5 * MILLISECOND;
/// A process, from its start until its links are there.
const START_NS: Time = 10 * MILLISECOND;

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
}

#[derive(Clone, Debug)]
enum Input {
    Linked(CellId),
    Met,
    Heard(CellId, CellMessage),
    Ended(CellId),
    Asked(Client, Ask),
    Gone(Client),
    Overdue(Client, Awaited),
    HelloDue(CellId),
    Parted(CellId),
    Orphans,
}

/// A VM's monitor, as the cells see it.
#[derive(Clone, Debug)]
struct Monitor {
    host: Host,
    /// Whom it asks, or who hosts it.
    cell: u16,
    /// The life that it is connected to.
    connected: Option<CellId>,
    runs: bool,
    /// How often it was sent on.
    hops: usize,
    asked_at: Time,
}

#[derive(Debug)]
struct Process {
    state: State,
    id: CellId,
    /// Handles nothing before.
    busy_until: Time,
    /// What has come and is not handled yet. Not empty: there is a turn to come.
    inbox: VecDeque<Input>,
    /// Lives with which it has links.
    links: BTreeSet<CellId>,
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
    /// Ends of cells' processes.
    pub deaths: u64,
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
    lives: Vec<u32>,
    /// What each cell has in writing.
    lent: BTreeMap<u16, Amounts>,
    monitors: BTreeMap<Client, Monitor>,
    clients: Client,
    /// When the last message of each link comes.
    arrivals: BTreeMap<(CellId, CellId), Time>,
    /// What was counted.
    pub counts: Counts,
    trace: Trace,
}

impl World {
    /// All cells run and know one another.
    pub fn new(cells: Cells, chance: Chance) -> Self {
        let count = cells.plans.len();
        let mut world = Self {
            cells,
            chance,
            now: 0,
            queue: Queue::default(),
            processes: BTreeMap::new(),
            lives: vec![0; count],
            lent: BTreeMap::new(),
            monitors: BTreeMap::new(),
            clients: 0,
            arrivals: BTreeMap::new(),
            counts: Counts::default(),
            trace: Trace::default(),
        };
        for number in 0..count {
            world.start(u16::try_from(number).expect("as many as planned"));
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

    /// VMs that run.
    pub fn running(&self) -> Vec<Client> {
        let running = self.monitors.iter().filter(|(_, monitor)| monitor.runs);
        running.map(|(client, _)| *client).collect()
    }

    /// A VM's monitor asks this cell for a place.
    pub fn ask(&mut self, cell: u16, host: Host) {
        let client = self.clients;
        self.clients += 1;
        let monitor = Monitor {
            host,
            cell,
            connected: None,
            runs: false,
            hops: 0,
            asked_at: self.now,
        };
        self.monitors.insert(client, monitor);
        self.come(client);
    }

    /// A command asks a cell.
    pub fn command(&mut self, cell: u16, ask: Ask) {
        let client = self.clients;
        self.clients += 1;
        if let Some(process) = self.processes.get(&cell) {
            let cell = process.id;
            self.say(|| format!("{cell} is asked: {ask:?}"));
            self.to(cell, self.now + WAKE_NS, Input::Asked(client, ask));
        }
    }

    /// A VM ends.
    pub fn end(&mut self, client: Client) {
        if let Some(monitor) = self.monitors.remove(&client)
            && let Some(cell) = monitor.connected
        {
            self.say(|| format!("{} ends in {cell}", monitor.host.name));
            self.to(cell, self.now + WAKE_NS, Input::Gone(client));
        }
    }

    /// A cell's process dies; its guard starts it again after `pause`.
    pub fn kill(&mut self, number: u16, pause: Time) {
        let Some(dead) = self.processes.remove(&number) else {
            return;
        };
        self.counts.deaths += 1;
        self.say(|| format!("{} dies", dead.id));
        for peer in dead.links {
            let at = self.now + self.chance.below(NOTICE_NS);
            self.to(peer, at, Input::Ended(dead.id));
        }
        let lost: Vec<Client> = self
            .monitors
            .iter_mut()
            .filter(|(_, monitor)| monitor.connected == Some(dead.id))
            .map(|(client, monitor)| {
                monitor.connected = None;
                *client
            })
            .collect();
        for client in lost {
            self.queue.put(self.now + nanos(RETRY), Event::Come(client));
        }
        self.queue.put(self.now + pause, Event::Restart(number));
    }

    /// A cell handles nothing for a time.
    pub fn hang(&mut self, number: u16, time: Time) {
        let until = self.now + time;
        if let Some(process) = self.processes.get_mut(&number) {
            process.busy_until = process.busy_until.max(until);
            let id = process.id;
            self.say(|| format!("{id} hangs for {} ms", time / MILLISECOND));
        }
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
        }
        self.now = until;
        Ok(())
    }

    fn say(&mut self, what: impl FnOnce() -> String) {
        self.trace.say(self.now, what);
    }

    fn to(&mut self, cell: CellId, at: Time, input: Input) {
        self.queue.put(at, Event::Cell(cell, input));
    }

    /// Starts a cell's process, with links to all that run.
    fn start(&mut self, number: u16) {
        let life = &mut self.lives[usize::from(number)];
        *life += 1;
        let id = CellId { number, life: *life };
        self.say(|| format!("{id} starts"));
        let plan = self.cells.plans[usize::from(number)].clone();
        let peers: Vec<CellId> = self.processes.values().map(|process| process.id).collect();
        let running = self.monitors.values().filter(|monitor| monitor.runs);
        let running = running.map(|monitor| Running {
            name: monitor.host.name.clone(),
            cell: monitor.cell,
            share: monitor.host.share,
            borrowed: monitor.host.borrowed.clone(),
        });
        let lent = self.lent.get(&number).cloned();
        let process = Process {
            state: State::new(id, u32::from(number), plan, lent, running.collect::<Vec<_>>()),
            id,
            busy_until: self.now,
            inbox: VecDeque::new(),
            links: peers.iter().copied().collect(),
        };
        self.processes.insert(number, process);
        let linked = self.now + START_NS;
        for peer in peers {
            if let Some(other) = self.processes.get_mut(&peer.number) {
                other.links.insert(id);
            }
            self.to(id, linked, Input::Linked(peer));
            self.to(peer, linked, Input::Linked(id));
            // Nothing comes before the link is there.
            self.arrivals.insert((id, peer), linked);
            self.arrivals.insert((peer, id), linked);
        }
        self.to(id, linked, Input::Met);
        self.to(id, self.now + nanos(ORPHANS_LIMIT), Input::Orphans);
    }

    fn come(&mut self, client: Client) {
        let Some(monitor) = self.monitors.get_mut(&client) else {
            return;
        };
        match self.processes.get(&monitor.cell) {
            Some(process) => {
                monitor.connected = Some(process.id);
                let host = Host {
                    runs: monitor.runs,
                    ..monitor.host.clone()
                };
                let (cell, name) = (process.id, host.name.clone());
                self.say(|| format!("{name} asks {cell}"));
                self.to(cell, self.now + WAKE_NS, Input::Asked(client, Ask::Host(host)));
            }
            None if monitor.runs => self.queue.put(self.now + nanos(RETRY), Event::Come(client)),
            // The command fails.
            None => _ = self.monitors.remove(&client),
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Come(client) => {
                if self
                    .monitors
                    .get(&client)
                    .is_some_and(|monitor| monitor.connected.is_none())
                {
                    self.come(client);
                }
            }
            Event::Restart(number) => {
                if !self.processes.contains_key(&number) {
                    self.start(number);
                }
            }
            Event::Cell(cell, input) => {
                let alive = self
                    .processes
                    .get_mut(&cell.number)
                    .filter(|process| process.id == cell);
                let Some(process) = alive else { return };
                process.inbox.push_back(input);
                if process.inbox.len() == 1 {
                    let at = process.busy_until.max(self.now);
                    self.queue.put(at, Event::Turn(cell));
                }
            }
            Event::Turn(cell) => self.turn(cell),
        }
    }

    /// Handles one event, if the cell lives and does not hang.
    fn turn(&mut self, cell: CellId) {
        let alive = |process: &&mut Process| process.id == cell;
        let Some(process) = self.processes.get_mut(&cell.number).filter(alive) else {
            return;
        };
        if process.busy_until > self.now {
            let at = process.busy_until;
            self.queue.put(at, Event::Turn(cell));
            return;
        }
        let Some(input) = process.inbox.front().cloned() else {
            return;
        };
        process.busy_until = self.now + EVENT_NS;
        self.handle(cell, input);
        // Unless it has died of it.
        let alive = |process: &&mut Process| process.id == cell;
        if let Some(process) = self.processes.get_mut(&cell.number).filter(alive) {
            process.inbox.pop_front();
            let at = process.busy_until;
            if !process.inbox.is_empty() {
                self.queue.put(at, Event::Turn(cell));
            }
        }
    }

    fn handle(&mut self, cell: CellId, input: Input) {
        let Some(process) = self.processes.get_mut(&cell.number) else {
            return;
        };
        let acts = match input {
            Input::Linked(peer) => {
                let acts = process.state.linked(peer);
                self.to(cell, self.now + nanos(HELLO_LIMIT), Input::HelloDue(peer));
                self.to(cell, self.now + nanos(ORPHANS_LIMIT), Input::Orphans);
                acts
            }
            Input::HelloDue(peer) => {
                if process.state.is_unheard(peer) {
                    self.give_up(cell, peer);
                }
                return;
            }
            Input::Met => process.state.met(),
            Input::Heard(from, message) => {
                let heard = process.links.contains(&from);
                if heard {
                    process.state.heard(from, message)
                } else {
                    Vec::new()
                }
            }
            Input::Ended(peer) => {
                process.links.remove(&peer);
                let acts = process.state.dead(peer);
                self.to(cell, self.now + 2 * nanos(LOOK_AFTER), Input::Parted(peer));
                acts
            }
            Input::Parted(peer) => {
                if self.has_given_up(peer, cell) {
                    self.kill(cell.number, 0);
                }
                return;
            }
            Input::Asked(client, ask) => {
                let acts = process.state.asked(client, ask);
                self.watch(cell, client);
                acts
            }
            Input::Gone(client) => process.state.gone(client),
            Input::Overdue(client, then) => {
                let silent = process.state.silent_since(client, &then);
                silent.into_iter().for_each(|silent| self.give_up(cell, silent));
                self.watch(cell, client);
                return;
            }
            Input::Orphans => process.state.give_up_orphans(),
        };
        self.act(cell, acts);
    }

    fn watch(&mut self, cell: CellId, client: Client) {
        let awaited = self
            .processes
            .get(&cell.number)
            .map(|process| process.state.awaited(client));
        if let Some(awaited) = awaited.filter(|awaited| !awaited.is_empty()) {
            self.to(
                cell,
                self.now + nanos(WORD_LIMIT),
                Input::Overdue(client, awaited),
            );
        }
    }

    /// A cell takes another for dead.
    fn give_up(&mut self, at: CellId, silent: CellId) {
        self.say(|| format!("{at} gives {silent} up"));
        let Some(process) = self.processes.get_mut(&at.number) else {
            return;
        };
        process.links.remove(&silent);
        let acts = process.state.dead(silent);
        self.to(silent, self.now + NOTICE_NS, Input::Ended(at));
        self.act(at, acts);
    }

    /// Whether a life of a cell lives and has no link to another, which it takes for dead.
    fn has_given_up(&self, cell: CellId, other: CellId) -> bool {
        let process = self
            .processes
            .get(&cell.number)
            .filter(|process| process.id == cell);
        process.is_some_and(|process| !process.links.contains(&other))
    }

    fn runs(&self, name: &str) -> bool {
        let mut running = self.monitors.values().filter(|monitor| monitor.runs);
        running.any(|monitor| monitor.host.name == name)
    }

    fn act(&mut self, at: CellId, acts: Vec<Act>) {
        let mut sent: Time = 0;
        for act in acts {
            match act {
                Act::Send(to, message) => {
                    sent += 1;
                    self.counts.messages += 1;
                    self.say(|| format!("{at} to {to}: {message:?}"));
                    let way = self.cells.latency_ns(at.number, to.number) + WAKE_NS;
                    let last = self.arrivals.get(&(at, to)).copied().unwrap_or(0);
                    let arrives = (self.now + sent * SEND_NS + way).max(last);
                    self.arrivals.insert((at, to), arrives);
                    self.to(to, arrives, Input::Heard(at, message));
                }
                Act::Keep(lent) => _ = self.lent.insert(at.number, lent),
                Act::Answer(client, answer) => self.answer(at, client, answer),
                Act::End => {}
            }
        }
        if let Some(process) = self.processes.get_mut(&at.number) {
            process.busy_until = process.busy_until.max(self.now + EVENT_NS + sent * SEND_NS);
        }
    }

    fn answer(&mut self, at: CellId, client: Client, answer: Answer) {
        let Some(name) = self
            .monitors
            .get(&client)
            .map(|monitor| monitor.host.name.clone())
        else {
            self.counts.loans += u64::from(answer == Answer::Done);
            self.say(|| format!("{at} answers: {answer:?}"));
            return;
        };
        let name_runs = self.runs(&name);
        let connected = |monitor: &&mut Monitor| monitor.connected == Some(at);
        let Some(monitor) = self.monitors.get_mut(&client).filter(connected) else {
            return;
        };
        match answer {
            Answer::Hosted(_) if monitor.runs => self.say(|| format!("{name} runs on in {at}")),
            Answer::Hosted(_) if name_runs => {
                // The cell that knew of it is dead, but on one host no two can have the directory of that name.
                self.say(|| format!("{name} is hosted by {at} and runs already"));
                self.monitors.remove(&client);
                self.counts.refused += 1;
                self.to(at, self.now + WAKE_NS, Input::Gone(client));
            }
            Answer::Hosted(place) => {
                self.counts.borrowing += u64::from(!place.borrowed.is_empty());
                monitor.runs = true;
                monitor.host.borrowed = place.borrowed;
                self.counts.hosted += 1;
                self.counts.waits_ns.push(self.now - monitor.asked_at);
                self.say(|| format!("{name} runs in {at}"));
            }
            Answer::Elsewhere { .. } if monitor.hops == HOPS_MAX => {
                self.monitors.remove(&client);
                self.counts.refused += 1;
                self.to(at, self.now + WAKE_NS, Input::Gone(client));
            }
            Answer::Elsewhere { cell } => {
                monitor.hops += 1;
                monitor.cell = cell;
                monitor.host.sent = true;
                monitor.connected = None;
                self.say(|| format!("{at} sends {name} to cell {cell}"));
                self.to(at, self.now + WAKE_NS, Input::Gone(client));
                self.come(client);
            }
            Answer::Refused { why } => {
                if monitor.runs {
                    // It comes again.
                    monitor.connected = None;
                    self.queue.put(self.now + nanos(RETRY), Event::Come(client));
                } else {
                    self.monitors.remove(&client);
                    self.counts.refused += 1;
                }
                self.say(|| format!("{at} refuses {name}: {why}"));
            }
            Answer::Done | Answer::Status(_) => {}
        }
    }
}
