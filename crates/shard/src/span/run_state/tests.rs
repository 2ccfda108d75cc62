//! Model of a vCPU's thread and the senders of its events, checked in every interleaving.

use model_checker::{Model, Property, check};

use super::{Notification, RunState};

/// Next step of the thread, as in `Vcpu::run`, `SpanVcpu::prepare_entry` and `EventSlot`.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Thread {
    /// Clears the flag that a kick sets.
    Clear,
    Take,
    /// Enters the guest or blocks, if no event is pending.
    Decide,
    Blocked,
    /// Checks the flag in the kernel.
    Entering,
    InGuest,
    /// Has left the guest with an exit to serve.
    Left,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    thread: Thread,
    run_state: RunState,
    has_events: bool,
    /// Number of events that are still to be posted.
    events_left: u8,
    flag: bool,
    /// Notifications in flight: decided, not yet delivered.
    kicks: u8,
    wakes: u8,
    /// Notifications since the thread last took its events.
    notifications: u8,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    Post,
    Kick,
    Wake,
    /// The thread takes its next step.
    Go,
    /// The thread blocks instead; or the guest exits, or the wait ends, by itself.
    GoAlternatively,
}

struct Senders(u8);

impl Model for Senders {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            thread: Thread::Clear,
            run_state: RunState::default(),
            has_events: false,
            events_left: self.0,
            flag: false,
            kicks: 0,
            wakes: 0,
            notifications: 0,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let waits = match state.thread {
            Thread::Blocked => true,
            Thread::InGuest => !state.flag,
            _ => false,
        };
        steps.extend((state.events_left > 0).then_some(Step::Post));
        steps.extend((state.kicks > 0).then_some(Step::Kick));
        steps.extend((state.wakes > 0).then_some(Step::Wake));
        steps.extend((!waits).then_some(Step::Go));
        let has_choice = waits || state.thread == Thread::Decide;
        steps.extend(has_choice.then_some(Step::GoAlternatively));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        match step {
            Step::Post => {
                next.events_left -= 1;
                next.has_events = true;
                match next.run_state.notify() {
                    Notification::None => {}
                    Notification::Kick => {
                        (next.kicks, next.notifications) = (state.kicks + 1, state.notifications + 1)
                    }
                    Notification::Wake => {
                        (next.wakes, next.notifications) = (state.wakes + 1, state.notifications + 1)
                    }
                }
            }
            Step::Kick => {
                next.kicks -= 1;
                next.flag = true;
            }
            Step::Wake => {
                next.wakes -= 1;
                if state.thread == Thread::Blocked {
                    next.run_state.set_outside_guest();
                    next.thread = Thread::Clear;
                }
            }
            Step::Go | Step::GoAlternatively => next.go(step == Step::Go),
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "no thread waits with a pending event without a notification",
                |_, state: &State| {
                    let is_notified = match state.thread {
                        Thread::Blocked => state.wakes > 0,
                        Thread::InGuest => state.kicks > 0 || state.flag,
                        _ => true,
                    };
                    !state.has_events || is_notified
                },
            ),
            Property::always("notified once", |_, state: &State| state.notifications <= 1),
            Property::sometimes("kicked", |_, state: &State| {
                state.thread == Thread::InGuest && state.flag
            }),
            Property::sometimes("woken", |_, state: &State| {
                state.thread == Thread::Blocked && state.wakes > 0
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
                (self.has_events, self.notifications) = (false, 0);
                Thread::Decide
            }
            Thread::Decide if self.has_events => Thread::Clear,
            Thread::Decide if enters => {
                self.run_state.set_in_guest();
                Thread::Entering
            }
            Thread::Decide => {
                self.run_state.set_blocked();
                Thread::Blocked
            }
            Thread::Entering if self.flag => Thread::Left,
            Thread::Entering => Thread::InGuest,
            Thread::InGuest => Thread::Left,
            Thread::Left | Thread::Blocked => {
                self.run_state.set_outside_guest();
                Thread::Clear
            }
        };
    }
}

#[test]
fn event_is_always_noticed_and_notified_at_most_once() {
    check(Senders(4), 201);
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
    assert_eq!(run_state.request_exit(), Notification::None, "outside the guest");
    run_state.set_blocked();
    assert_eq!(run_state.request_exit(), Notification::None, "blocked");
    assert_eq!(run_state.notify(), Notification::Wake, "an event still wakes it");
    run_state.set_in_guest();
    assert_eq!(run_state.request_exit(), Notification::Kick);
    assert_eq!(
        run_state.request_exit(),
        Notification::None,
        "it leaves the guest already"
    );
}
