//! Two engines over links whose packets are lost, doubled and late in every way. As in the links' own test packets lie in a set out of
//! which nothing is taken.

use std::collections::BTreeSet;

use stateright::{Model, Property};

use super::world::{Op, Packet, World};
use crate::every_order::check;
use crate::link::{Header, Link};
use crate::{Layout, NodeId, Page, Want};

const PAGE: Page = Page(0);

/// To whom, with which message.
type Framed = (u16, Header, Option<Packet>);

/// What the one processor of each node does.
#[derive(Clone, Debug)]
struct Small {
    programs: [Vec<Op>; 2],
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    world: World,
    /// Each node's end.
    ends: [Link<Packet>; 2],
    way: BTreeSet<Framed>,
    is_refused: bool,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Step {
    Go(u16),
    Used(u16),
    Deliver(Framed),
    Tick(u16),
}

impl State {
    fn step(&mut self, programs: &[Vec<Op>; 2], step: Step) {
        match step {
            Step::Go(node) => {
                let processor = &mut self.world.outside.processors[usize::from(node)][0];
                processor.seen.clear();
                let op = programs[usize::from(node)][processor.done];
                let value = u32::from(node) * 10 + u32::try_from(processor.done).expect("few") + 1;
                self.world.go(node, 0, op, value);
            }
            Step::Used(node) => self.world.used(node, PAGE),
            Step::Deliver((node, header, packet)) => match self.ends[usize::from(node)].receive(header, 0) {
                Ok(true) => {
                    let packet = packet.expect("it has a number");
                    self.is_refused |= self.world.deliver(packet).is_err();
                }
                Ok(false) => {}
                Err(_) => self.is_refused = true,
            },
            Step::Tick(node) => {
                let way = &mut self.way;
                self.ends[usize::from(node)].tick(0, |header, packet| {
                    way.insert((1 - node, header, packet.copied()));
                });
            }
        }
        self.world.forget_counters();
        for packet in std::mem::take(&mut self.world.outside.outbox) {
            let end = &mut self.ends[usize::from(packet.from)];
            let header = end.send(packet, 0).expect("room");
            self.way.insert((packet.to, header, Some(packet)));
        }
    }

    fn can_go(&self, programs: &[Vec<Op>; 2], node: u16) -> bool {
        let processor = &self.world.outside.processors[usize::from(node)][0];
        processor.waits.is_none() && processor.done < programs[usize::from(node)].len()
    }

    fn can_use(&self, node: u16) -> bool {
        self.world.engines[usize::from(node)].is_held(PAGE) && !self.world.is_awaited(node, PAGE)
    }

    fn is_done(&self, programs: &[Vec<Op>; 2]) -> bool {
        let processors = self.world.outside.processors.iter().flatten();
        processors
            .zip(programs)
            .all(|(processor, program)| processor.done == program.len())
    }

    /// If all that is on its way is lost and packets come from now on, all is done.
    fn can_end(&self, programs: &[Vec<Op>; 2]) -> bool {
        let mut state = self.clone();
        state.way.clear();
        for _ in 0..20 {
            for node in [0, 1] {
                if state.can_go(programs, node) {
                    state.step(programs, Step::Go(node));
                }
                if state.can_use(node) {
                    state.step(programs, Step::Used(node));
                }
                state.step(programs, Step::Tick(node));
                for framed in state.way.clone() {
                    state.step(programs, Step::Deliver(framed));
                }
            }
            if state.is_done(programs) {
                return true;
            }
        }
        false
    }

    /// A message that was sent and has not come yet, each once.
    fn under_way(&self) -> impl Iterator<Item = Packet> {
        let framed = self.way.iter();
        let unheard = framed.filter_map(|(node, header, packet)| {
            let mut end = self.ends[usize::from(*node)].clone();
            packet
                .filter(|_| end.receive(*header, 0) == Ok(true))
                .map(|packet| (header.number, packet))
        });
        let once: BTreeSet<(u64, Packet)> = unheard.collect();
        once.into_iter().map(|(_, packet)| packet)
    }
}

impl Model for Small {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            world: World::new(&Layout::even(NodeId(0), 2, 1), &[1, 1]),
            ends: [Link::new(0, 0), Link::new(0, 0)],
            way: BTreeSet::new(),
            is_refused: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for node in [0, 1] {
            if state.can_go(&self.programs, node) {
                steps.push(Step::Go(node));
            }
            if state.can_use(node) {
                steps.push(Step::Used(node));
            }
            steps.push(Step::Tick(node));
        }
        steps.extend(state.way.iter().map(|framed| Step::Deliver(*framed)));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        next.step(&self.programs, step);
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("sound", |_, state: &State| {
                let wrong = state.world.wrong(PAGE, state.under_way());
                if let Some(wrong) = wrong {
                    println!("{wrong}");
                }
                wrong.is_none() && !state.is_refused
            }),
            Property::always(
                "comes to an end if packets come",
                |model: &Small, state: &State| state.can_end(&model.programs),
            ),
            Property::sometimes("all done", |model: &Small, state: &State| {
                state.is_done(&model.programs)
            }),
        ]
    }
}

#[track_caller]
fn holds(programs: [&[Want]; 2], states_least: usize) {
    let op = |want: &Want| Op {
        want: *want,
        page: PAGE,
    };
    let programs = programs.map(|program| program.iter().map(op).collect());
    check(Small { programs }, states_least);
}

#[test]
fn both_write() {
    let writes = [Want::Write, Want::Write];
    holds([&writes, &writes], 100);
}

#[test]
fn one_reads_and_writes_what_the_other_writes() {
    holds([&[Want::Write, Want::Write], &[Want::Read, Want::Write]], 1000);
}

#[test]
fn one_discards_what_the_other_writes() {
    holds([&[Want::Write, Want::Read], &[Want::Discard, Want::Read]], 100);
}
