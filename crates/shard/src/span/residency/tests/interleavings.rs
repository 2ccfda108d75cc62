//! Every order in which interrupts, moves, refusals, messages and threads can follow one another.

use stateright::{Checker, Model, Property};

use self::Event::{Init, Interrupt, Move, Nmi, Start};
use super::world::World;
use crate::span::startup::{Startup, Waiter};

/// More than any order of these worlds takes: 24 is the most.
const MESSAGES_MAX: usize = 32;

/// Something that is done once, at any time, by this shard.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Event {
    Interrupt(u8, u8),
    Nmi(u8),
    Init(u8),
    /// Of this page.
    Start(u8, u8),
    /// The home orders a move to that shard.
    Move(u8),
}

/// A small world.
#[derive(Clone, Debug)]
struct Small {
    shards: u8,
    /// Where the vCPU is at first.
    at: u8,
    events: Vec<Event>,
    /// Moves come in the order of the list, each when the home has heard how the one before came out; otherwise at any time.
    patient: bool,
    /// Whose KVM takes no vCPU that comes.
    refuses: Option<u8>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    world: World,
    done: Vec<bool>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Step {
    Do(usize),
    Deliver(u8, u8),
    Go(u8),
}

impl Small {
    fn may(&self, state: &State, event: usize) -> bool {
        let is_open_move = |place: usize| matches!(self.events[place], Move(_)) && !state.done[place];
        let is_first = !(0..event).any(is_open_move);
        let is_answered = state.world.history.reported() == state.world.history.orders;
        !state.done[event] && (!self.patient || !is_open_move(event) || is_first && is_answered)
    }
}

impl Model for Small {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            world: World::new(self.shards, self.at),
            done: vec![false; self.events.len()],
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let events = 0..self.events.len();
        steps.extend(events.filter(|event| self.may(state, *event)).map(Step::Do));
        let under_way = state.world.under_way();
        steps.extend(under_way.map(|(from, to)| Step::Deliver(from, to)));
        steps.extend(state.world.busy().map(Step::Go));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        let world = &mut next.world;
        match step {
            Step::Do(event) => {
                next.done[event] = true;
                match self.events[event] {
                    Interrupt(from, vector) => world.interrupt(from, vector),
                    Nmi(from) => world.nmi(from),
                    Init(shard) => {
                        let from = Some(Waiter { vcpu: 1, shard });
                        world.startup(shard, Startup::Init { from });
                    }
                    Start(from, page) => world.startup(from, Startup::Start { page }),
                    Move(to) => world.order(to),
                }
            }
            Step::Deliver(from, to) => world.deliver(from, to),
            Step::Go(shard) => world.step(shard, self.refuses != Some(shard)),
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("sound", |_, state: &State| {
                let broken = state.world.broken();
                if let Some(broken) = broken {
                    println!("{broken}");
                }
                broken.is_none()
            }),
            // Each step takes something out of a channel, an event slot or a thread's hands: only messages can go on for ever.
            Property::always("comes to rest", |_, state: &State| {
                state.world.messages <= MESSAGES_MAX
            }),
            Property::always("one outcome for each order", |model: &Small, state: &State| {
                let world = &state.world;
                !(model.patient && world.is_at_rest()) || world.history.reported() == world.history.orders
            }),
            Property::sometimes("all done, and at rest", |_, state: &State| {
                state.world.is_at_rest() && state.done.iter().all(|done| *done)
            }),
        ]
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.world.messages <= MESSAGES_MAX + 1
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

impl Small {
    fn new(shards: u8, at: u8, events: &[Event]) -> Self {
        Self {
            shards,
            at,
            events: events.to_vec(),
            patient: true,
            refuses: None,
        }
    }
}

#[test]
fn round_trip_migration_loses_and_doubles_no_interrupt() {
    for at in [0, 1] {
        let moves = [Move(1 - at), Move(at)];
        let events = [&moves[..], &[Interrupt(0, 0x40), Interrupt(1, 0x41), Nmi(1)]].concat();
        check(Small::new(2, at, &events), 10_000);
    }
}

/// One vCPU takes the first and latches the second, wherever the two meet.
#[test]
fn two_nmis_are_both_delivered_during_a_migration() {
    for at in [0, 1] {
        let events = [Move(1 - at), Move(at), Nmi(0), Nmi(1)];
        check(Small::new(2, at, &events), 1000);
    }
}

#[test]
fn round_trip_migration_keeps_the_order_of_startups() {
    for at in [0, 1] {
        let moves = [Move(1 - at), Move(at)];
        let events = [&moves[..], &[Init(1), Start(1, 1), Start(0, 2)]].concat();
        check(Small::new(2, at, &events), 10_000);
    }
}

#[test]
fn overlapping_move_orders_converge() {
    let events = [Move(1), Move(0), Move(1), Interrupt(1, 0x41), Start(0, 1)];
    let small = Small::new(2, 0, &events);
    check(
        Small {
            patient: false,
            ..small
        },
        1000,
    );
    let events = [Move(1), Move(2), Interrupt(1, 0x41), Start(0, 1)];
    let small = Small::new(3, 0, &events);
    check(
        Small {
            patient: false,
            ..small
        },
        1000,
    );
}

/// The home, where it was before, and where it goes to.
#[test]
fn three_shard_migration_loses_and_doubles_no_interrupt() {
    for moves in [[Move(2), Move(0)], [Move(2), Move(1)], [Move(0), Move(2)]] {
        let events = [&moves[..], &[Interrupt(0, 0x40), Interrupt(2, 0x42)]].concat();
        check(Small::new(3, 1, &events), 5_000);
    }
}

#[test]
fn three_shard_migration_keeps_the_order_of_startups() {
    for moves in [[Move(2), Move(0)], [Move(2), Move(1)], [Move(0), Move(2)]] {
        let events = [&moves[..], &[Init(2), Start(0, 1)]].concat();
        check(Small::new(3, 1, &events), 5_000);
    }
}

#[test]
fn refused_vcpu_returns_and_no_event_is_lost() {
    for (at, refuses) in [(0, 1), (1, 0)] {
        for (patient, other) in [(true, Start(refuses, 1)), (false, Nmi(at))] {
            let events = [Move(refuses), Move(refuses), Interrupt(refuses, 0x40), other];
            let refuses = Some(refuses);
            let small = Small::new(2, at, &events);
            check(
                Small {
                    refuses,
                    patient,
                    ..small
                },
                1000,
            );
        }
    }
    for refuses in 0..3 {
        let events = [Move(2), Move(0), Interrupt(0, 0x40), Start(2, 1)];
        let refuses = Some(refuses);
        let small = Small::new(3, 1, &events);
        check(Small { refuses, ..small }, 10_000);
    }
}
