//! Every order in which packets can arrive, be lost and be doubled, with moves and a death.

use std::collections::BTreeSet;

use stateright::{Checker, Model, Property};

use super::super::stories::world::{Sent, World, cell};
use crate::CellId;

/// A small world. What is allowed bounds the number of orders.
#[derive(Clone, Debug)]
struct Small {
    cells: u16,
    messages: u8,
    /// Where the object moves to, in this order, each time from wherever it is.
    moves: Vec<u16>,
    /// Who may die.
    mortal: Option<u16>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    world: World,
    moved: usize,
    learned: BTreeSet<CellId>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Step {
    Send,
    Move,
    Arrive(CellId, CellId, Sent),
    Again(CellId),
    Die,
    Learn(CellId),
}

impl Small {
    /// Who sends: the last cell, which neither has the object at first nor gets it.
    fn sender(&self) -> CellId {
        cell(self.cells - 1)
    }
}

impl Model for Small {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            world: World::new(self.cells),
            moved: 0,
            learned: BTreeSet::new(),
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let world = &state.world;
        if world.sent.get(&self.sender()).copied().unwrap_or(0) < self.messages {
            steps.push(Step::Send);
        }
        if state.moved < self.moves.len() && world.owner().is_some() {
            steps.push(Step::Move);
        }
        if self.mortal.is_some() && world.dead.is_empty() {
            steps.push(Step::Die);
        }
        for at in world.nodes.keys() {
            steps.push(Step::Again(*at));
            if !world.dead.is_empty() && !state.learned.contains(at) {
                steps.push(Step::Learn(*at));
            }
        }
        for (from, to, packet) in &world.network {
            steps.push(Step::Arrive(*from, *to, packet.clone()));
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        let world = &mut next.world;
        match step {
            Step::Send => world.send(self.sender()),
            Step::Move => {
                let from = world.owner().expect("seen before");
                world.offer(from, cell(self.moves[state.moved]));
                if world.owner().is_some() {
                    return None;
                }
                next.moved += 1;
            }
            Step::Arrive(from, to, packet) => world.act(to, |node| node.take(from, packet)),
            Step::Again(at) => world.act(at, |node| node.again()),
            Step::Die => world.crash(cell(self.mortal.expect("seen before"))),
            Step::Learn(at) => {
                let all = (0..self.cells).map(cell).collect();
                let dead: Vec<_> = world.dead.iter().copied().collect();
                world.learn(at, &all, &dead);
                next.learned.insert(at);
            }
        }
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("sound", |_, state: &State| state.world.broken().is_none()),
            Property::sometimes("moved, and all taken", |model: &Small, state: &State| {
                state.moved == model.moves.len()
                    && state.world.owner() == model.moves.last().map(|to| cell(*to))
                    && state.world.done.len() == usize::from(model.messages)
            }),
        ]
    }
}

/// Checks all orders; at least that many states, so that a mistake here is not taken for a proof.
#[track_caller]
fn check(small: Small, states_least: usize) {
    let checker = small.checker().threads(2).spawn_bfs().join();
    let states = checker.unique_state_count();
    println!("{states} states");
    checker.assert_properties();
    assert!(states >= states_least, "{states} states");
}

#[test]
fn two_moves_while_messages_come() {
    let small = Small {
        cells: 3,
        messages: 2,
        moves: vec![1, 0],
        mortal: None,
    };
    check(small, 1000);
}

/// The first owner, the second, and the third cell, which sends: one of them has the object's part of the directory.
#[test]
fn a_move_while_messages_come_and_one_cell_dies() {
    for mortal in 0..3 {
        let small = Small {
            cells: 3,
            messages: 1,
            moves: vec![1],
            mortal: Some(mortal),
        };
        check(small, 1000);
    }
}
