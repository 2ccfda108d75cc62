//! The decisions of a keeper, as a state machine without descriptors and clock: events in, effects out.

use std::collections::VecDeque;
use std::time::Duration;

/// Starts of successors within [`STARTS_WINDOW`] at most. A monitor that always fails ends its VM.
pub const STARTS_MAX: usize = 10;
/// The time that [`STARTS_MAX`] counts in.
pub const STARTS_WINDOW: Duration = Duration::from_secs(10);
/// That time where a cell may connect, so that each start is [`CONNECT_TIMEOUT`] after the end of the one
/// before.
pub const STARTS_WINDOW_IN_CELL: Duration = Duration::from_secs(20);
/// The delay of the second start within [`STARTS_WINDOW`]. The first has none, and each further one has twice
/// the delay of the one before, up to [`START_DELAY_MAX`]. Ten starts of a monitor that ends at once so take
/// 5.55 s.
pub const START_DELAY_MIN: Duration = Duration::from_millis(50);
/// The longest delay of a start.
pub const START_DELAY_MAX: Duration = Duration::from_secs(1);
/// Time that a cell has to connect when the monitor is gone, before the successor starts. A cell whose
/// process has died starts again within it on an idle machine.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that the monitor has to report that it ends the VM after the end of the lease. The keeper ends the VM
/// of a monitor that is stopped, or has died without a successor.
pub const NOTICE_TIMEOUT: Duration = Duration::from_millis(500);
/// Time that the monitor has to end the VM after it has reported that it does. A shard may take 5 s to flush
/// its disks.
pub const END_TIMEOUT: Duration = Duration::from_secs(6);
/// Children of a keeper at most, so that the reports of all their exits fit the socket of a new monitor.
pub const CHILDREN_MAX: usize = 64;

/// Something that has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A child was started.
    Started {
        /// The child.
        pid: i32,
    },
    /// A child has ended, and is not reaped.
    Exited {
        /// The child.
        pid: i32,
        /// Its status, as `waitpid` returns it.
        status: i32,
    },
    /// The monitor acknowledged the exit of a child.
    Reap {
        /// The child.
        pid: i32,
    },
    /// The monitor sent descriptors for the next slot.
    Put {
        /// Whether they are the first.
        begin: bool,
        /// Whether they are the last, so that the next slot takes the place of the one before.
        end: bool,
        /// The number of descriptors.
        files: usize,
    },
    /// The monitor named its successor.
    Successor,
    /// The monitor asked for the end of all children.
    KillAll,
    /// A monitor took the slot: it is another than the one that had the reports so far.
    Taken,
    /// The connected monitor is gone: its socket is closed, or it has ended.
    MonitorGone {
        /// The time since the keeper's start.
        now: Duration,
    },
    /// The client closed its lease, and has not detached.
    LeaseEnded {
        /// The time since the keeper's start.
        now: Duration,
    },
    /// The monitor reported that it ends the VM.
    Ending {
        /// The time since the keeper's start.
        now: Duration,
    },
    /// Time has passed.
    Time {
        /// The time since the keeper's start.
        now: Duration,
    },
    /// The monitor left a socket that a cell may connect to.
    Listening,
    /// A cell connected, and is the monitor now.
    Connected,
    /// The successor was started, and is connected.
    SuccessorStarted,
    /// The successor could not be started.
    StartFailed {
        /// The time since the keeper's start.
        now: Duration,
    },
}

/// Something that the keeper does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Reports the exit of a child to the connected monitor.
    Report {
        /// The child.
        pid: i32,
        /// Its status.
        status: i32,
    },
    /// Reaps a child that has ended.
    Reap {
        /// The child.
        pid: i32,
    },
    /// Refuses the request: with this number of an error.
    Refuse(i32),
    /// Disconnects and ends the former monitor now, and starts the successor after a delay. A cell may
    /// connect until then.
    StartSuccessor {
        /// The delay.
        after: Duration,
    },
    /// Kills a child.
    Kill {
        /// The child.
        pid: i32,
    },
    /// Ends the keeper.
    Exit,
}

/// The monitor, as far as decisions need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Monitor {
    Connected,
    /// The former monitor is gone, and its successor is not started yet.
    Starting,
    /// There will be none again: the VM is being ended.
    Gone,
}

#[derive(Clone, Copy, Debug)]
struct Child {
    pid: i32,
    /// The status of a child that has ended.
    exit: Option<i32>,
}

/// The state of a keeper. A new one has a monitor and nothing else.
#[derive(Debug)]
pub struct State {
    children: Vec<Child>,
    /// The number of descriptors for the next monitor. Those of a slot that is not whole are none of them.
    slot: usize,
    /// The number of those that have come for the next slot.
    incoming: usize,
    monitor: Monitor,
    has_successor: bool,
    /// A cell may connect when the monitor is gone.
    is_listening: bool,
    /// The times of the latest starts of successors. The last one may be still to come.
    starts: VecDeque<Duration>,
    /// The time since the keeper's start when the VM has to have ended, if it is to end.
    end_by: Option<Duration>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            children: Vec::new(),
            slot: 0,
            incoming: 0,
            monitor: Monitor::Connected,
            has_successor: false,
            is_listening: false,
            starts: VecDeque::new(),
            end_by: None,
        }
    }
}

impl State {
    /// Takes an event, and decides what follows, in this order.
    pub fn handle(&mut self, event: Event) -> Vec<Effect> {
        match event {
            Event::Started { pid } => self.started(pid),
            Event::Exited { pid, status } => self.exited(pid, status),
            Event::Reap { pid } => self.reap(pid),
            Event::Put { begin, end, files } => {
                self.put(begin, end, files);
                Vec::new()
            }
            Event::Successor => {
                self.has_successor = true;
                Vec::new()
            }
            Event::Listening => {
                self.is_listening = true;
                Vec::new()
            }
            Event::LeaseEnded { now } => {
                // The monitor may have noticed it first.
                self.end_by.get_or_insert(now + NOTICE_TIMEOUT);
                Vec::new()
            }
            Event::Ending { now } => {
                self.end_by = Some(now + END_TIMEOUT);
                Vec::new()
            }
            Event::Time { now } => {
                if self.end_by.take_if(|end_by| now >= *end_by).is_none() {
                    return Vec::new();
                }
                // The monitor, or the next one, has the reports of their exits, and ends the VM.
                self.running().map(|pid| Effect::Kill { pid }).collect()
            }
            Event::KillAll => self.running().map(|pid| Effect::Kill { pid }).collect(),
            Event::Taken => self.reports().collect(),
            Event::MonitorGone { now } if self.monitor == Monitor::Connected => self.monitor_gone(now),
            Event::StartFailed { now } if self.monitor == Monitor::Starting => self.monitor_gone(now),
            Event::SuccessorStarted if self.monitor == Monitor::Starting => {
                self.monitor = Monitor::Connected;
                Vec::new()
            }
            Event::Connected if self.monitor == Monitor::Starting => {
                self.monitor = Monitor::Connected;
                // No successor was started.
                self.starts.pop_back();
                Vec::new()
            }
            Event::MonitorGone { .. }
            | Event::StartFailed { .. }
            | Event::SuccessorStarted
            | Event::Connected => Vec::new(),
        }
    }

    /// Reports of all exits that were not acknowledged.
    fn reports(&self) -> impl Iterator<Item = Effect> {
        self.children.iter().filter_map(|child| {
            let (pid, status) = (child.pid, child.exit?);
            Some(Effect::Report { pid, status })
        })
    }

    /// The children that have not ended, as far as is known.
    pub fn running(&self) -> impl Iterator<Item = i32> {
        let running = self.children.iter().filter(|child| child.exit.is_none());
        running.map(|child| child.pid)
    }

    /// The time since the keeper's start when it kills its children, if the VM has not ended by then.
    pub fn end_by(&self) -> Option<Duration> {
        self.end_by
    }

    /// Whether there is room for another child.
    pub fn has_room(&self) -> bool {
        self.children.len() < CHILDREN_MAX
    }

    /// Whether the slot is whole.
    pub fn has_slot(&self) -> bool {
        self.slot > 0
    }

    fn started(&mut self, pid: i32) -> Vec<Effect> {
        self.children.push(Child { pid, exit: None });
        if self.monitor == Monitor::Gone {
            return vec![Effect::Kill { pid }];
        }
        Vec::new()
    }

    fn exited(&mut self, pid: i32, status: i32) -> Vec<Effect> {
        let known = self.children.iter_mut().find(|child| child.pid == pid);
        let Some(child) = known.filter(|child| child.exit.is_none()) else {
            return Vec::new();
        };
        child.exit = Some(status);
        match self.monitor {
            Monitor::Connected => vec![Effect::Report { pid, status }],
            // The successor gets the report when it takes the slot.
            Monitor::Starting => Vec::new(),
            Monitor::Gone => self.end(),
        }
    }

    fn reap(&mut self, pid: i32) -> Vec<Effect> {
        let found = self.children.iter().position(|child| child.pid == pid);
        let Some(index) = found else {
            return vec![Effect::Refuse(libc::ESRCH)];
        };
        if self.children.get(index).is_some_and(|child| child.exit.is_none()) {
            return vec![Effect::Refuse(libc::EBUSY)];
        }
        self.children.remove(index);
        vec![Effect::Reap { pid }]
    }

    fn put(&mut self, begin: bool, end: bool, files: usize) {
        if begin {
            self.incoming = 0;
        }
        self.incoming += files;
        if end {
            self.slot = std::mem::take(&mut self.incoming);
        }
    }

    fn monitor_gone(&mut self, now: Duration) -> Vec<Effect> {
        let window = match self.is_listening {
            true => STARTS_WINDOW_IN_CELL,
            false => STARTS_WINDOW,
        };
        let is_recent = |start: &Duration| now.saturating_sub(*start) < window;
        while self.starts.front().is_some_and(|start| !is_recent(start)) {
            self.starts.pop_front();
        }
        if self.has_slot() && self.has_successor && self.starts.len() < STARTS_MAX {
            let delay = start_delay(self.starts.len());
            let after = match self.is_listening {
                true => delay.max(CONNECT_TIMEOUT),
                false => delay,
            };
            self.starts.push_back(now + after);
            self.monitor = Monitor::Starting;
            // It takes the slot, and then gets the reports.
            return vec![Effect::StartSuccessor { after }];
        }
        self.monitor = Monitor::Gone;
        let mut effects: Vec<_> = self.running().map(|pid| Effect::Kill { pid }).collect();
        effects.extend(self.end());
        effects
    }

    /// Reaps the children that have ended, and ends with the last.
    fn end(&mut self) -> Vec<Effect> {
        let ended = self.children.extract_if(.., |child| child.exit.is_some());
        let mut effects: Vec<_> = ended.map(|child| Effect::Reap { pid: child.pid }).collect();
        if self.children.is_empty() {
            effects.push(Effect::Exit);
        }
        effects
    }
}

/// The delay of a start after so many others within [`STARTS_WINDOW`].
fn start_delay(starts: usize) -> Duration {
    let Some(doublings) = starts.checked_sub(1) else {
        return Duration::ZERO;
    };
    let factor = 1_u32.checked_shl(doublings as u32).unwrap_or(u32::MAX);
    START_DELAY_MIN.saturating_mul(factor).min(START_DELAY_MAX)
}

#[cfg(test)]
mod tests {
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
        // Without a lease's end or a report nothing ends.
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
    fn successor_gets_the_reports_that_were_not_acknowledged() {
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
    fn vm_ends_with_its_monitor_unless_slot_and_successor_are_there() {
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
        // The successor begins anew, and empties the slot by a whole one without descriptors.
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
            "a cell can't have what nobody left"
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
    fn check(
        effects: &[Effect],
        children: &mut BTreeMap<i32, Known>,
        is_ending: &mut bool,
        seed: u64,
    ) -> bool {
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
}
