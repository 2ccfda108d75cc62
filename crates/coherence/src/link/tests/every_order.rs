//! Every order of items, packets and ticks between two ends. Packets lie in a set out of which nothing is taken: so each may come
//! never, once, or again at any later time.

use std::collections::BTreeSet;

use stateright::{Model, Property};

use crate::every_order::check;
use crate::link::{Header, Link};

/// To which end, with which item.
type Packet = (usize, Header, Option<u8>);

/// So many items go from each end.
#[derive(Clone, Debug)]
struct Small {
    items: [u8; 2],
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    ends: [Link<u8>; 2],
    sent: [u8; 2],
    /// How often each item of the other end was taken.
    taken: [Vec<u8>; 2],
    way: BTreeSet<Packet>,
    is_refused: bool,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Step {
    Send(usize),
    Deliver(Packet),
    /// All is due.
    Tick(usize),
}

impl State {
    fn send(&mut self, end: usize) {
        let item = self.sent[end];
        let header = self.ends[end].send(item, 0).expect("room");
        self.sent[end] += 1;
        self.way.insert((1 - end, header, Some(item)));
    }

    fn deliver(&mut self, (end, header, item): Packet) {
        match self.ends[end].receive(header, 0) {
            Ok(true) => self.taken[end][usize::from(item.expect("it has a number"))] += 1,
            Ok(false) => {}
            Err(_) => self.is_refused = true,
        }
    }

    fn tick(&mut self, end: usize) {
        let way = &mut self.way;
        self.ends[end].tick(0, |header, item| {
            way.insert((1 - end, header, item.copied()));
        });
    }

    /// If all that is on its way is lost and packets come from now on, all items are taken and both ends know it.
    fn can_end(&self) -> bool {
        let mut state = self.clone();
        state.way.clear();
        for _ in 0..3 {
            for end in [0, 1] {
                state.tick(end);
                for packet in state.way.clone() {
                    state.deliver(packet);
                }
            }
        }
        let is_known = |end: usize| state.ends[end].due_ns().is_none();
        let is_taken = |end: usize| {
            let sent = usize::from(state.sent[1 - end]);
            state.taken[end][..sent].iter().all(|times| *times == 1)
        };
        [0, 1].into_iter().all(|end| is_known(end) && is_taken(end))
    }
}

impl Model for Small {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let taken = |end: usize| vec![0; usize::from(self.items[1 - end])];
        vec![State {
            ends: [Link::new(0, 0), Link::new(0, 0)],
            sent: [0, 0],
            taken: [taken(0), taken(1)],
            way: BTreeSet::new(),
            is_refused: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for end in [0, 1] {
            if state.sent[end] < self.items[end] {
                steps.push(Step::Send(end));
            }
            steps.push(Step::Tick(end));
        }
        steps.extend(state.way.iter().map(|packet| Step::Deliver(*packet)));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        match step {
            Step::Send(end) => next.send(end),
            Step::Deliver(packet) => next.deliver(packet),
            Step::Tick(end) => next.tick(end),
        }
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("each item once", |_, state: &State| {
                state.taken.iter().flatten().all(|times| *times <= 1)
            }),
            Property::always("nothing honest is refused", |_, state: &State| !state.is_refused),
            Property::always("comes to an end if packets come", |_, state: &State| {
                state.can_end()
            }),
            Property::sometimes("all sent and taken", |model: &Small, state: &State| {
                state.sent == model.items && state.taken.iter().flatten().all(|times| *times == 1)
            }),
        ]
    }
}

#[test]
fn four_items_one_way() {
    check(Small { items: [4, 0] }, 1000);
}

#[test]
fn two_items_each_way() {
    check(Small { items: [2, 2] }, 1000);
}
