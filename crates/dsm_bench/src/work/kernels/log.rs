//! What a thread of a program waited for: in all, and in each phase, which is from one meeting of all threads to the next.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use dsm::{Meter, Node, now_ns, ran_ns};
use serde::{Deserialize, Serialize};

/// After that lanes have told what they counted: they do when they sleep.
const METER_DELAY: Duration = Duration::from_millis(5);

/// A thread's part of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// How long it ran, nanoseconds by its own clock, without waiting for others.
    pub cpu_ns: u64,
    /// How often it waited to read.
    pub reads: u64,
    /// To write what it could not read.
    pub writes: u64,
    /// To write what it could read.
    pub upgrades: u64,
}

/// A phase of one thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// At the same time as the others, and what the meeting at the end took.
    pub together: Part,
    /// While it had a lock for which others wait.
    pub in_turn: Part,
}

/// What a run took on one node.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// From start to end, nanoseconds.
    pub ns: u64,
    /// What its node counted meanwhile, the start included.
    pub meter: Meter,
    /// If they were asked for.
    pub phases: Vec<Phase>,
}

/// Where it is written down.
#[derive(Debug)]
pub(super) struct Log<'a> {
    node: &'a Node,
    has_phases: bool,
    thread: libc::pid_t,
    begun: Cell<Meter>,
    began_ns: Cell<u64>,
    ended_ns: Cell<u64>,
    /// What is written down already.
    noted: Cell<Meter>,
    noted_cpu_ns: Cell<u64>,
    phase: Cell<Phase>,
    phases: RefCell<Vec<Phase>>,
}

impl<'a> Log<'a> {
    /// Of this thread, with phases or without.
    pub fn new(node: &'a Node, has_phases: bool) -> Self {
        Self {
            node,
            has_phases,
            thread: nix::unistd::gettid().as_raw(),
            begun: Cell::default(),
            began_ns: Cell::new(0),
            ended_ns: Cell::new(0),
            noted: Cell::default(),
            noted_cpu_ns: Cell::new(0),
            phase: Cell::default(),
            phases: RefCell::default(),
        }
    }

    /// Counts from here on, while nobody does anything.
    pub fn begin(&self) {
        self.begun.set(self.settled());
        self.noted.set(self.begun.get());
    }

    /// Time is from here on.
    pub fn start(&self) {
        self.noted_cpu_ns.set(self.cpu_ns());
        self.began_ns.set(now_ns());
    }

    /// WaitMode for other threads, which is not its own time.
    pub fn wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.stop_clock();
        let result = wait();
        self.noted_cpu_ns.set(self.cpu_ns());
        result
    }

    /// The lock is this thread's: how long it ran for it is not its own time.
    pub fn turn_begins(&self) {
        self.noted_cpu_ns.set(self.cpu_ns());
        self.note(|phase| &mut phase.together);
    }

    /// The lock is about to be free.
    pub fn turn_ends(&self) {
        self.note(|phase| &mut phase.in_turn);
    }

    /// What ran until now is the thread's own time; what runs from now on is not, until somebody says so.
    pub fn stop_clock(&self) {
        if self.has_phases {
            let mut phase = self.phase.get();
            phase.together.cpu_ns += self.cpu_ns() - self.noted_cpu_ns.get();
            self.phase.set(phase);
        }
    }

    /// All have come.
    pub fn phase_ends(&self) {
        self.ended_ns.set(now_ns());
        if self.has_phases {
            self.note(|phase| &mut phase.together);
            self.phases.borrow_mut().push(self.phase.take());
        }
    }

    /// All of it, after the last phase.
    pub fn figures(self) -> Figures {
        Figures {
            ns: self.ended_ns.get() - self.began_ns.get(),
            meter: self.settled() - self.begun.get(),
            phases: self.phases.into_inner(),
        }
    }

    fn note(&self, part: impl FnOnce(&mut Phase) -> &mut Part) {
        if !self.has_phases {
            return;
        }
        let ran_ns = self.cpu_ns() - self.noted_cpu_ns.get();
        let now = self.settled();
        let new = now - self.noted.get();
        let mut phase = self.phase.get();
        let part = part(&mut phase);
        part.cpu_ns += ran_ns;
        part.reads += new.reads.count;
        part.writes += new.writes.count;
        part.upgrades += new.upgrades.count;
        self.phase.set(phase);
        self.noted.set(now);
        self.noted_cpu_ns.set(self.cpu_ns());
    }

    fn settled(&self) -> Meter {
        std::thread::sleep(METER_DELAY);
        self.node.meter()
    }

    fn cpu_ns(&self) -> u64 {
        ran_ns(self.thread).unwrap_or_default()
    }
}
