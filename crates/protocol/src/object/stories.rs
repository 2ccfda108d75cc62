//! Long stories by chance: more cells, messages, moves, deaths and cut ways than every order could be tried of. A failing one
//! says its seed and its last steps.

pub(super) mod world;

use std::collections::{BTreeSet, VecDeque};

use super::Node;
use crate::CellId;
use crate::chance::Chance;
use world::{World, cell};

const STEPS: usize = 400;
const MESSAGES_MAX: u8 = 40;

/// What became of the object.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// Somebody has it.
    Kept,
    /// It ended, or is lost.
    Lost,
}

struct Story {
    world: World,
    chance: Chance,
    all: BTreeSet<CellId>,
    /// In the order of their deaths, which is agreed on.
    dead: Vec<CellId>,
    /// How many deaths each cell has heard of.
    heard: Vec<usize>,
    deaths_max: usize,
    /// From whom to whom everything is lost for now.
    cut: BTreeSet<(CellId, CellId)>,
    trace: VecDeque<String>,
}

impl Story {
    fn new(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let cells = 2 + chance.below(5);
        Self {
            world: World::new(cells as u16),
            deaths_max: chance.below(cells),
            chance,
            all: (0..cells as u16).map(cell).collect(),
            dead: Vec::new(),
            heard: vec![0; cells],
            cut: BTreeSet::new(),
            trace: VecDeque::new(),
        }
    }

    fn say(&mut self, what: String) {
        if self.trace.len() == 60 {
            self.trace.pop_front();
        }
        self.trace.push_back(what);
    }

    fn hear(&mut self, at: CellId) {
        let heard = &mut self.heard[usize::from(at.number)];
        if *heard < self.dead.len() {
            *heard += 1;
            self.world.learn(at, &self.all, &self.dead[..*heard]);
            self.say(format!("{at} hears of a death"));
        }
    }

    /// A packet arrives; now and then it is lost, or comes again.
    fn arrive(&mut self) {
        let count = self.world.network.len();
        if count == 0 {
            return;
        }
        let index = self.chance.below(count);
        let picked = self.world.network.iter().nth(index).expect("in bounds").clone();
        let fate = self.chance.below(10);
        let is_lost = fate == 0 || self.cut.contains(&(picked.0, picked.1));
        if is_lost || fate != 1 {
            self.world.network.remove(&picked);
        }
        let (from, to, packet) = picked;
        if !is_lost {
            self.say(format!("{from} to {to}: {packet:?}"));
            self.world.act(to, |node| node.take(from, packet));
        }
    }

    /// Some way is cut, or all are mended.
    fn cut(&mut self) {
        let all: Vec<CellId> = self.all.iter().copied().collect();
        let [from, to] = [(); 2].map(|()| self.chance.one_of(all.iter().copied()));
        if self.chance.below(3) == 0 {
            self.cut.clear();
        } else {
            // A cell always reaches itself.
            self.cut.extend(from.zip(to).filter(|(from, to)| from != to));
        }
        self.say(format!("cut: {:?}", self.cut));
    }

    fn may_send(&self, at: CellId) -> bool {
        let sent = self.world.sent.get(&at).copied().unwrap_or(0);
        sent < MESSAGES_MAX && !self.world.told_gone.contains(&at)
    }

    fn step(&mut self) {
        let Some(at) = self.chance.one_of(self.world.nodes.keys().copied()) else {
            return;
        };
        match self.chance.below(40) {
            0..4 if self.may_send(at) => {
                self.say(format!("{at} sends"));
                self.world.send(at);
            }
            4..6 => {
                if let Some(owner) = self.world.owner() {
                    self.say(format!("{owner} offers to {at}"));
                    self.world.offer(owner, at);
                }
            }
            6 if self.dead.len() < self.deaths_max && self.chance.below(10) == 0 => {
                self.say(format!("{at} dies"));
                self.world.crash(at);
                self.dead.push(at);
            }
            6 if self.chance.below(40) == 0 => {
                if let Some(owner) = self.world.owner() {
                    self.say(format!("the object ends at {owner}"));
                    self.world.end(owner);
                }
            }
            6 => self.cut(),
            7..10 => self.world.act(at, Node::again),
            10..12 => self.hear(at),
            _ => self.arrive(),
        }
    }

    /// All hear everything, and the network is good.
    fn end(&mut self) {
        for at in self.all.clone() {
            for _ in 0..self.dead.len() {
                self.hear(at);
            }
        }
        for _ in 0..30 {
            for at in self.all.clone() {
                self.world.act(at, Node::again);
            }
            while let Some((from, to, packet)) = self.world.network.pop_first() {
                self.world.act(to, |node| node.take(from, packet));
            }
        }
    }

    fn check(&self, seed: u64) -> Result<(), String> {
        self.world
            .broken()
            .map_or(Ok(()), |what| Err(self.fail(seed, what)))
    }

    fn fail(&self, seed: u64, what: &str) -> String {
        let steps: String = self.trace.iter().map(|step| format!("{step}\n")).collect();
        format!("{steps}seed {seed}: {what}")
    }
}

/// Tells one.
///
/// # Errors
/// With what does not hold, and the last steps.
pub fn tell(seed: u64) -> Result<Outcome, String> {
    let mut story = Story::new(seed);
    for _ in 0..STEPS {
        story.step();
        story.check(seed)?;
    }
    story.end();
    story.check(seed)?;
    let world = &story.world;
    for (at, count) in world.sent.iter().filter(|(at, _)| world.nodes.contains_key(at)) {
        let done = world.done.iter().filter(|(from, _)| from == at).count();
        if done != usize::from(*count) && !world.told_gone.contains(at) {
            let what = format!("{done} of {count} messages of {at} taken, and it was not told why");
            return Err(story.fail(seed, &what));
        }
    }
    Ok(if world.owner().is_some() {
        Outcome::Kept
    } else {
        Outcome::Lost
    })
}
