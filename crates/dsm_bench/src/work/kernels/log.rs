//! Waits of a kernel's thread: in all, and in each phase, which lasts from one barrier to the next.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use dsm::{Meter, Node, now_ns, ran_ns};
use serde::{Deserialize, Serialize};

/// Time after which page servers have published their counters: they do so when they sleep.
const METER_DELAY: Duration = Duration::from_millis(5);

/// Counts of a thread in a part of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// CPU time, nanoseconds, without waiting for other threads.
    pub cpu_ns: u64,
    /// Stalls of reads.
    pub reads: u64,
    /// Stalls of writes to pages without a valid copy.
    pub writes: u64,
    /// Stalls of writes to pages that could be read.
    pub upgrades: u64,
}

/// A phase of one thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// Concurrent part, with the barrier at the end.
    pub together: Part,
    /// Part while holding a lock that others wait for.
    pub in_turn: Part,
}

/// Measurements of a run on one node.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Time from start to end, nanoseconds.
    pub ns: u64,
    /// Counters of the node over the run, the start included.
    pub meter: Meter,
    /// Phases, if requested.
    pub phases: Vec<Phase>,
}

/// Recorder of a run.
#[derive(Debug)]
pub(super) struct Log<'a> {
    node: &'a Node,
    has_phases: bool,
    thread: libc::pid_t,
    begun: Cell<Meter>,
    began_ns: Cell<u64>,
    ended_ns: Cell<u64>,
    /// Counters that are recorded already.
    noted: Cell<Meter>,
    noted_cpu_ns: Cell<u64>,
    phase: Cell<Phase>,
    phases: RefCell<Vec<Phase>>,
}

impl<'a> Log<'a> {
    /// Creates the recorder of this thread, with or without phases.
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

    /// Begins to count, while no thread does anything.
    pub fn begin(&self) {
        self.begun.set(self.settled());
        self.noted.set(self.begun.get());
    }

    /// Begins to measure time.
    pub fn start(&self) {
        self.noted_cpu_ns.set(self.cpu_ns());
        self.began_ns.set(now_ns());
    }

    /// Waits for other threads, which does not count as this thread's time.
    pub fn wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.stop_clock();
        let result = wait();
        self.noted_cpu_ns.set(self.cpu_ns());
        result
    }

    /// Begins to hold the lock: the time until here does not count as this thread's.
    pub fn turn_begins(&self) {
        self.noted_cpu_ns.set(self.cpu_ns());
        self.note(|phase| &mut phase.together);
    }

    /// Ends holding the lock.
    pub fn turn_ends(&self) {
        self.note(|phase| &mut phase.in_turn);
    }

    /// Counts the time until now as this thread's. Later time does not count until another call.
    pub fn stop_clock(&self) {
        if self.has_phases {
            let mut phase = self.phase.get();
            phase.together.cpu_ns += self.cpu_ns() - self.noted_cpu_ns.get();
            self.phase.set(phase);
        }
    }

    /// Ends a phase: all threads have arrived.
    pub fn phase_ends(&self) {
        self.ended_ns.set(now_ns());
        if self.has_phases {
            self.note(|phase| &mut phase.together);
            self.phases.borrow_mut().push(self.phase.take());
        }
    }

    /// Returns the measurements after the last phase.
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
