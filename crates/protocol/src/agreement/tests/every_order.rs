//! Every order in which claims, messages, deaths and new lives can follow one another.

use model_checker::{Model, Property, check};

use super::super::stories::world::{Name, World};
use crate::CellId;

/// Configuration of the model. Its limits bound the number of interleavings.
#[derive(Clone, Debug)]
struct Config {
    cells: u16,
    /// The links are there, but no cell has sent its hello.
    fresh: bool,
    /// Claims: cell and key.
    claims: Vec<(u16, Name)>,
    /// The cell that may die once.
    mortal: Option<u16>,
    /// And start anew.
    returns: bool,
    /// How often owners change entries; the last change removes one.
    changes: u8,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    world: World,
    claimed: Vec<bool>,
    changed: u8,
    returned: bool,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Step {
    Claim(usize),
    Change(CellId, Name),
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
            world: World::new(self.cells, !self.fresh),
            claimed: vec![false; self.claims.len()],
            changed: 0,
            returned: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let world = &state.world;
        let unclaimed = (0..self.claims.len()).filter(|claim| !state.claimed[*claim]);
        steps.extend(unclaimed.map(Step::Claim));
        if state.changed < self.changes {
            for at in world.nodes.keys() {
                steps.extend(world.owned(*at).map(|key| Step::Change(*at, key)));
            }
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
            if world.nodes.contains_key(&first) {
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
                let at = world.nodes.keys().find(|cell| cell.number == number).copied();
                if let Some(at) = at {
                    world.claim(at, key, 0);
                }
            }
            Step::Change(at, key) => {
                next.changed += 1;
                let value = (next.changed < self.changes).then_some(next.changed);
                world.change(at, key, value);
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
            Property::always("one wins a free key", |model: &Config, state: &State| {
                let world = &state.world;
                let quiet = world.links.is_quiet();
                let all_claimed = state.claimed.iter().all(|claimed| *claimed);
                let simple = world.deaths == 0 && model.changes == 0;
                !(quiet && all_claimed && simple) || {
                    let mut keys: Vec<Name> = model.claims.iter().map(|(_, key)| *key).collect();
                    keys.sort_unstable();
                    keys.dedup();
                    world.won as usize == keys.len()
                }
            }),
            Property::sometimes("one wins, one loses", |_, state: &State| {
                state.world.won > 0 && state.world.lost > 0
            }),
        ]
    }
}

#[test]
fn at_most_one_of_three_claims_wins() {
    let config = Config {
        cells: 3,
        fresh: false,
        claims: vec![(0, 7), (1, 7), (2, 7)],
        mortal: None,
        returns: false,
        changes: 0,
    };
    check(config, 1000);
}

#[test]
fn at_most_one_claim_wins_during_startup() {
    let config = Config {
        cells: 3,
        fresh: true,
        claims: vec![(0, 7), (2, 7)],
        mortal: None,
        returns: false,
        changes: 0,
    };
    check(config, 500);
}

/// A key is won, changed, given up, and claimed by another.
#[test]
fn released_key_can_be_claimed_concurrently() {
    let config = Config {
        cells: 3,
        fresh: false,
        claims: vec![(0, 7), (1, 7)],
        mortal: None,
        returns: false,
        changes: 2,
    };
    check(config, 1000);
}

/// One claimer, the other, or the third dies at any time, and starts anew.
#[test]
fn at_most_one_claim_wins_though_a_cell_restarts() {
    for mortal in 0..3 {
        let config = Config {
            cells: 3,
            fresh: false,
            claims: vec![(0, 7), (1, 7)],
            mortal: Some(mortal),
            returns: true,
            changes: 0,
        };
        check(config, 1000);
    }
}
