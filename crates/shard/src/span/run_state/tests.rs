//! A vCPU's thread and those who put mail into its slot, in every order.

use stateright::{Checker, Model, Property};

use super::{Notification, RunState};

/// What the thread does next, as `Vcpu::run`, `SpanVcpu::before` and `EventSlot` have it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Thread {
    /// Clears the flag that a kick sets.
    Clear,
    Take,
    /// Enters the guest or sleeps, if there is no mail.
    Decide,
    Sleeping,
    /// Looks at the flag, in the kernel.
    Entering,
    InGuest,
    /// Is out again, with an exit to serve.
    Left,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    thread: Thread,
    run_state: RunState,
    has_events: bool,
    /// Events that are still to be put in.
    letters: u8,
    flag: bool,
    /// Calls under way: decided, not carried out.
    kicks: u8,
    wakes: u8,
    /// Since the thread last took its mail.
    calls: u8,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    Put,
    Kick,
    Wake,
    /// The thread goes on.
    Go,
    /// It sleeps instead; or the guest exits, or the sleep ends, by itself.
    GoOtherwise,
}

struct Letters(u8);

impl Model for Letters {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            thread: Thread::Clear,
            run_state: RunState::default(),
            has_events: false,
            letters: self.0,
            flag: false,
            kicks: 0,
            wakes: 0,
            calls: 0,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let waits = match state.thread {
            Thread::Sleeping => true,
            Thread::InGuest => !state.flag,
            _ => false,
        };
        steps.extend((state.letters > 0).then_some(Step::Put));
        steps.extend((state.kicks > 0).then_some(Step::Kick));
        steps.extend((state.wakes > 0).then_some(Step::Wake));
        steps.extend((!waits).then_some(Step::Go));
        let has_choice = waits || state.thread == Thread::Decide;
        steps.extend(has_choice.then_some(Step::GoOtherwise));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        match step {
            Step::Put => {
                next.letters -= 1;
                next.has_events = true;
                match next.run_state.notify() {
                    Notification::None => {}
                    Notification::Kick => (next.kicks, next.calls) = (state.kicks + 1, state.calls + 1),
                    Notification::Wake => (next.wakes, next.calls) = (state.wakes + 1, state.calls + 1),
                }
            }
            Step::Kick => {
                next.kicks -= 1;
                next.flag = true;
            }
            Step::Wake => {
                next.wakes -= 1;
                if state.thread == Thread::Sleeping {
                    next.run_state.set_outside_guest();
                    next.thread = Thread::Clear;
                }
            }
            Step::Go | Step::GoOtherwise => next.go(step == Step::Go),
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nobody waits beside mail uncalled", |_, state: &State| {
                let is_called = match state.thread {
                    Thread::Sleeping => state.wakes > 0,
                    Thread::InGuest => state.kicks > 0 || state.flag,
                    _ => true,
                };
                !state.has_events || is_called
            }),
            Property::always("called once", |_, state: &State| state.calls <= 1),
            Property::sometimes("kicked", |_, state: &State| {
                state.thread == Thread::InGuest && state.flag
            }),
            Property::sometimes("woken", |_, state: &State| {
                state.thread == Thread::Sleeping && state.wakes > 0
            }),
        ]
    }
}

impl State {
    fn go(&mut self, enters: bool) {
        self.thread = match self.thread {
            Thread::Clear => {
                self.flag = false;
                Thread::Take
            }
            Thread::Take => {
                (self.has_events, self.calls) = (false, 0);
                Thread::Decide
            }
            Thread::Decide if self.has_events => Thread::Clear,
            Thread::Decide if enters => {
                self.run_state.set_in_guest();
                Thread::Entering
            }
            Thread::Decide => {
                self.run_state.set_blocked();
                Thread::Sleeping
            }
            Thread::Entering if self.flag => Thread::Left,
            Thread::Entering => Thread::InGuest,
            Thread::InGuest => Thread::Left,
            Thread::Left | Thread::Sleeping => {
                self.run_state.set_outside_guest();
                Thread::Clear
            }
        };
    }
}

#[test]
fn event_is_always_noticed_and_notified_at_most_once() {
    let checker = Letters(4).checker().spawn_bfs().join();
    checker.assert_properties();
    let states = checker.unique_state_count();
    assert!(states > 200, "{states} states");
}

#[test]
fn thread_outside_the_guest_is_not_notified_and_none_twice() {
    let mut run_state = RunState::default();
    assert_eq!(run_state.notify(), Notification::None);
    run_state.set_in_guest();
    assert_eq!(
        [(); 2].map(|()| run_state.notify()),
        [Notification::Kick, Notification::None]
    );
    run_state.set_blocked();
    assert_eq!(
        [(); 2].map(|()| run_state.notify()),
        [Notification::Wake, Notification::None]
    );
    run_state.set_in_guest();
    run_state.set_outside_guest();
    assert_eq!(run_state.notify(), Notification::None);
}

#[test]
fn exit_request_kicks_only_a_thread_in_the_guest() {
    let mut run_state = RunState::default();
    assert_eq!(run_state.request_exit(), Notification::None, "awake");
    run_state.set_blocked();
    assert_eq!(run_state.request_exit(), Notification::None, "asleep");
    assert_eq!(
        run_state.notify(),
        Notification::Wake,
        "and still to be woken for mail"
    );
    run_state.set_in_guest();
    assert_eq!(run_state.request_exit(), Notification::Kick);
    assert_eq!(run_state.request_exit(), Notification::None, "on its way out");
}
