//! Long stories by chance: more cells, loans, VMs, deaths and new lives than every order could be tried of. A
//! failing one prints its seed and its last steps.

use std::collections::VecDeque;

use super::super::{Amounts, Effect};
use super::world::{Count, Vm, World};
use crate::CellId;
use crate::rng::Rng;

const STORIES: u64 = 30_000;
const STEPS: usize = 200;
const TRACE: usize = 60;
const BYTES_MAX: usize = 12;

struct Story {
    world: World,
    rng: Rng,
    lives: Vec<u32>,
    /// VMs that have ended while their cell was dead: where, who, what they had.
    ended: Vec<(u16, Vm, Amounts)>,
    vms: Vm,
    trace: VecDeque<String>,
}

impl Story {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let cells = 2 + rng.below(4);
        let bytes: Vec<u64> = (0..cells).map(|_| 1 + rng.below(BYTES_MAX) as u64).collect();
        Self {
            world: World::new(&bytes),
            rng,
            lives: vec![1; cells],
            ended: Vec::new(),
            vms: 0,
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
        let links: Vec<_> = self.world.links.under_way().collect();
        if let Some((from, to)) = self.rng.one_of(links.into_iter()) {
            let what = format!(
                "{from} to {to}: {:?}",
                self.world.links.next(from, to).expect("under way")
            );
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

    /// Does all of it, or dies on the way.
    fn carry_out(&mut self, at: CellId, effects: Vec<Effect>) {
        if effects.len() > 1 && self.rng.below(16) == 0 {
            let done = self.rng.below(effects.len());
            self.say(format!("{at} dies when it has done {done} of {effects:?}"));
            self.world.carry_out(at, effects.into_iter().take(done));
            self.world.crash(at);
        } else {
            self.world.carry_out(at, effects);
        }
    }

    fn step(&mut self) {
        let Some(at) = self.rng.one_of(self.world.cells.keys().copied()) else {
            return self.start();
        };
        let other = self.rng.below(self.lives.len()) as u16;
        let bytes = 1 + self.rng.below(BYTES_MAX) as u64;
        match self.rng.below(29) {
            0..3 if other != at.number => {
                self.say(format!("{at} gives {other} {bytes}"));
                let effects = self.world.give(at, other, bytes);
                self.carry_out(at, effects);
            }
            3..6 if other != at.number => {
                let given = self.world.cells[&at].given().get(&other).copied();
                let bytes = 1 + self.rng.below(given.map_or(BYTES_MAX, |given| given as usize)) as u64;
                self.say(format!("{at} asks {other} for {bytes}"));
                let effects = self.world.recall(at, other, bytes);
                self.carry_out(at, effects);
            }
            6..9 => {
                self.vms = self.vms.wrapping_add(1);
                self.say(format!("VM {} of {bytes} comes to {at}", self.vms));
                self.world.run(at, self.vms, bytes);
            }
            9..11 => {
                let vms: Vec<_> = self.world.vms.keys().copied().collect();
                if let Some(number) = self.rng.one_of(vms.into_iter()) {
                    self.end_vm(number);
                }
            }
            11 if self.rng.below(4) == 0 => {
                self.say(format!("{at} dies"));
                self.world.crash(at);
            }
            11 => self.start(),
            12 => {
                let stale: Vec<_> = self.world.stale.iter().copied().collect();
                if let Some((at, number)) = self.rng.one_of(stale.into_iter()) {
                    self.say(format!("cell {at} gives VM {number} up"));
                    self.world.give_up(at, number);
                }
            }
            13..15 => self.learn(),
            15..18 if other != at.number => {
                self.say(format!("{at} requests {bytes} of {other}"));
                let effects = self.world.request(at, other, bytes);
                self.carry_out(at, effects);
            }
            18 | 19 if other != at.number => {
                self.say(format!("{at} wants {other} to release {bytes}"));
                let effects = self.world.release(at, other, bytes);
                self.carry_out(at, effects);
            }
            20 if other != at.number => {
                let bytes = self.world.cells[&at].returnable(other).min(bytes);
                self.say(format!("{at} returns {bytes} to {other}"));
                let effects = self.world.give_back(at, other, bytes);
                self.carry_out(at, effects);
            }
            _ => self.deliver(),
        }
    }

    fn end_vm(&mut self, number: Vm) {
        let at = self.world.vms[&number].0;
        self.say(format!("VM {number} ends in cell {at}"));
        if let Some(parts) = self.world.end(number) {
            self.ended.push((at, number, parts));
        }
    }

    fn start(&mut self) {
        let number = self.rng.below(self.lives.len());
        if self.world.can_start(number as u16) {
            self.start_cell(number);
        }
    }

    fn start_cell(&mut self, number: usize) {
        self.lives[number] += 1;
        let cell = CellId {
            number: number as u16,
            life: self.lives[number],
        };
        // Some that have ended it takes for running.
        let mut ended = std::mem::take(&mut self.ended);
        ended.retain(|(at, _, _)| *at == cell.number && self.rng.below(2) == 0);
        let ended: Vec<_> = ended.into_iter().map(|(_, vm, parts)| (vm, parts)).collect();
        self.say(format!("{cell} starts, and finds {ended:?}, which have ended"));
        self.world.start(cell, &ended);
    }

    fn settle(&mut self) {
        while !self.world.links.is_quiet() {
            self.learn();
            self.deliver();
        }
    }

    /// Everything comes, all live, all VMs end, and all memory is called back.
    fn end(&mut self) {
        self.settle();
        for number in 0..self.lives.len() {
            if self.world.living(number as u16).is_none() {
                self.start_cell(number);
            }
        }
        self.settle();
        for number in self.world.vms.clone().into_keys() {
            self.end_vm(number);
        }
        for (at, number) in self.world.stale.clone() {
            self.world.give_up(at, number);
        }
        for (at, ledger) in self.world.cells.clone() {
            for (holder, bytes) in ledger.given() {
                let effects = self.world.recall(at, *holder, *bytes);
                self.world.carry_out(at, effects);
            }
        }
        self.settle();
    }

    #[track_caller]
    fn check(&self, seed: u64, broken: Option<String>) {
        if let Some(broken) = broken {
            for line in &self.trace {
                println!("{line}");
            }
            panic!("seed {seed}: {broken}");
        }
    }
}

#[test]
fn every_random_run_keeps_the_invariants() {
    let mut all = Count::default();
    for seed in 0..STORIES {
        let mut story = Story::new(seed);
        for _ in 0..STEPS {
            story.step();
            story.check(seed, story.world.broken());
        }
        story.end();
        story.check(seed, story.world.broken().or_else(|| story.world.lost()));
        let count = story.world.count;
        all.taken += count.taken;
        all.back += count.back;
        all.kept += count.kept;
        all.borrowing += count.borrowing;
        all.lent += count.lent;
        all.declined += count.declined;
        all.returned += count.returned;
    }
    println!("{all:?}");
    // Stories in which nothing happens prove nothing.
    let least = [
        all.taken,
        all.back,
        all.kept,
        all.borrowing,
        all.lent,
        all.declined,
        all.returned,
    ];
    assert!(least.iter().all(|count| *count > 10_000), "{all:?}");
}
