//! Every order of claims, packets, ticks, deaths and new lives, with a relay.

use model_checker::{Model, Property, check};

use super::world::{Name, Shape, World};
use crate::CellId;

/// Configuration of the model. Its limits bound the number of interleavings.
#[derive(Clone, Debug)]
struct Config {
    cells: u16,
    shape: Shape,
    /// Each cell that claims a key, and the key.
    claims: Vec<(u16, Name)>,
    /// A cell that may die, once.
    mortal: Option<u16>,
    /// Whether a dead cell may start anew.
    returns: bool,
    /// How often owners change entries; the last change removes one.
    changes: u8,
    /// Ticks in all cells; some come before the packets that they wait for.
    ticks: u8,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    world: World,
    claimed: Vec<bool>,
    changed: u8,
    ticked: u8,
    returned: bool,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Step {
    Claim(usize),
    Change(CellId, Name),
    Tick(CellId),
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
            world: World::new(self.cells, self.shape),
            claimed: vec![false; self.claims.len()],
            changed: 0,
            ticked: 0,
            returned: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let world = &state.world;
        let unclaimed = (0..self.claims.len()).filter(|claim| !state.claimed[*claim]);
        steps.extend(unclaimed.map(Step::Claim));
        if state.changed < self.changes {
            for at in world.cells.keys() {
                steps.extend(world.owned(*at).into_iter().map(|key| Step::Change(*at, key)));
            }
        }
        if state.ticked < self.ticks {
            let needing = world.cells.keys().filter(|at| world.needs_tick(**at));
            steps.extend(needing.map(|at| Step::Tick(*at)));
        }
        steps.extend(world.links.under_way().map(|(from, to)| Step::Deliver(from, to)));
        steps.extend(
            world
                .links
                .unknown_deaths()
                .map(|(at, dead)| Step::Learn(at, dead)),
        );
        if let Some(number) = self.mortal {
            let first = CellId { number, life: 1 };
            if world.cells.contains_key(&first) {
                steps.push(Step::Die(first));
            } else if self.returns && !state.returned && world.can_start(number) {
                steps.push(Step::Return(number));
            }
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        let world = &mut next.world;
        match step {
            Step::Claim(claim) => {
                next.claimed[claim] = true;
                let (number, key) = self.claims[claim];
                let at = world.cells.keys().find(|cell| cell.number == number).copied();
                if let Some(at) = at {
                    world.claim(at, key);
                }
            }
            Step::Change(at, key) => {
                next.changed += 1;
                let value = (next.changed < self.changes).then_some(next.changed);
                world.change(at, key, value);
            }
            Step::Tick(at) => {
                next.ticked += 1;
                world.tick(at);
            }
            Step::Deliver(from, to) => world.deliver(from, to),
            Step::Die(cell) => world.crash(cell),
            Step::Learn(at, dead) => world.learn(at, dead),
            Step::Return(number) => {
                next.returned = true;
                world.start(CellId { number, life: 2 });
            }
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("sound", |_, state: &State| state.world.broken().is_none()),
            // Without deaths no reply is lost: no request has to be repeated.
            Property::always("one wins a free key", |model: &Config, state: &State| {
                let world = &state.world;
                let all_claimed = state.claimed.iter().all(|claimed| *claimed);
                let simple = model.mortal.is_none() && model.changes == 0;
                let at_rest = world.links.under_way().next().is_none() && all_claimed;
                !(at_rest && simple) || world.won == 1
            }),
            // A death is enough to ask again; only a relay that hangs takes ticks.
            Property::always("no claim waits at rest", |_, state: &State| {
                let world = &state.world;
                let at_rest = world.links.is_quiet();
                !at_rest || world.asked.is_empty()
            }),
            Property::sometimes("a relay gathers replies", |_, state: &State| {
                state.world.gathered > 0
            }),
        ]
    }
}

const CALM: Config = Config {
    cells: 4,
    shape: Shape::Star,
    claims: Vec::new(),
    mortal: None,
    returns: false,
    changes: 0,
    ticks: 0,
};

#[test]
fn gathered_votes_let_exactly_one_claim_win() {
    let claims = vec![(0, 7), (2, 7), (3, 7)];
    check(Config { claims, ..CALM }, 5000);
}

#[test]
fn votes_are_gathered_through_a_chain_of_relays() {
    for shape in [Shape::Star, Shape::Chain] {
        let claims = vec![(0, 7)];
        check(
            Config {
                claims,
                shape,
                ticks: 3,
                ..CALM
            },
            300,
        );
    }
}

#[test]
fn gathered_receipts_prove_that_all_cells_have_the_change() {
    // After three ticks the owner repeats its request.
    for (cells, ticks, states_least) in [(4, 1, 1000), (3, 3, 700)] {
        let config = Config {
            claims: vec![(0, 7)],
            cells,
            changes: 2,
            ticks,
            ..CALM
        };
        check(config, states_least);
    }
}

/// The claimer, the relay or a cell below it dies at any time, and starts anew.
#[test]
fn claim_settles_though_a_cell_of_the_tree_restarts() {
    for mortal in 0..3 {
        let config = Config {
            claims: vec![(0, 7)],
            cells: 3,
            mortal: Some(mortal),
            returns: true,
            ticks: 2,
            ..CALM
        };
        check(config, 500);
    }
}

#[test]
fn no_vote_is_lost_when_a_relay_dies() {
    for shape in [Shape::Star, Shape::Chain] {
        let config = Config {
            claims: vec![(0, 7)],
            shape,
            mortal: Some(1),
            ..CALM
        };
        check(config, 1000);
    }
}

#[test]
fn two_claims_settle_though_their_relay_dies() {
    let config = Config {
        claims: vec![(0, 7), (2, 7)],
        cells: 3,
        mortal: Some(1),
        ..CALM
    };
    check(config, 1000);
}
