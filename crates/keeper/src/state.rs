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
/// Delay of the second start within [`STARTS_WINDOW`]. The first start has none, and each further one has
/// twice the previous delay, up to [`START_DELAY_MAX`]. Ten starts of a monitor that ends at once therefore
/// take 5.55 s.
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
        /// Process id of the child.
        pid: i32,
    },
    /// A child has ended, and is not reaped.
    Exited {
        /// Process id of the child.
        pid: i32,
        /// Its status, as `waitpid` returns it.
        status: i32,
    },
    /// The monitor acknowledged the exit of a child.
    Reap {
        /// Process id of the child.
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
    /// The monitor requested the end of all children.
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
        /// Process id of the child.
        pid: i32,
        /// Wait status of the child, as of wait(2).
        status: i32,
    },
    /// Reaps a child that has ended.
    Reap {
        /// Process id of the child.
        pid: i32,
    },
    /// Refuses the request: with this number of an error.
    Refuse(i32),
    /// Disconnects and ends the former monitor now, and starts the successor after a delay. A cell may
    /// connect until then.
    StartSuccessor {
        /// Delay: longer after each recent start, and long enough for a cell to connect.
        after: Duration,
    },
    /// Kills a child.
    Kill {
        /// Process id of the child.
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
    /// Number of descriptors that have arrived for the next slot.
    incoming: usize,
    monitor: Monitor,
    has_successor: bool,
    /// A cell may connect when the monitor is gone.
    is_listening: bool,
    /// Times of the latest starts of successors. The last one may be in the future.
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
    /// Takes an event, and returns the steps that follow, in order.
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
            // The successor receives the report when it takes the slot.
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
            // The successor takes the slot, and then receives the reports.
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

/// Returns the delay of a start after so many others within [`STARTS_WINDOW`].
fn start_delay(starts: usize) -> Duration {
    let Some(doublings) = starts.checked_sub(1) else {
        return Duration::ZERO;
    };
    let factor = 1_u32.checked_shl(doublings as u32).unwrap_or(u32::MAX);
    START_DELAY_MIN.saturating_mul(factor).min(START_DELAY_MAX)
}

#[cfg(test)]
mod tests;
