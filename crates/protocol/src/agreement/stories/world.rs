//! Cells, and the messages on the links between them.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{Effect, Message, Node};
use crate::CellId;
use crate::links::Links;

pub type Name = u8;
pub type Value = u8;

/// Cells, their links and pending claims.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct World {
    pub nodes: BTreeMap<CellId, Node<Name, Value>>,
    pub links: Links<Message<Name, Value>>,
    /// Claims under way: the claimer, its number, the key.
    pub asked: BTreeMap<(CellId, u64), Name>,
    pub won: u32,
    pub lost: u32,
    pub deaths: u32,
}

impl World {
    /// Returns `cells` linked cells, which have exchanged hellos if `settled`.
    pub fn new(cells: u16, settled: bool) -> Self {
        let mut world = Self {
            nodes: BTreeMap::new(),
            links: Links::default(),
            asked: BTreeMap::new(),
            won: 0,
            lost: 0,
            deaths: 0,
        };
        for number in 0..cells {
            world.start(CellId { number, life: 1 });
        }
        if settled {
            world.settle();
        }
        world
    }

    /// A cell starts, and finds links to all that live.
    pub fn start(&mut self, cell: CellId) {
        let others: Vec<CellId> = self.nodes.keys().copied().collect();
        self.nodes.insert(cell, Node::new(cell));
        for other in others {
            self.links.connect(cell, other);
            self.act(cell, |node| node.link(other));
            self.act(other, |node| node.link(cell));
        }
    }

    /// Whether the cell can start anew: all others know that it died.
    pub fn can_start(&self, number: u16) -> bool {
        let is_it = |cell: &CellId| cell.number == number;
        !self.nodes.keys().any(is_it) && self.links.knows_deaths_of(number)
    }

    pub fn act(&mut self, at: CellId, act: impl FnOnce(&mut Node<Name, Value>) -> Vec<Effect<Name, Value>>) {
        let Some(node) = self.nodes.get_mut(&at) else {
            return;
        };
        let effects = act(node);
        let linked: Vec<CellId> = node.links().collect();
        for effect in effects {
            match effect {
                Effect::Send(to, message) | Effect::Reply { to, message, .. } => {
                    self.links.send(at, to, message);
                }
                Effect::Tell(message) => {
                    for to in &linked {
                        self.links.send(at, *to, message.clone());
                    }
                }
                Effect::Won(claim) => {
                    self.asked
                        .remove(&(at, claim))
                        .expect("asked once, answered once");
                    self.won += 1;
                }
                Effect::Lost { claim, .. } => {
                    self.asked
                        .remove(&(at, claim))
                        .expect("asked once, answered once");
                    self.lost += 1;
                }
                Effect::Heard(_) | Effect::Inherited(_) => {}
            }
        }
    }

    pub fn claim(&mut self, at: CellId, key: Name, value: Value) {
        let mut node = self.nodes.remove(&at).expect("lives");
        let (number, effects) = node.claim(key, value);
        self.nodes.insert(at, node);
        self.asked.insert((at, number), key);
        self.act(at, |_| effects);
    }

    pub fn change(&mut self, at: CellId, key: Name, value: Option<Value>) {
        self.act(at, |node| {
            let (_, effects) = node.change(&key, value).expect("its own");
            effects
        });
    }

    pub fn deliver(&mut self, from: CellId, to: CellId) {
        if let Some(message) = self.links.receive(from, to) {
            self.act(to, |node| node.take(from, message, None));
        }
    }

    /// Delivers everything.
    fn settle(&mut self) {
        loop {
            let next = self.links.under_way().next();
            let Some((from, to)) = next else { return };
            self.deliver(from, to);
        }
    }

    pub fn crash(&mut self, cell: CellId) {
        self.nodes.remove(&cell);
        self.deaths += 1;
        self.asked.retain(|(at, _), _| *at != cell);
        self.links.crash(cell, self.nodes.keys().copied());
    }

    /// Delivers a death to a cell. Undelivered packets of the dead cell are dropped.
    pub fn learn(&mut self, at: CellId, dead: CellId) {
        self.links.learn(at, dead);
        self.act(at, |node| node.dead(dead));
    }

    pub fn owned(&self, at: CellId) -> impl Iterator<Item = Name> + '_ {
        let entries = self.nodes[&at].entries();
        let own = entries.filter(move |(_, owner, _)| *owner == at.number);
        own.map(|(key, _, _)| *key)
    }

    /// Checks the invariants. Returns the name of a violated one.
    pub fn broken(&self) -> Option<&'static str> {
        let mut owned = BTreeSet::new();
        for at in self.nodes.keys() {
            for key in self.owned(*at) {
                if !owned.insert(key) {
                    return Some("two cells own one key");
                }
            }
        }
        if !self.links.is_quiet() {
            return None;
        }
        if !self.asked.is_empty() {
            return Some("all is quiet and a claim has no outcome");
        }
        let mut copies = self.nodes.values().map(|node| {
            let live = |number| self.nodes.keys().any(|cell| cell.number == number);
            let entries = node.entries().filter(|(_, owner, _)| live(*owner));
            entries
                .map(|(key, owner, value)| (*key, owner, *value))
                .collect::<Vec<_>>()
        });
        let first = copies.next();
        if copies.any(|copy| Some(&copy) != first.as_ref()) {
            return Some("all is quiet and two copies differ");
        }
        None
    }
}
