//! Model checking over all interleavings of messages, ticks, deaths and restarts.

use model_checker::{Model, Property, check};

use super::super::Hop;
use super::world::World;
use crate::CellId;

/// Configuration of the model: cell 0 sends to all and to cell 2, along a tree. Its limits bound the number
/// of interleavings.
#[derive(Clone, Debug)]
struct Config {
    cells: u16,
    /// The last one starts only now.
    newcomer: bool,
    tells: u8,
    sends: u8,
    /// In all cells; some come before what they confirm was sent.
    ticks: u8,
    /// The cell that may die once.
    mortal: Option<u16>,
    /// Whether the dead cell may restart.
    returns: bool,
    /// The link between cells 1 and 2 may end.
    cut: bool,
    /// Each cell is below the one before, instead of all below the first.
    chain: bool,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    world: World,
    told: u8,
    sent: u8,
    ticked: u8,
    returned: bool,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Step {
    Tell,
    Send,
    Tick(CellId),
    Deliver(CellId, CellId),
    Link(CellId, CellId),
    Cut,
    Die(CellId),
    Learn(CellId, CellId),
    Return(u16),
}

const SOURCE: CellId = CellId { number: 0, life: 1 };

fn first(number: u16) -> CellId {
    CellId { number, life: 1 }
}

impl Config {
    fn tree(&self, cells: &[CellId]) -> Vec<Hop> {
        let below = |place: usize| match place {
            0 => cells.len() - 1,
            _ if self.chain => cells.len() - 1 - place,
            _ => 0,
        };
        let hop = |(place, cell): (usize, &CellId)| Hop {
            cell: *cell,
            below: u16::try_from(below(place)).unwrap(),
        };
        cells.iter().enumerate().map(hop).collect()
    }
}

impl Model for Config {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let mut world = World::new(self.cells - u16::from(self.newcomer), true);
        if self.newcomer {
            world.start(first(self.cells - 1));
        }
        vec![State {
            world,
            told: 0,
            sent: 0,
            ticked: 0,
            returned: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let world = &state.world;
        if let Some(source) = world.cells.get(&SOURCE) {
            if state.told < self.tells {
                steps.push(Step::Tell);
            }
            if state.sent < self.sends && source.peers.contains_key(&first(2)) {
                steps.push(Step::Send);
            }
        }
        if state.ticked < self.ticks {
            let needing = world.cells.iter().filter(|(_, cell)| cell.needs_tick());
            steps.extend(needing.map(|(at, _)| Step::Tick(*at)));
        }
        steps.extend(world.under_way().map(|(from, to)| Step::Deliver(from, to)));
        steps.extend(world.unlinked.iter().map(|(at, to)| Step::Link(*at, *to)));
        steps.extend(
            world
                .links
                .unknown_deaths()
                .map(|(at, dead)| Step::Learn(at, dead)),
        );
        if self.cut && world.cut.is_empty() {
            steps.push(Step::Cut);
        }
        if let Some(number) = self.mortal {
            let starts = !world.cells.keys().any(|cell| cell.number == number);
            if world.cells.contains_key(&first(number)) {
                steps.push(Step::Die(first(number)));
            } else if self.returns
                && starts
                && !state.returned
                && world.links.unknown_deaths().next().is_none()
            {
                steps.push(Step::Return(number));
            }
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        let world = &mut next.world;
        match step {
            Step::Tell => {
                next.told += 1;
                world.send_to_all(SOURCE, |cells| self.tree(&cells));
            }
            Step::Send => {
                next.sent += 1;
                world.send(SOURCE, first(2));
            }
            Step::Tick(at) => {
                next.ticked += 1;
                world.tick(at);
            }
            Step::Deliver(from, to) => world.deliver(from, to),
            Step::Link(at, to) => world.link(at, to),
            Step::Cut => world.cut(first(1), first(2), true),
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
            Property::always("once and in order", |_, state: &State| {
                state.world.broken.is_none()
            }),
            // Messages that a cut link lost silently are resent after ticks.
            Property::always("nothing is missing at rest", |model: &Config, state: &State| {
                model.cut || !state.world.missing()
            }),
            Property::sometimes("a message went by a relay", |_, state: &State| {
                let mut cells = state.world.cells.values();
                cells.any(|cell| cell.peers.values().any(|peer| peer.owes_ack))
            }),
        ]
    }
}

const CALM: Config = Config {
    cells: 4,
    newcomer: false,
    tells: 2,
    sends: 1,
    ticks: 0,
    mortal: None,
    returns: false,
    cut: false,
    chain: false,
};

#[test]
fn unicast_and_multicast_keep_their_order() {
    for chain in [false, true] {
        let config = Config {
            tells: 3,
            sends: 2,
            chain,
            ..CALM
        };
        check(config, 200);
    }
}

#[test]
fn retransmitted_message_is_delivered_once() {
    check(
        Config {
            ticks: 4,
            cells: 3,
            ..CALM
        },
        500,
    );
}

/// The source, the relay or a cell below it dies at any time, and starts anew.
#[test]
fn delivery_holds_though_a_cell_restarts() {
    for mortal in 0..3 {
        let config = Config {
            cells: 3,
            tells: 1,
            mortal: Some(mortal),
            returns: true,
            ..CALM
        };
        check(config, 500);
    }
}

#[test]
fn delivery_holds_though_a_relay_dies() {
    for chain in [false, true] {
        let config = Config {
            mortal: Some(1),
            tells: 1,
            chain,
            ..CALM
        };
        check(config, 400);
    }
}

#[test]
fn delivery_holds_though_a_relay_lacks_the_link() {
    check(
        Config {
            cells: 3,
            newcomer: true,
            tells: 1,
            sends: 0,
            ..CALM
        },
        500,
    );
}

#[test]
fn delivery_holds_though_a_relay_loses_the_link() {
    check(
        Config {
            cells: 3,
            cut: true,
            ticks: 4,
            ..CALM
        },
        500,
    );
}
