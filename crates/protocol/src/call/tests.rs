//! Every way that a few calls can go over a bad network, by model checking; and many calls at random.

use std::collections::BTreeMap;

use proptest::prelude::*;
use stateright::{Checker, Model, Property};

use super::*;

/// Calls that the caller makes.
const CALLS: u64 = 3;

/// Both sides, and every packet that was ever sent: each may arrive at any time, again, or never.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct World {
    caller: Caller<u64>,
    callee: Callee<u64>,
    called: u64,
    requests: Vec<Request<u64>>,
    replies: Vec<Reply<u64>>,
    /// What is being executed.
    executing: Vec<u64>,
    /// How often each was executed.
    executed: BTreeMap<u64, u32>,
    /// How often each was answered, as the caller saw it.
    answered: BTreeMap<u64, u32>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Step {
    Call,
    Request(Request<u64>),
    Finish(u64),
    Reply(Reply<u64>),
}

struct Network;

fn send<T: PartialEq>(packets: &mut Vec<T>, packet: T) {
    if !packets.contains(&packet) {
        packets.push(packet);
    }
}

impl Model for Network {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World {
            caller: Caller::default(),
            callee: Callee::default(),
            called: 0,
            requests: Vec::new(),
            replies: Vec::new(),
            executing: Vec::new(),
            executed: BTreeMap::new(),
            answered: BTreeMap::new(),
        }]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        if world.called < CALLS {
            steps.push(Step::Call);
        }
        steps.extend(world.requests.iter().cloned().map(Step::Request));
        steps.extend(world.executing.iter().copied().map(Step::Finish));
        steps.extend(world.replies.iter().cloned().map(Step::Reply));
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let mut world = world.clone();
        match step {
            Step::Call => {
                let request = world.caller.call(world.called * 10).expect("fewer than a window");
                world.called += 1;
                send(&mut world.requests, request);
            }
            Step::Request(request) => {
                let number = request.number;
                match world.callee.take(request) {
                    Act::Execute(_) => {
                        world.executing.push(number);
                        *world.executed.entry(number).or_default() += 1;
                    }
                    Act::Again(reply) => send(&mut world.replies, reply),
                    Act::Nothing => {}
                }
            }
            Step::Finish(number) => {
                world.executing.retain(|other| *other != number);
                let reply = world.callee.finish(number, number * 10 + 1)?;
                send(&mut world.replies, reply);
            }
            Step::Reply(reply) => {
                if world.caller.take(&reply) {
                    *world.answered.entry(reply.number).or_default() += 1;
                }
                // Sent again, with what is known to be done by now.
                let again: Vec<_> = world.caller.unanswered().collect();
                again
                    .into_iter()
                    .for_each(|request| send(&mut world.requests, request));
            }
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("executed at most once", |_, world: &World| {
                world.executed.values().all(|times| *times == 1)
            }),
            Property::always(
                "answered at most once, and only what was executed",
                |_, world: &World| {
                    world
                        .answered
                        .iter()
                        .all(|(number, times)| *times == 1 && world.executed.contains_key(number))
                },
            ),
            Property::always("in order", |_, world: &World| {
                world.executed.keys().copied().eq(0..world.executed.len() as u64)
            }),
            Property::sometimes("all answered", |_, world: &World| {
                world.answered.len() as u64 == CALLS
            }),
        ]
    }
}

#[test]
fn calls_are_executed_once_whatever_the_network_does() {
    let checker = Network.checker().threads(1).spawn_bfs().join();
    checker.assert_properties();
    assert!(
        checker.unique_state_count() > 100,
        "{} states",
        checker.unique_state_count()
    );
}

proptest! {
    /// Packets are lost, doubled and mixed by `luck`; in the end, when the network is good, every call has its answer.
    #[test]
    fn every_call_gets_its_answer_once_the_network_is_good(luck in prop::collection::vec(any::<u8>(), 0..2000), calls in 1..300u64) {
        let (mut caller, mut callee) = (Caller::default(), Callee::default());
        let (mut executed, mut answers, mut begun) = (Vec::new(), BTreeMap::new(), 0);
        let mut requests: VecDeque<Request<u64>> = VecDeque::new();
        let mut replies: VecDeque<Reply<u64>> = VecDeque::new();
        // `None`: the network is good, and what was unanswered so far is sent again.
        let good = std::iter::repeat_n(None, 200 * calls as usize + 10_000);
        for chance in luck.into_iter().map(Some).chain(good) {
            if begun < calls && let Ok(request) = caller.call(begun) {
                begun += 1;
                requests.push_back(request);
            }
            if chance.map_or(requests.is_empty(), |chance| chance % 16 == 15) {
                requests.extend(caller.unanswered());
            }
            // Which packet arrives; whether it stays on its way too, or is lost.
            let pick = usize::from(chance.unwrap_or(0));
            if !requests.is_empty() {
                let request = requests.remove(pick % requests.len()).expect("in bounds");
                if chance.is_some_and(|chance| chance % 5 == 1) && requests.len() < 1000 {
                    requests.push_back(request.clone());
                }
                if chance.is_none_or(|chance| chance % 5 != 2) {
                    let number = request.number;
                    match callee.take(request) {
                        Act::Execute(body) => {
                            executed.push(body);
                            replies.extend(callee.finish(number, body + 1));
                        }
                        Act::Again(reply) => replies.push_back(reply),
                        Act::Nothing => {}
                    }
                }
            }
            if !replies.is_empty() {
                let reply = replies.remove(pick % replies.len()).expect("in bounds");
                if chance.is_none_or(|chance| chance % 7 != 3) && caller.take(&reply) {
                    prop_assert_eq!(answers.insert(reply.number, reply.body), None);
                }
            }
        }
        prop_assert_eq!(executed, (0..calls).collect::<Vec<_>>());
        prop_assert!(answers.into_iter().eq((0..calls).map(|number| (number, number + 1))));
    }
}

#[test]
fn a_window_of_calls_is_under_way_at_most() {
    let mut caller = Caller::default();
    for number in 0..WINDOW as u64 {
        assert_eq!(caller.call(()).expect("room").number, number);
    }
    assert!(caller.call(()).is_err());
    assert!(caller.take(&Reply { number: 1, body: () }));
    assert!(caller.call(()).is_err(), "the oldest has no answer yet");
    assert!(caller.take(&Reply { number: 0, body: () }));
    assert_eq!(caller.call(()).expect("room").number, WINDOW as u64);
    assert_eq!(caller.dead().count(), WINDOW - 1);
}

#[test]
fn stories_of_calls_end_well() {
    let (mut answered, mut failed, mut cuts) = (0, 0, 0);
    for seed in 0..30_000 {
        let outcome = super::stories::tell(seed).unwrap_or_else(|what| panic!("{what}"));
        answered += outcome.answered;
        failed += outcome.failed;
        cuts += outcome.cuts;
    }
    // Stories in which nothing happens prove nothing.
    assert!(
        answered > 100_000 && failed > 10_000 && cuts > 10_000,
        "{answered} answered, {failed} failed, {cuts} cuts"
    );
}
