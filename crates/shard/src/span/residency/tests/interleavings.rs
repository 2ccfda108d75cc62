//! All interleavings of interrupts, moves, refusals, messages and threads.

use model_checker::{Model, Property, check};

use self::Event::{Init, Interrupt, Move, Nmi, Start};
use super::world::World;
use crate::span::startup::{Startup, Waiter};

/// Limit on messages, above the maximum of these worlds, which is 24.
const MESSAGES_MAX: usize = 32;

/// Event that the given shard causes once, at any time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Event {
    Interrupt(u8, u8),
    Nmi(u8),
    Init(u8),
    /// Start-up interrupt with this page.
    Start(u8, u8),
    /// Order of the home to move to a shard.
    Move(u8),
}

/// Configuration of a small world.
#[derive(Clone, Debug)]
struct Small {
    shards: u8,
    /// Initial shard of the vCPU.
    at: u8,
    events: Vec<Event>,
    /// Whether moves are ordered in the order of the list, each after the home has received the outcome of
    /// the one before. Otherwise they are ordered at any time.
    is_sequential: bool,
    /// Shard whose KVM accepts no arriving vCPU.
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
        !state.done[event] && (!self.is_sequential || !is_open_move(event) || is_first && is_answered)
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
            // Each step removes an item from a channel, an event slot or a thread, so only new messages can
            // continue forever.
            Property::always("comes to rest", |_, state: &State| {
                state.world.messages <= MESSAGES_MAX
            }),
            Property::always("one outcome for each order", |model: &Small, state: &State| {
                let world = &state.world;
                !(model.is_sequential && world.is_at_rest())
                    || world.history.reported() == world.history.orders
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

impl Small {
    fn new(shards: u8, at: u8, events: &[Event]) -> Self {
        Self {
            shards,
            at,
            events: events.to_vec(),
            is_sequential: true,
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

/// One vCPU takes the first and latches the second, in whichever shard the two meet.
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
            is_sequential: false,
            ..small
        },
        1000,
    );
    let events = [Move(1), Move(2), Interrupt(1, 0x41), Start(0, 1)];
    let small = Small::new(3, 0, &events);
    check(
        Small {
            is_sequential: false,
            ..small
        },
        1000,
    );
}

/// Three shards: the home, the previous owner and the target.
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
        for (is_sequential, other) in [(true, Start(refuses, 1)), (false, Nmi(at))] {
            let events = [Move(refuses), Move(refuses), Interrupt(refuses, 0x40), other];
            let refuses = Some(refuses);
            let small = Small::new(2, at, &events);
            check(
                Small {
                    refuses,
                    is_sequential,
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
