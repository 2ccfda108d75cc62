//! Long random runs, with more cells, keys, changes, deaths, new lives and cut links than model checking can
//! cover. A failed run reports its seed and its last steps.

pub(super) mod world;

use std::collections::{BTreeSet, VecDeque};
use std::fmt;

use super::{CellNumber, Message};
use crate::CellId;
use crate::rng::Rng;
use world::World;

const STEPS: usize = 400;
const TRACE: usize = 60;

/// Outcome of a random run.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Number of claims that have won.
    pub won: u32,
    /// Number of claims that have lost.
    pub lost: u32,
}

struct Story {
    world: World,
    rng: Rng,
    lives: Vec<u32>,
    /// Directed pairs of cells whose packets are blocked for now.
    cut: BTreeSet<(CellNumber, CellNumber)>,
    trace: VecDeque<String>,
}

impl Story {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let cells = 2 + rng.below(5);
        Self {
            world: World::new(cells as u16, rng.below(2) == 0),
            rng,
            lives: vec![1; cells],
            cut: BTreeSet::new(),
            trace: VecDeque::new(),
        }
    }

    fn say(&mut self, what: String) {
        if self.trace.len() == TRACE {
            self.trace.pop_front();
        }
        self.trace.push_back(what);
    }

    fn deliver(&mut self) {
        let is_open = |(from, to): &(CellId, CellId)| !self.cut.contains(&(from.number, to.number));
        let links: Vec<_> = self.world.links.under_way().filter(is_open).collect();
        if let Some((from, to)) = self.rng.one_of(links.iter().copied()) {
            let message: &Message<_, _> = self.world.links.next(from, to).expect("under way");
            let what = format!("{from} to {to}: {message:?}");
            self.say(what);
            self.world.deliver(from, to);
        }
    }

    fn learn(&mut self) {
        let unknown: Vec<_> = self.world.links.unknown_deaths().collect();
        if let Some((at, dead)) = self.rng.one_of(unknown.into_iter()) {
            self.say(format!("{at} learns that {dead} is dead"));
            self.world.learn(at, dead);
        }
    }

    fn step(&mut self) {
        let at = self.rng.one_of(self.world.nodes.keys().copied());
        let Some(at) = at else { return self.start() };
        let key = self.rng.below(3) as u8;
        match self.rng.below(24) {
            0..3 => {
                self.say(format!("{at} claims {key}"));
                self.world.claim(at, key, 0);
            }
            3..5 => {
                let own: Vec<_> = self.world.owned(at).collect();
                if let Some(key) = self.rng.one_of(own.into_iter()) {
                    let value = (self.rng.below(2) == 0).then_some(self.rng.below(9) as u8);
                    self.say(format!("{at} changes {key} to {value:?}"));
                    self.world.change(at, key, value);
                }
            }
            5 if self.rng.below(8) == 0 => {
                self.say(format!("{at} dies"));
                self.world.crash(at);
            }
            5 if self.rng.below(4) == 0 => self.cut(),
            5 => self.start(),
            6..8 => self.learn(),
            _ => self.deliver(),
        }
    }

    /// Blocks a directed pair, or restores all.
    fn cut(&mut self) {
        let [from, to] = [(); 2].map(|()| self.rng.below(self.lives.len()) as CellNumber);
        if self.rng.below(3) == 0 {
            self.cut.clear();
        } else {
            self.cut.insert((from, to));
        }
        self.say(format!("cut: {:?}", self.cut));
    }

    fn start(&mut self) {
        let number = self.rng.below(self.lives.len());
        if self.world.can_start(number as u16) {
            self.lives[number] += 1;
            let cell = CellId {
                number: number as u16,
                life: self.lives[number],
            };
            self.say(format!("{cell} starts"));
            self.world.start(cell);
        }
    }

    /// Everything that is under way comes.
    fn end(&mut self) {
        self.cut.clear();
        while !self.world.links.is_quiet() {
            self.learn();
            self.deliver();
        }
    }

    fn check(&self, seed: u64) -> Result<(), Violation> {
        let Some(invariant) = self.world.broken() else {
            return Ok(());
        };
        Err(Violation {
            steps: self.trace.iter().cloned().collect(),
            seed,
            invariant,
        })
    }
}

/// An invariant that does not hold.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Violation {
    /// The last steps of the run.
    pub steps: Vec<String>,
    /// The run's seed.
    pub seed: u64,
    /// The invariant, in one line.
    pub invariant: &'static str,
}

impl std::error::Error for Violation {}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            writeln!(out, "{step}")?;
        }
        write!(out, "seed {}: {}", self.seed, self.invariant)
    }
}

/// Runs the random steps of `seed`.
///
/// # Errors
/// Names the invariant that does not hold, the seed, and the last steps.
pub fn tell(seed: u64) -> Result<Outcome, Violation> {
    let mut story = Story::new(seed);
    for _ in 0..STEPS {
        story.step();
        story.check(seed)?;
    }
    story.end();
    story.check(seed)?;
    let World { won, lost, .. } = story.world;
    Ok(Outcome { won, lost })
}
