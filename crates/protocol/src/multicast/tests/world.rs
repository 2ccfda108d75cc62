//! Cells, the packets on their links, and the messages that each has sent and received.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::super::{Effect, Hop, Multicast, Packet};
use crate::CellId;
use crate::links::Links;

pub type Payload = u16;

/// Cells, their links, and the messages of each pair.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct World {
    pub cells: BTreeMap<CellId, Multicast<Payload>>,
    pub links: Links<Packet<Payload>>,
    /// Links that a cell has not yet added: cell, peer.
    pub unlinked: BTreeSet<(CellId, CellId)>,
    /// Lost links between live cells, and whether a send over the link fails.
    pub cut: BTreeMap<(CellId, CellId), bool>,
    /// Messages by sender and receiver, with the number of delivered ones.
    pub sent: BTreeMap<(CellId, CellId), (Vec<Payload>, usize)>,
    pub broken: Option<&'static str>,
    bodies: Payload,
}

impl World {
    /// Returns `count` linked cells, which have exchanged a message if `settled`.
    pub fn new(count: u16, settled: bool) -> Self {
        let mut world = Self {
            cells: BTreeMap::new(),
            links: Links::default(),
            unlinked: BTreeSet::new(),
            cut: BTreeMap::new(),
            sent: BTreeMap::new(),
            broken: None,
            bodies: 0,
        };
        for number in 0..count {
            world.start(CellId { number, life: 1 });
        }
        if settled {
            for (at, to) in world.unlinked.clone() {
                world.link(at, to);
            }
            world.deliver_all();
        }
        world
    }

    /// A cell starts; there are links to all that live.
    pub fn start(&mut self, cell: CellId) {
        for other in self.cells.keys() {
            self.links.connect(cell, *other);
            self.unlinked.extend([(cell, *other), (*other, cell)]);
        }
        self.cells.insert(cell, Multicast::new(cell));
    }

    /// Adds a link to a cell, which sends its hello.
    pub fn link(&mut self, at: CellId, to: CellId) {
        self.unlinked.remove(&(at, to));
        self.cells.get_mut(&at).expect("lives").link(to, true);
        self.sent.insert((at, to), (Vec::new(), 0));
        self.send(at, to);
    }

    /// How often a cell has started.
    pub fn lives(&self, number: u16) -> u32 {
        let lives = self.sent.keys().flat_map(|(from, to)| [from, to]);
        lives
            .filter(|cell| cell.number == number)
            .map(|cell| cell.life)
            .max()
            .unwrap_or(1)
    }

    fn body(&mut self) -> Payload {
        self.bodies += 1;
        self.bodies
    }

    /// Whom a cell can send to.
    pub fn peers(&self, at: CellId) -> Vec<CellId> {
        self.cells[&at].peers.keys().copied().collect()
    }

    pub fn send(&mut self, at: CellId, to: CellId) {
        let body = self.body();
        let sent = self.sent.get_mut(&(at, to)).expect("linked");
        sent.0.push(body);
        self.act(at, |cell| cell.send(to, body));
    }

    /// A message to all, along the tree that `tree` makes of the cells that are fit for one.
    pub fn send_to_all(&mut self, at: CellId, tree: impl FnOnce(Vec<CellId>) -> Vec<Hop>) {
        let body = self.body();
        for to in self.peers(at) {
            self.sent.get_mut(&(at, to)).expect("linked").0.push(body);
        }
        let tree = tree(self.cells[&at].fit().collect());
        self.act(at, |cell| cell.send_to_all(&body, &tree, false).effects);
    }

    pub fn tick(&mut self, at: CellId) {
        self.act(at, Multicast::tick);
    }

    pub fn act(&mut self, at: CellId, act: impl FnOnce(&mut Multicast<Payload>) -> Vec<Effect<Payload>>) {
        let cell = self.cells.get_mut(&at).expect("lives");
        let mut effects = VecDeque::from(act(cell));
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Send(to, packet) => {
                    if let Some(told) = self.cut.get(&(at, to)) {
                        if *told {
                            let cell = self.cells.get_mut(&at).expect("lives");
                            effects.extend(cell.unsent(to, packet));
                        }
                    } else {
                        self.links.send(at, to, packet);
                    }
                }
                Effect::Deliver(from, body, _) => self.got(at, from, body),
            }
        }
        for peer in self.cells[&at].peers.values() {
            if peer.early.len() as u64 >= super::super::WINDOW
                || peer.unacked.len() as u64 > super::super::WINDOW
            {
                self.broken = Some("a cell keeps too much");
            }
        }
    }

    fn got(&mut self, at: CellId, from: CellId, body: Payload) {
        match self.sent.get_mut(&(from, at)) {
            Some((sent, got)) if sent.get(*got) == Some(&body) => *got += 1,
            _ => self.broken = Some("a message came twice, out of order, or over no link"),
        }
    }

    /// Links with packets that can come now.
    pub fn under_way(&self) -> impl Iterator<Item = (CellId, CellId)> + '_ {
        let full = self.links.under_way();
        full.filter(|(from, to)| !self.unlinked.contains(&(*to, *from)))
    }

    pub fn deliver(&mut self, from: CellId, to: CellId) {
        if let Some(packet) = self.links.receive(from, to) {
            self.act(to, |cell| cell.take(from, packet));
        }
    }

    pub fn deliver_all(&mut self) {
        loop {
            let next = self.under_way().next();
            let Some((from, to)) = next else { return };
            self.deliver(from, to);
        }
    }

    pub fn crash(&mut self, cell: CellId) {
        self.cells.remove(&cell);
        self.cut.retain(|(from, to), _| *from != cell && *to != cell);
        // A cell that has not yet added the link never does.
        self.unlinked.retain(|(at, to)| *at != cell && *to != cell);
        let (peers, others): (Vec<CellId>, Vec<CellId>) = self
            .cells
            .keys()
            .partition(|at| self.cells[at].peers.contains_key(&cell));
        self.links.crash(cell, peers);
        for at in others {
            self.links.disconnect(cell, at);
        }
    }

    /// Delivers a death to a cell. Undelivered packets of the dead cell on their link are dropped.
    pub fn learn(&mut self, at: CellId, dead: CellId) {
        self.links.learn(at, dead);
        self.act(at, |cell| cell.dead(dead));
    }

    /// Cuts the link of two live cells: its packets are lost.
    pub fn cut(&mut self, a: CellId, b: CellId, told: bool) {
        self.links.disconnect(a, b);
        self.cut.extend([((a, b), told), ((b, a), told)]);
    }

    /// Whether a message is missing once all deliverable packets have arrived.
    pub fn missing(&self) -> bool {
        let quiet = self.under_way().next().is_none()
            && self.unlinked.is_empty()
            && self.links.unknown_deaths().next().is_none();
        let lives = |cell: &CellId| self.cells.contains_key(cell);
        quiet
            && self.sent.iter().any(|((from, to), (sent, got))| {
                let linked = lives(from) && lives(to) && !self.cut.contains_key(&(*from, *to));
                linked && sent.len() != *got
            })
    }
}
