//! Cells, the packets between them, and what the object has seen.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{Effect, Members, Node, ObjectId, Packet};
use crate::CellId;

pub const OBJECT: ObjectId = 7;

/// What the object has taken: who sent it, and that sender's number. Its whole state.
pub type Log = Vec<(CellId, u8)>;
pub type Sent = Packet<u8, Log>;

/// Every packet that was ever sent stays in `network`: it may come at any time, again, or never.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct World {
    pub nodes: BTreeMap<CellId, Node<u8, Log>>,
    pub network: BTreeSet<(CellId, CellId, Sent)>,
    /// Where the object is or was stopped, and what it has taken there.
    pub logs: BTreeMap<CellId, Log>,
    /// Messages whose sender has a receipt.
    pub done: BTreeSet<(CellId, u8)>,
    /// How many messages each cell has sent.
    pub sent: BTreeMap<CellId, u8>,
    /// Cells that were told that the object is gone.
    pub told_gone: BTreeSet<CellId>,
    pub dead: BTreeSet<CellId>,
}

pub fn cell(number: u16) -> CellId {
    CellId { number, life: 1 }
}

impl World {
    /// That many cells; the object is at the first, and the directory knows.
    pub fn new(cells: u16) -> Self {
        let live: BTreeSet<CellId> = (0..cells).map(cell).collect();
        let members = Members { round: 1, live };
        let node = |cell: &CellId| (*cell, Node::new(*cell, members.clone()));
        let mut world = Self {
            nodes: members.live.iter().map(node).collect(),
            network: BTreeSet::new(),
            logs: BTreeMap::new(),
            done: BTreeSet::new(),
            sent: BTreeMap::new(),
            told_gone: BTreeSet::new(),
            dead: BTreeSet::new(),
        };
        world.logs.insert(cell(0), Log::new());
        world.act(cell(0), |node| node.create(OBJECT));
        for number in 0..cells {
            world.act(cell(number), Node::again);
        }
        while let Some((from, to, packet)) = world.network.pop_first() {
            world.act(to, |node| node.take(from, packet));
        }
        assert!(world.nodes[&cell(0)].is_noted(OBJECT));
        world
    }

    /// Lets a cell do something, if it lives.
    pub fn act(&mut self, at: CellId, act: impl FnOnce(&mut Node<u8, Log>) -> Vec<Effect<u8, Log>>) {
        let Some(node) = self.nodes.get_mut(&at) else {
            return;
        };
        for effect in act(node) {
            match effect {
                Effect::Send(to, packet) => {
                    if self.nodes.contains_key(&to) {
                        self.network.insert((at, to, packet));
                    }
                }
                Effect::Deliver { from, body, .. } => {
                    self.logs
                        .get_mut(&at)
                        .expect("the object is here")
                        .push((from, body));
                }
                Effect::Activate { state, .. } => {
                    self.logs.insert(at, state);
                }
                Effect::Resume(_) => assert!(self.logs.contains_key(&at)),
                Effect::Release(_) => {
                    self.logs.remove(&at);
                }
                Effect::Done { number, .. } => {
                    self.done.insert((at, number as u8));
                }
                Effect::Gone { .. } => {
                    self.told_gone.insert(at);
                }
            }
        }
    }

    /// A message, whose body is its number.
    pub fn send(&mut self, at: CellId) {
        let number = self.sent.entry(at).or_default();
        let body = *number;
        *number += 1;
        self.act(at, |node| {
            let (given, effects) = node.send(OBJECT, body);
            assert_eq!(given, u64::from(body));
            effects
        });
    }

    /// Begins a move, if it can.
    pub fn offer(&mut self, from: CellId, to: CellId) {
        let state = self.logs.get(&from).cloned().unwrap_or_default();
        self.act(from, |node| node.offer(OBJECT, to, state).unwrap_or_default());
    }

    /// The object ends where it runs.
    pub fn end(&mut self, at: CellId) {
        self.act(at, |node| {
            node.end(OBJECT);
            Vec::new()
        });
        self.logs.remove(&at);
    }

    pub fn crash(&mut self, at: CellId) {
        self.nodes.remove(&at);
        self.logs.remove(&at);
        self.dead.insert(at);
        self.network.retain(|(_, to, _)| *to != at);
    }

    /// A cell hears of the `count` first deaths.
    pub fn learn(&mut self, at: CellId, all: &BTreeSet<CellId>, dead: &[CellId]) {
        let live = all.iter().copied().filter(|cell| !dead.contains(cell)).collect();
        let round = 1 + dead.len() as u64;
        self.act(at, |node| node.members(Members { round, live }));
    }

    pub fn owner(&self) -> Option<CellId> {
        self.nodes
            .iter()
            .find(|(_, node)| node.runs(OBJECT))
            .map(|(cell, _)| *cell)
    }

    /// What must hold at all times; the name of what does not.
    pub fn broken(&self) -> Option<&'static str> {
        let owners = self.nodes.values().filter(|node| node.runs(OBJECT)).count();
        if owners > 1 {
            return Some("the object runs at two cells");
        }
        for log in self.logs.values() {
            let mut next: BTreeMap<CellId, u8> = BTreeMap::new();
            for (from, body) in log {
                let wanted = next.entry(*from).or_default();
                if body != wanted {
                    return Some("a message was taken twice, or before an earlier one");
                }
                *wanted += 1;
            }
        }
        if let Some(owner) = self.owner() {
            if !self.told_gone.is_empty() {
                return Some("a cell was told that the object is gone");
            }
            let log = &self.logs[&owner];
            if !self.done.iter().all(|message| log.contains(message)) {
                return Some("a message with a receipt is not in the object");
            }
        }
        None
    }
}
