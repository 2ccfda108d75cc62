//! Cells with their table and their multicast, and the packets on the links between them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::CellId;
use crate::agreement::{ClaimId, Effect, Message, Node, Request};
use crate::links::Links;
use crate::multicast::{self, Hop, Multicast, Packet};

pub type Name = u8;
pub type Value = u8;
type Payload = Message<Name, Value>;

/// Shape of the trees.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Shape {
    /// No relays.
    OneByOne,
    /// One relay with all others below it.
    Star,
    /// Each cell below the one before.
    Chain,
    /// Two relays, each with half of the others below it.
    Halves,
}

impl Shape {
    fn tree(self, cells: &[CellId]) -> Vec<Hop> {
        let count = cells.len();
        let half = count.div_ceil(2);
        let below = |place: usize| match self {
            Self::OneByOne => 0,
            Self::Star if place == 0 => count - 1,
            Self::Star => 0,
            Self::Chain => count - 1 - place,
            Self::Halves if place == 0 => half - 1,
            Self::Halves if place == half => count - half - 1,
            Self::Halves => 0,
        };
        let hop = |(place, cell): (usize, &CellId)| Hop {
            cell: *cell,
            below: u16::try_from(below(place)).expect("few cells"),
        };
        cells.iter().enumerate().map(hop).collect()
    }
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Cell {
    pub table: Node<Name, Value>,
    pub multicast: Multicast<Payload>,
}

/// Cells, their links, pending claims and changes.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct World {
    pub cells: BTreeMap<CellId, Cell>,
    pub links: Links<Packet<Payload>>,
    /// Links that are gone although both cells live.
    pub cut: BTreeSet<(CellId, CellId)>,
    pub shape: Shape,
    /// Claims under way: the claimer, its number, the key.
    pub asked: BTreeMap<(CellId, u64), Name>,
    /// The cells to which each change was sent: owner, change, cell.
    sent: BTreeSet<(CellId, u64, CellId)>,
    /// The changes that each cell has received: owner, change, cell.
    received: BTreeSet<(CellId, u64, CellId)>,
    pub won: u32,
    pub lost: u32,
    pub heard: u32,
    pub deaths: u32,
    /// Packets of replies that relays have sent up.
    pub gathered: u32,
    pub broken: Option<&'static str>,
}

impl World {
    /// Returns that many cells, which are linked and have sent their hello.
    pub fn new(cells: u16, shape: Shape) -> Self {
        let mut world = Self {
            cells: BTreeMap::new(),
            links: Links::default(),
            cut: BTreeSet::new(),
            shape,
            asked: BTreeMap::new(),
            sent: BTreeSet::new(),
            received: BTreeSet::new(),
            won: 0,
            lost: 0,
            heard: 0,
            deaths: 0,
            gathered: 0,
            broken: None,
        };
        for number in 0..cells {
            world.start(CellId { number, life: 1 });
        }
        world.deliver_all();
        world
    }

    /// A cell starts, and finds links to all that live.
    pub fn start(&mut self, cell: CellId) {
        let others: Vec<CellId> = self.cells.keys().copied().collect();
        let new = Cell {
            table: Node::new(cell),
            multicast: Multicast::new(cell),
        };
        self.cells.insert(cell, new);
        for other in others {
            self.links.connect(cell, other);
            for (at, to) in [(cell, other), (other, cell)] {
                self.cells.get_mut(&at).expect("lives").multicast.link(to, true);
                self.act(at, |node| node.link(to));
            }
        }
    }

    /// Whether the cell can start anew: all others know that it died.
    pub fn can_start(&self, number: u16) -> bool {
        let is_it = |cell: &CellId| cell.number == number;
        !self.cells.keys().any(is_it) && self.links.knows_deaths_of(number)
    }

    pub fn act(&mut self, at: CellId, act: impl FnOnce(&mut Node<Name, Value>) -> Vec<Effect<Name, Value>>) {
        let effects = act(&mut self.cells.get_mut(&at).expect("lives").table);
        self.perform(at, effects);
    }

    fn perform(&mut self, at: CellId, effects: Vec<Effect<Name, Value>>) {
        for effect in effects {
            let Cell { table, multicast } = self.cells.get_mut(&at).expect("lives");
            match effect {
                Effect::Send(to, message) => {
                    let sent = multicast.send(to, message);
                    self.post(at, sent);
                }
                Effect::Reply {
                    to,
                    message,
                    path,
                    at_once,
                } => {
                    let sent = multicast.reply(to, path, at_once, message);
                    self.post(at, sent);
                }
                Effect::Tell(message) => {
                    let fit: Vec<CellId> = multicast.fit().collect();
                    let request = message.request();
                    let told = multicast.send_to_all(&message, &self.shape.tree(&fit), request.is_some());
                    if let Some(Request::Change(change)) = request {
                        self.sent.extend(table.links().map(|to| (at, change, to)));
                    }
                    if let Some(request) = request {
                        table.gathered(request, told.gathered);
                    }
                    self.post(at, told.effects);
                }
                Effect::Won(claim) => self.won(at, claim),
                Effect::Lost { claim, .. } => {
                    self.asked
                        .remove(&(at, claim))
                        .expect("asked once, answered once");
                    self.lost += 1;
                }
                Effect::Heard(change) => {
                    self.heard += 1;
                    let mut linked = self.cells[&at].table.links();
                    let has_missed = |cell: CellId| {
                        let change = (at, change, cell);
                        let is_sent = self.sent.contains(&change) && self.cells.contains_key(&cell);
                        is_sent && !self.received.contains(&change)
                    };
                    if linked.any(has_missed) {
                        self.broken = Some("a receipt of a cell that has not received the change");
                    }
                }
                Effect::Inherited(_) => {}
            }
        }
    }

    /// Every linked cell that lives has promised the key to the claim.
    fn won(&mut self, at: CellId, number: u64) {
        let key = self
            .asked
            .remove(&(at, number))
            .expect("asked once, answered once");
        self.won += 1;
        let claim = ClaimId { cell: at, number };
        let linked: Vec<CellId> = self.cells[&at].table.links().collect();
        let mut voters = linked.iter().filter_map(|cell| self.cells.get(cell));
        if voters.any(|voter| voter.table.promised.get(&key) != Some(&claim)) {
            self.broken = Some("a claim was won without a vote");
        }
    }

    fn post(&mut self, at: CellId, effects: Vec<multicast::Effect<Payload>>) {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            match effect {
                multicast::Effect::Send(to, packet) if self.cut.contains(&(at, to)) => {
                    let cell = self.cells.get_mut(&at).expect("lives");
                    effects.extend(cell.multicast.unsent(to, packet));
                }
                multicast::Effect::Send(to, packet) => {
                    let is_gathered = |packet: &Packet<Payload>| match packet {
                        Packet::Replies { replies, .. } => {
                            replies.iter().map(|reply| reply.cells.len()).sum::<usize>() > 1
                        }
                        _ => false,
                    };
                    self.gathered += u32::from(is_gathered(&packet));
                    self.links.send(at, to, packet);
                }
                multicast::Effect::Deliver(from, message, path) => {
                    if let Message::Change { change, .. } = &message {
                        self.received.insert((from, *change, at));
                    }
                    self.act(at, |node| node.take(from, message, path));
                }
            }
        }
    }

    pub fn claim(&mut self, at: CellId, key: Name) {
        let (number, effects) = self.cells.get_mut(&at).expect("lives").table.claim(key, 0);
        self.asked.insert((at, number), key);
        self.perform(at, effects);
    }

    pub fn change(&mut self, at: CellId, key: Name, value: Option<Value>) {
        let cell = self.cells.get_mut(&at).expect("lives");
        let (_, effects) = cell.table.change(&key, value).expect("its own");
        self.perform(at, effects);
    }

    /// Whether a cell has to be ticked.
    pub fn needs_tick(&self, at: CellId) -> bool {
        let Cell { table, multicast } = &self.cells[&at];
        table.needs_tick() || multicast.needs_tick()
    }

    pub fn tick(&mut self, at: CellId) {
        let effects = self.cells.get_mut(&at).expect("lives").multicast.tick();
        self.post(at, effects);
        self.act(at, Node::tick);
    }

    pub fn deliver(&mut self, from: CellId, to: CellId) {
        if let Some(packet) = self.links.receive(from, to) {
            let cell = self.cells.get_mut(&to).expect("lives");
            let effects = cell.multicast.take(from, packet);
            self.post(to, effects);
        }
    }

    pub fn deliver_all(&mut self) {
        loop {
            let next = self.links.under_way().next();
            let Some((from, to)) = next else { return };
            self.deliver(from, to);
        }
    }

    pub fn crash(&mut self, cell: CellId) {
        self.cells.remove(&cell);
        self.deaths += 1;
        self.asked.retain(|(at, _), _| *at != cell);
        self.cut.retain(|(at, to)| *at != cell && *to != cell);
        self.links.crash(cell, self.cells.keys().copied());
    }

    /// A cell learns of a death. Packets of the dead cell that have not come by now never come.
    pub fn learn(&mut self, at: CellId, dead: CellId) {
        self.links.learn(at, dead);
        let effects = self.cells.get_mut(&at).expect("lives").multicast.dead(dead);
        self.post(at, effects);
        self.act(at, |node| node.dead(dead));
    }

    /// A link ends although both cells live. Packets under way are lost.
    pub fn cut(&mut self, one: CellId, other: CellId) {
        for (at, to) in [(one, other), (other, one)] {
            self.cut.insert((at, to));
            self.links.clear(at, to);
        }
    }

    pub fn owned(&self, at: CellId) -> Vec<Name> {
        let entries = self.cells[&at].table.entries();
        let own = entries.filter(|(_, owner, _)| *owner == at.number);
        own.map(|(key, _, _)| *key).collect()
    }

    /// Whether nothing more happens by itself.
    pub fn is_quiet(&self) -> bool {
        self.links.is_quiet() && !self.cells.keys().any(|at| self.needs_tick(*at))
    }

    /// Returns the invariant that does not hold.
    pub fn broken(&self) -> Option<&'static str> {
        let mut owned = BTreeSet::new();
        for at in self.cells.keys() {
            if !self.owned(*at).into_iter().all(|key| owned.insert(key)) {
                return Some("two cells own one key");
            }
        }
        if self.broken.is_some() || !self.is_quiet() || !self.cut.is_empty() {
            return self.broken;
        }
        if !self.asked.is_empty() {
            return Some("all is quiet and a claim has no outcome");
        }
        if self.cells.values().any(|cell| !cell.table.unheard.is_empty()) {
            return Some("all is quiet and a change has not been heard");
        }
        if self.cells.values().any(|cell| !cell.table.votes.is_empty()) {
            return Some("all is quiet and a cell remembers a vote");
        }
        let mut copies = self.cells.values().map(|cell| {
            let lives = |number| self.cells.keys().any(|cell| cell.number == number);
            let entries = cell.table.entries().filter(|(_, owner, _)| lives(*owner));
            let entries = entries.map(|(key, owner, value)| (*key, owner, *value));
            entries.collect::<Vec<_>>()
        });
        let first = copies.next();
        if copies.any(|copy| Some(&copy) != first.as_ref()) {
            return Some("all is quiet and two copies differ");
        }
        None
    }
}
