//! Model checking over all interleavings of grants, recalls, VMs, messages, deaths and restarts.

use model_checker::{Model, Property, check};

use super::world::World;
use crate::CellId;

/// An operation that is tried once, at any time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Operation {
    Give(u16, u16, u64),
    Recall(u16, u16, u64),
    /// Requests memory: holder, home, bytes.
    Request(u16, u16, u64),
    /// Requests unused memory back: home, holder, bytes.
    Release(u16, u16, u64),
    /// Returns requested memory: holder, home, bytes.
    GiveBack(u16, u16, u64),
    /// Starts a VM: cell, VM number, bytes.
    Run(u16, u8, u64),
    /// Ends a VM, if it runs.
    End(u8),
}

/// Configuration of the model: cells with two bytes each.
#[derive(Clone, Debug)]
struct Config {
    cells: usize,
    operations: Vec<Operation>,
    /// The cells that may die once and restart.
    mortal: Vec<u16>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    world: World,
    done: Vec<bool>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Step {
    Do(usize),
    Deliver(CellId, CellId),
    Die(CellId),
    Learn(CellId, CellId),
    Return(u16),
}

impl Model for Config {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            world: World::new(&vec![2; self.cells]),
            done: vec![false; self.operations.len()],
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let world = &state.world;
        steps.extend(
            (0..self.operations.len())
                .filter(|operation| !state.done[*operation])
                .map(Step::Do),
        );
        steps.extend(world.links.under_way().map(|(from, to)| Step::Deliver(from, to)));
        steps.extend(
            world
                .links
                .unknown_deaths()
                .map(|(at, dead)| Step::Learn(at, dead)),
        );
        for number in &self.mortal {
            match world.living(*number) {
                Some(cell) if cell.life == 1 => steps.push(Step::Die(cell)),
                None if world.can_start(*number) => steps.push(Step::Return(*number)),
                _ => {}
            }
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        let world = &mut next.world;
        match step {
            Step::Do(operation) => {
                next.done[operation] = true;
                world.attempt(self.operations[operation]);
            }
            Step::Deliver(from, to) => world.deliver(from, to),
            Step::Die(cell) => world.crash(cell),
            Step::Learn(at, dead) => world.learn(at, dead),
            Step::Return(number) => world.start(CellId { number, life: 2 }, &[]),
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("sound", |_, state: &State| {
            let broken = state.world.broken();
            if let Some(broken) = &broken {
                println!("{broken}");
            }
            broken.is_none()
        })]
    }
}

impl World {
    /// Does it, where the cell lives and can.
    fn attempt(&mut self, operation: Operation) {
        match operation {
            Operation::End(number) => _ = self.end(number),
            Operation::Give(at, ..)
            | Operation::Recall(at, ..)
            | Operation::Request(at, ..)
            | Operation::Release(at, ..)
            | Operation::GiveBack(at, ..)
            | Operation::Run(at, ..) => {
                if let Some(at) = self.living(at) {
                    self.attempt_at(at, operation);
                }
            }
        }
    }

    fn attempt_at(&mut self, at: CellId, operation: Operation) {
        let effects = match operation {
            Operation::Give(_, to, bytes) => self.give(at, to, bytes),
            Operation::Recall(_, from, bytes) => self.recall(at, from, bytes),
            Operation::Request(_, of, bytes) => self.request(at, of, bytes),
            Operation::Release(_, from, bytes) => self.release(at, from, bytes),
            Operation::GiveBack(_, to, bytes) => self.give_back(at, to, bytes),
            Operation::Run(_, number, bytes) => return self.run(at, number, bytes),
            Operation::End(_) => return,
        };
        self.carry_out(at, effects);
    }
}

/// The home starts VMs while it grants memory, and the holder while a recall is pending.
#[test]
fn memory_is_conserved_through_grant_use_and_recall() {
    let operations = vec![
        Operation::Give(0, 1, 1),
        Operation::Give(0, 1, 1),
        Operation::Run(0, 1, 2),
        Operation::Run(1, 2, 3),
        Operation::End(2),
        Operation::Recall(0, 1, 1),
        Operation::Recall(0, 1, 1),
        Operation::Run(0, 3, 1),
    ];
    check(
        Config {
            cells: 2,
            operations,
            mortal: vec![],
        },
        1000,
    );
}

/// The home, the holder, or both die at any time, and start anew.
#[test]
fn memory_is_conserved_though_home_and_holder_die() {
    for mortal in [vec![0], vec![1], vec![0, 1]] {
        let operations = vec![
            Operation::Give(0, 1, 1),
            Operation::Give(0, 1, 1),
            Operation::Run(0, 1, 1),
            Operation::Run(1, 2, 3),
            Operation::End(2),
            Operation::Recall(0, 1, 1),
        ];
        let cells = 2;
        check(
            Config {
                cells,
                operations,
                mortal,
            },
            1000,
        );
    }
}

/// Requests, returns and recalls cross, and the home, the holder, or both die.
#[test]
fn memory_is_conserved_through_requests_and_returns_though_cells_die() {
    for mortal in [vec![], vec![0], vec![1], vec![0, 1]] {
        let operations = vec![
            Operation::Request(1, 0, 1),
            Operation::Request(1, 0, 1),
            Operation::Run(0, 1, 1),
            Operation::Run(1, 2, 3),
            Operation::GiveBack(1, 0, 1),
            Operation::Release(0, 1, 2),
        ];
        let cells = 2;
        check(
            Config {
                cells,
                operations,
                mortal,
            },
            1000,
        );
    }
}

/// One home, two that want all that it has, and any of the three dies.
#[test]
fn memory_is_never_granted_twice() {
    for mortal in 0..3 {
        let operations = vec![
            Operation::Give(0, 1, 2),
            Operation::Give(0, 2, 2),
            Operation::Run(1, 1, 4),
            Operation::Recall(0, 1, 2),
        ];
        let mortal = vec![mortal];
        let cells = 3;
        check(
            Config {
                cells,
                operations,
                mortal,
            },
            1000,
        );
    }
}
