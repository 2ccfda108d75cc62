use std::collections::BTreeMap;

use super::*;

const WHOLE: Event = Event::Put {
    begin: true,
    end: true,
    files: 1,
};

#[test]
fn vm_whose_monitor_does_not_report_its_end_is_ended_500_ms_after_the_lease() {
    let ms = Duration::from_millis;
    let mut state = after(&[
        WHOLE,
        Event::Started { pid: 7 },
        Event::LeaseEnded { now: ms(100) },
    ]);
    assert_eq!(state.end_by(), Some(ms(600)));
    assert_eq!(state.handle(Event::Time { now: ms(599) }), []);
    assert_eq!(
        state.handle(Event::Time { now: ms(600) }),
        [Effect::Kill { pid: 7 }]
    );
    assert_eq!(
        (state.end_by(), state.handle(Event::Time { now: ms(700) })),
        (None, Vec::new())
    );
}

#[test]
fn monitor_that_reports_the_end_has_6_s_for_it_whichever_comes_first() {
    let ms = Duration::from_millis;
    let (lease, ending) = (Event::LeaseEnded { now: ms(100) }, Event::Ending { now: ms(300) });
    for events in [[lease, ending], [ending, lease]] {
        let mut state = after(&[WHOLE, Event::Started { pid: 7 }]);
        events.into_iter().for_each(|event| _ = state.handle(event));
        assert_eq!(state.handle(Event::Time { now: ms(6299) }), [], "{events:?}");
        let killed = state.handle(Event::Time { now: ms(6300) });
        assert_eq!(killed, [Effect::Kill { pid: 7 }], "{events:?}");
    }
    // Without the end of a lease or a report, nothing ends.
    let mut state = after(&[WHOLE, Event::Started { pid: 7 }]);
    assert_eq!(state.handle(Event::Time { now: ms(1 << 40) }), []);
}

fn after(events: &[Event]) -> State {
    let mut state = State::default();
    for &event in events {
        state.handle(event);
    }
    state
}

const AT_ONCE: Effect = Effect::StartSuccessor {
    after: Duration::ZERO,
};

fn gone(seconds: u64) -> Event {
    Event::MonitorGone {
        now: Duration::from_secs(seconds),
    }
}

#[test]
fn exit_is_reported_once_and_reaped_after_its_acknowledgement() {
    let mut state = after(&[Event::Started { pid: 7 }]);
    assert_eq!(
        state.handle(Event::Reap { pid: 7 }),
        [Effect::Refuse(libc::EBUSY)]
    );
    let exited = Event::Exited { pid: 7, status: 256 };
    let report = Effect::Report { pid: 7, status: 256 };
    assert_eq!(state.handle(exited), [report]);
    assert_eq!(state.handle(exited), []);
    assert_eq!(state.handle(Event::Reap { pid: 7 }), [Effect::Reap { pid: 7 }]);
    assert_eq!(
        state.handle(Event::Reap { pid: 7 }),
        [Effect::Refuse(libc::ESRCH)]
    );
}

#[test]
fn successor_receives_the_reports_that_were_not_acknowledged() {
    let mut state = after(&[WHOLE, Event::Successor]);
    for pid in [7, 8, 9, 10] {
        state.handle(Event::Started { pid });
    }
    for pid in [7, 8] {
        state.handle(Event::Exited { pid, status: 9 });
    }
    state.handle(Event::Reap { pid: 7 });
    let report = |pid| Effect::Report { pid, status: 9 };
    let exited = |pid| Event::Exited { pid, status: 9 };
    assert_eq!(state.handle(gone(1)), [AT_ONCE]);
    assert_eq!(state.handle(Event::SuccessorStarted), []);
    assert_eq!(state.handle(Event::Taken), [report(8)]);
    assert_eq!(state.handle(exited(9)), [report(9)]);
    assert!(matches!(
        state.handle(gone(2))[..],
        [Effect::StartSuccessor { .. }]
    ));
    assert_eq!(state.handle(exited(10)), [], "no monitor is connected");
    assert_eq!(state.handle(Event::SuccessorStarted), []);
    assert_eq!(state.handle(Event::Taken), [report(8), report(9), report(10)]);
}

#[test]
fn vm_ends_with_its_monitor_unless_it_has_a_slot_and_a_successor() {
    let put = |begin, end, files| Event::Put { begin, end, files };
    for events in [
        &[][..],
        &[WHOLE],
        &[Event::Successor],
        &[Event::Successor, put(true, false, 3)],
        &[Event::Successor, WHOLE, put(true, true, 0)],
        &[Event::Successor, put(true, false, 3), put(false, false, 3)],
    ] {
        let mut state = after(events);
        for pid in [7, 8] {
            state.handle(Event::Started { pid });
        }
        state.handle(Event::Exited { pid: 8, status: 0 });
        let ended = [Effect::Kill { pid: 7 }, Effect::Reap { pid: 8 }];
        assert_eq!(state.handle(gone(1)), ended, "{events:?}");
        assert_eq!(state.handle(gone(1)), []);
        let last = [Effect::Reap { pid: 7 }, Effect::Exit];
        assert_eq!(state.handle(Event::Exited { pid: 7, status: 9 }), last);
        assert_eq!(after(events).handle(gone(1)), [Effect::Exit], "without children");
    }
    let parts = [Event::Successor, put(true, false, 3), put(false, true, 0)];
    assert_eq!(after(&parts).handle(gone(1)), [AT_ONCE]);
}

#[test]
fn slot_stays_until_the_next_one_is_whole() {
    let put = |begin, end, files| Event::Put { begin, end, files };
    let mut state = after(&[Event::Successor, WHOLE, put(true, false, 3)]);
    assert!(state.has_slot());
    assert_eq!(state.handle(gone(1)), [AT_ONCE]);
    // The successor starts again, and empties the slot by a whole one without descriptors.
    let mut state = after(&[Event::Successor, WHOLE, put(true, false, 3), put(true, true, 0)]);
    assert!(!state.has_slot());
    assert_eq!(state.handle(gone(1)), [Effect::Exit]);
}

/// The delay of the next start of a successor, or none if the VM is ended.
fn delay(state: &mut State, event: Event) -> Option<Duration> {
    match state.handle(event)[..] {
        [Effect::StartSuccessor { after }] => Some(after),
        [Effect::Kill { pid: 7 }] => None,
        ref other => panic!("{other:?}"),
    }
}

/// The delays of starts until the VM is ended, of monitors that end when their life is over. The starts
/// of those without a life fail.
fn delays(lives: impl FnMut() -> Option<Duration>) -> Vec<Duration> {
    delays_of(
        after(&[WHOLE, Event::Successor, Event::Started { pid: 7 }]),
        lives,
    )
}

fn delays_of(mut state: State, mut lives: impl FnMut() -> Option<Duration>) -> Vec<Duration> {
    let mut now = Duration::from_secs(5);
    let mut event = Event::MonitorGone { now };
    let mut delays = Vec::new();
    while let Some(after) = delay(&mut state, event)
        && delays.len() < 100
    {
        delays.push(after);
        now += after;
        event = Event::StartFailed { now };
        if let Some(life) = lives() {
            assert_eq!(state.handle(Event::SuccessorStarted), []);
            now += life;
            event = Event::MonitorGone { now };
        }
    }
    delays
}

#[test]
fn monitor_that_ends_at_once_is_started_ten_times_with_growing_delays_before_its_vm_ends() {
    let expected = [0, 50, 100, 200, 400, 800, 1000, 1000, 1000, 1000].map(Duration::from_millis);
    assert_eq!(delays(|| Some(Duration::ZERO)), expected);
    assert_eq!(delays(|| None), expected, "a start that fails counts");
    let mut turn = 0;
    let mixed = || {
        turn += 1;
        (turn % 3 == 0).then_some(Duration::from_millis(400))
    };
    assert_eq!(delays(mixed), expected);
    assert!(expected.iter().sum::<Duration>() < STARTS_WINDOW);
    assert_eq!(start_delay(usize::MAX), START_DELAY_MAX);
}

#[test]
fn monitor_of_a_vm_in_a_cell_that_ends_in_half_a_second_is_started_ten_times() {
    let in_cell = [
        WHOLE,
        Event::Successor,
        Event::Listening,
        Event::Started { pid: 7 },
    ];
    let half = Duration::from_millis(500);
    assert_eq!(
        delays_of(after(&in_cell), || Some(half)),
        [CONNECT_TIMEOUT; STARTS_MAX]
    );
    let long = delays_of(after(&in_cell), || Some(2 * CONNECT_TIMEOUT));
    assert_eq!(long.len(), 100, "the VM was ended after {long:?}");
}

#[test]
fn starts_before_the_window_neither_delay_the_next_nor_end_the_vm() {
    assert_eq!(delays(|| Some(STARTS_WINDOW)), [Duration::ZERO; 100]);
    let often = delays(|| Some(Duration::from_secs(1)));
    assert_eq!(often.len(), 100, "the VM was ended after {often:?}");
}

#[test]
fn monitor_that_is_gone_is_succeeded_once_although_its_end_is_found_twice() {
    let mut state = after(&[WHOLE, Event::Successor, Event::Started { pid: 7 }]);
    let failed = Event::StartFailed {
        now: Duration::from_secs(1),
    };
    assert_eq!(state.handle(failed), [], "nothing was to be started");
    assert_eq!(state.handle(gone(1)), [AT_ONCE]);
    assert_eq!(state.handle(gone(1)), []);
    assert_eq!(delay(&mut state, failed), Some(START_DELAY_MIN));
    assert_eq!(state.handle(Event::SuccessorStarted), []);
    assert_eq!(state.handle(failed), []);
    assert_eq!(delay(&mut state, gone(1)), Some(2 * START_DELAY_MIN));
}

#[test]
fn cell_that_connects_in_time_is_the_monitor_and_no_start_is_counted() {
    let mut state = after(&[
        WHOLE,
        Event::Successor,
        Event::Listening,
        Event::Started { pid: 7 },
    ]);
    assert_eq!(state.handle(Event::Connected), [], "a monitor is connected");
    for second in 0..100 {
        // The delay of the first start each time: the others were never made.
        assert_eq!(delay(&mut state, gone(second)), Some(CONNECT_TIMEOUT));
        assert_eq!(state.handle(Event::Connected), []);
    }
    assert_eq!(delay(&mut state, gone(100)), Some(CONNECT_TIMEOUT));
    assert_eq!(state.handle(Event::SuccessorStarted), []);
    assert_eq!(state.handle(Event::Exited { pid: 7, status: 9 }).len(), 1);
    let mut ended = after(&[Event::Listening, Event::Started { pid: 7 }]);
    assert_eq!(
        delay(&mut ended, gone(1)),
        None,
        "a cell can't have a VM that no monitor left"
    );
    assert_eq!(ended.handle(Event::Connected), []);
    let last = [Effect::Reap { pid: 7 }, Effect::Exit];
    assert_eq!(ended.handle(Event::Exited { pid: 7, status: 9 }), last);
}

/// A generator of numbers that differ with the seed (xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A child as the test has seen it.
#[derive(Default)]
struct Known {
    has_exited: bool,
    is_acknowledged: bool,
    is_killed: bool,
    reports: usize,
}

/// Checks effects against the children as the test has seen them. Returns whether the keeper has ended.
fn check(effects: &[Effect], children: &mut BTreeMap<i32, Known>, is_ending: &mut bool, seed: u64) -> bool {
    let mut has_ended = false;
    for effect in effects {
        assert!(!has_ended, "seed {seed}: an effect after the end");
        match *effect {
            Effect::Report { pid, .. } => {
                let child = children.get_mut(&pid).expect("a report of a child");
                assert!(child.has_exited && !*is_ending, "seed {seed}");
                child.reports += 1;
                assert_eq!(child.reports, 1, "seed {seed}: twice to one monitor");
            }
            Effect::Reap { pid } => {
                let child = children.remove(&pid).expect("a child that is not reaped yet");
                assert!(child.has_exited, "seed {seed}");
                assert!(
                    child.is_acknowledged || *is_ending,
                    "seed {seed}: before its acknowledgement"
                );
            }
            Effect::StartSuccessor { .. } => {
                assert!(!*is_ending, "seed {seed}");
                children.values_mut().for_each(|child| child.reports = 0);
            }
            Effect::Kill { pid } => {
                *is_ending = true;
                children.get_mut(&pid).expect("a child").is_killed = true;
            }
            Effect::Exit => {
                assert!(children.is_empty(), "seed {seed}: children are left");
                has_ended = true;
            }
            Effect::Refuse(_) => {}
        }
    }
    has_ended
}

fn run(seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (mut state, mut children, mut now) = (State::default(), BTreeMap::<i32, Known>::new(), 0);
    let (mut is_ending, mut is_starting) = (false, false);
    let mut next_pid = 1;
    for _ in 0..200 {
        now += random.below(3);
        let some_pid = random.below(next_pid as u64 + 1) as i32;
        let event = match random.below(8) {
            0 | 1 if !is_ending && !is_starting => {
                children.insert(next_pid, Known::default());
                next_pid += 1;
                Event::Started { pid: next_pid - 1 }
            }
            2 | 3 => match children.iter_mut().find(|(_, child)| !child.has_exited) {
                Some((&pid, child)) => {
                    child.has_exited = true;
                    Event::Exited { pid, status: 0 }
                }
                None => continue,
            },
            4 if !is_ending && !is_starting => {
                if let Some(child) = children.get_mut(&some_pid) {
                    child.is_acknowledged = child.has_exited;
                }
                Event::Reap { pid: some_pid }
            }
            5 if !is_ending && !is_starting => Event::Put {
                begin: random.below(2) == 0,
                end: random.below(3) > 0,
                files: random.below(3) as usize,
            },
            6 if !is_ending && !is_starting => match random.below(3) {
                0 => Event::Listening,
                _ => Event::Successor,
            },
            6 if is_starting => Event::StartFailed {
                now: Duration::from_secs(now),
            },
            7 => gone(now),
            _ => continue,
        };
        let had_exited: Vec<i32> = children
            .iter()
            .filter(|(_, one)| one.has_exited)
            .map(|(&pid, _)| pid)
            .collect();
        let effects = state.handle(event);
        let starts = effects
            .iter()
            .any(|effect| matches!(effect, Effect::StartSuccessor { .. }));
        let is_decisive = match event {
            Event::MonitorGone { .. } => !is_starting,
            Event::StartFailed { .. } => true,
            _ => false,
        };
        if is_decisive && !starts {
            (is_ending, is_starting) = (true, false);
        }
        let has_ended = check(&effects, &mut children, &mut is_ending, seed);
        is_starting |= starts;
        if is_starting && random.below(2) == 0 {
            is_starting = false;
            let next = match random.below(2) {
                0 => Event::Connected,
                _ => Event::SuccessorStarted,
            };
            assert_eq!(state.handle(next), []);
            let reports = state.handle(Event::Taken);
            check(&reports, &mut children, &mut is_ending, seed);
            assert!(
                had_exited.iter().all(|pid| children[pid].reports == 1),
                "seed {seed}"
            );
        }
        if has_ended {
            return;
        }
        // Without a monitor something is left to wait for, and each child was killed.
        assert!(
            !is_ending || !children.is_empty(),
            "seed {seed}: it stays for nothing"
        );
        let left_alive = |child: &Known| !child.has_exited && !child.is_killed;
        assert!(!is_ending || !children.values().any(left_alive), "seed {seed}");
    }
}

#[test]
fn no_sequence_of_events_reaps_too_early_or_leaves_a_keeper_without_a_reason() {
    (1..2000).for_each(run);
}
