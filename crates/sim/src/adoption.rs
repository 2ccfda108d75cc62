//! The VMs of a cell in virtual time: keepers, the cell's processes, its guard, and monitors between them.
//!
//! The decisions are the product's: [`keeper::state`], [`cell::cluster::adoption_table`],
//! [`cell::cluster::guard::trials`], [`cell::cluster::guard::lives`], [`cell::reboot`] and [`urpc::version`].
//! Sockets, processes, files and the order of an adopter's requests (`cell::vm` and `cell::monitor::adopt` in
//! the product) are modelled.
//!
//! A process can die, be stopped or be replaced between any two of its steps. A socket keeps its messages in
//! order. Messages to a process are lost with it; those that it has sent are still read. A keeper reports an
//! exit again to each adopter until that acknowledges it.

mod adopter;
mod cells;
mod keepers;
pub mod story;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use cell::cluster::adoption_table::Failures;
use cell::cluster::guard::lives::Lives;
use cell::cluster::guard::trials::Trials;
use config::vm::RestartSpec;

use self::adopter::Adopter;
use self::cells::{CellProcess, Program};
use self::keepers::Keeper;
use crate::chance::Chance;
use crate::queue::Queue;
use crate::trace::{Trace, Violation};
use crate::{MILLISECOND, Time};

/// A process of the cell, or a monitor. Numbers are never reused.
type Pid = u64;
/// A VM by its place in the list.
type VmIndex = usize;

/// Longest duration of a step of any process.
const STEP_NS: Time = 3 * MILLISECOND;
/// Longest time that a message is in transit.
const MESSAGE_NS: Time = MILLISECOND;

#[derive(Clone, Copy, Debug)]
enum Event {
    /// An adopter makes its next step, if it is still at that one.
    Step(Pid, VmIndex, u64),
    /// A keeper reads from its connection.
    KeeperReads(VmIndex),
    /// A keeper accepts the next connection.
    KeeperAccepts(VmIndex),
    /// A keeper starts a monitor, if no cell has connected since.
    KeeperStarts(VmIndex, u64),
    /// A keeper finds that a shard has ended.
    ShardEnded(VmIndex, i32, i32),
    /// An adopter reads from its connection.
    AdopterReads(Pid, VmIndex),
    /// An adopter has waited for its slot for too long.
    SlotIsLate(Pid, VmIndex, u64),
    /// The cell's process reads the next VM of the registry.
    List(Pid, VmIndex),
    /// A monitor requests that the cell adopt its VM.
    HandOver(Pid),
    /// The guard is notified that the cell's process has ended.
    GuardSees(Pid),
    /// The guard starts the cell's process.
    GuardStarts,
    /// The guard checks whether the process on trial has adopted the VMs.
    GuardTries(Pid, Time),
    /// The guard pings the process.
    GuardPings(Pid),
    /// The guard has waited for the answer for too long.
    PingIsLate(Pid),
    /// A process goes on that stood still.
    Continue(Pid),
}

/// A step of the adopter that is left out or made at the wrong time, to prove that the rules see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// An adopter acknowledges an exit before it has dealt with it.
    AcknowledgesFirst,
    /// An adopter leaves the former boot in the slot while it starts the next one.
    KeepsFormerBoot,
    /// A successor between two boots does not kill what its predecessor has started.
    KillsNothing,
    /// The cell does not count adoptions.
    CountsNothing,
    /// An adopter does not name its own program as that of the next monitor.
    NamesNoSuccessor,
    /// A keeper accepts a cell though a monitor is connected.
    AcceptsAtOnce,
}

/// Counts of a story.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// VMs that clients could reach again after another process had served them.
    pub adoptions: u64,
    /// Ends of the cell's processes.
    pub cell_deaths: u64,
    /// Monitors that keepers have started.
    pub monitors: u64,
    /// Boots of VMs.
    pub boots: u64,
    /// Exits of shards that an adopter has dealt with a second time, before their acknowledgement.
    pub repeated: u64,
    /// VMs that ended as their guests wanted.
    pub ended: u64,
    /// Upgrades that stayed.
    pub upgrades: u64,
    /// Upgrades that failed their trials.
    pub failed_upgrades: u64,
    /// VMs that were set aside.
    pub set_aside: u64,
}

impl Counts {
    /// Adds another story's counts.
    pub fn add(&mut self, other: &Self) {
        self.adoptions += other.adoptions;
        self.cell_deaths += other.cell_deaths;
        self.monitors += other.monitors;
        self.boots += other.boots;
        self.repeated += other.repeated;
        self.ended += other.ended;
        self.upgrades += other.upgrades;
        self.failed_upgrades += other.failed_upgrades;
        self.set_aside += other.set_aside;
    }
}

/// A shard, from its start until its keeper has reaped it.
#[derive(Clone, Copy, Debug)]
struct Shard {
    vm: VmIndex,
    runs: bool,
    /// Whether an adopter has left it in the slot.
    was_left: bool,
    /// Whether a process killed it, so that its exit proves nothing.
    was_killed: bool,
    /// Adopters that have dealt with its exit.
    dealt_with: u32,
    /// Whether its exit was acknowledged.
    is_reaped: bool,
}

/// A VM in the view of its owner and its directory.
#[derive(Debug)]
struct Vm {
    keeper: Keeper,
    restart: RestartSpec,
    /// Whether its slot takes several messages.
    has_many_files: bool,
    /// The file that counts adoptions.
    failures: Option<Failures>,
    /// Whether each process of the cell that adopts it ends.
    is_poison: bool,
    /// Processes of the cell that have ended in its adoption since it was last served, for reasons of their
    /// own or of the VM.
    ended_adopters: u32,
    /// Whether an adopter has decided that it ends.
    has_ended: bool,
    /// Whether a process has served it.
    was_served: bool,
}

#[derive(Debug)]
enum Kind {
    Cell(CellProcess),
    Monitor,
}

#[derive(Debug)]
struct Process {
    kind: Kind,
    program: Program,
    adopters: BTreeMap<VmIndex, Adopter>,
    stands_still: bool,
    /// Events held back while the process is stopped.
    held: Vec<Event>,
}

/// The guard of the cell.
#[derive(Debug)]
struct Guard {
    trials: Trials<Program>,
    lives: Lives,
    cell: Option<Pid>,
    /// The start of its latest process but those after a trial, whose lives count as their predecessors'.
    started: Time,
    /// The VMs that the former process served, if the cell's process is on trial.
    trial: Option<Vec<VmIndex>>,
    /// Whether the cell has been given up.
    is_over: bool,
    /// Program of the next process, as the results of the trials require.
    proven: Program,
}

/// The simulated host: a cell, its guard, keepers and VMs.
#[derive(Debug)]
pub struct World {
    now: Time,
    queue: Queue<Event>,
    chance: Chance,
    vms: Vec<Vm>,
    shards: BTreeMap<i32, Shard>,
    processes: BTreeMap<Pid, Process>,
    guard: Guard,
    pids: Pid,
    broken: Option<String>,
    flaw: Option<Flaw>,
    /// Counts of the story so far.
    pub counts: Counts,
    trace: Trace,
}

impl World {
    /// Begins with `vms`, which monitors have opened and now hand over to a cell whose first process starts.
    pub fn new(vms: usize, chance: Chance, flaw: Option<Flaw>) -> Self {
        let program = Program::first();
        let mut world = Self {
            now: 0,
            queue: Queue::default(),
            chance,
            vms: Vec::new(),
            shards: BTreeMap::new(),
            processes: BTreeMap::new(),
            guard: Guard {
                trials: Trials::new(program),
                lives: Lives::default(),
                cell: None,
                started: 0,
                trial: None,
                is_over: false,
                proven: program,
            },
            pids: 0,
            broken: None,
            flaw,
            counts: Counts::default(),
            trace: Trace::default(),
        };
        for index in 0..vms {
            let restart =
                world
                    .chance
                    .one_of(&[RestartSpec::No, RestartSpec::OnFailure, RestartSpec::Always]);
            world.vms.push(Vm {
                keeper: Keeper::of_new_vm(program),
                restart: restart.unwrap_or_default(),
                has_many_files: world.chance.once_in(4),
                failures: None,
                is_poison: false,
                ended_adopters: 0,
                has_ended: false,
                was_served: false,
            });
            // The monitor that has opened the VM leaves it.
            world.monitor_is_gone(index);
        }
        world.queue.put(0, Event::GuardStarts);
        world
    }

    /// Records the last steps, for an error.
    pub fn trace(&mut self) {
        self.trace.begin();
    }

    /// Virtual time, nanoseconds since the start.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Runs all events up to `until`.
    ///
    /// # Errors
    /// With the rule that does not hold, and the steps that led to it.
    pub fn run(&mut self, until: Time) -> Result<(), Violation> {
        while let Some((at, event)) = self.queue.take() {
            if at > until {
                self.queue.put(at, event);
                break;
            }
            self.now = at;
            self.happen(event);
            self.check();
            if let Some(what) = self.broken.take() {
                return Err(self.trace.before(what));
            }
        }
        self.now = until;
        Ok(())
    }

    fn happen(&mut self, event: Event) {
        let process = match event {
            Event::Step(pid, ..)
            | Event::AdopterReads(pid, _)
            | Event::SlotIsLate(pid, ..)
            | Event::List(pid, _)
            | Event::HandOver(pid) => Some(pid),
            _ => None,
        };
        if let Some(pid) = process {
            match self.processes.get_mut(&pid) {
                None => return,
                Some(process) if process.stands_still => return process.held.push(event),
                Some(_) => {}
            }
        }
        match event {
            Event::Step(pid, vm, number) => self.step(pid, vm, number),
            Event::KeeperReads(vm) => self.keeper_reads(vm),
            Event::KeeperAccepts(vm) => self.keeper_accepts(vm),
            Event::KeeperStarts(vm, number) => self.keeper_starts(vm, number),
            Event::ShardEnded(vm, pid, status) => self.shard_ended(vm, pid, status),
            Event::AdopterReads(pid, vm) => self.adopter_reads(pid, vm),
            Event::SlotIsLate(pid, vm, number) => self.slot_is_late(pid, vm, number),
            Event::List(pid, vm) => self.list(pid, vm),
            Event::HandOver(pid) => self.hand_over(pid),
            Event::GuardSees(pid) => self.guard_sees(pid),
            Event::GuardStarts => {
                self.guard.started = self.now;
                self.guard_starts(false);
            }
            Event::GuardTries(pid, since) => self.guard_tries(pid, since),
            Event::GuardPings(pid) => self.guard_pings(pid),
            Event::PingIsLate(pid) => self.ping_is_late(pid),
            Event::Continue(pid) => self.go_on(pid),
        }
    }

    /// Checks the rules that hold at each moment.
    fn check(&mut self) {
        for index in 0..self.vms.len() {
            let adopters = self
                .processes
                .iter()
                .filter_map(|(pid, process)| Some((pid, process.adopters.get(&index)?)))
                .filter(|(_, adopter)| adopter.has_vm())
                .map(|(pid, _)| *pid);
            let adopters: Vec<Pid> = adopters.collect();
            if adopters.len() > 1 {
                self.fails(format!("VM {index} is served by two processes, {adopters:?}"));
            }
            let running = |shard: &&Shard| shard.vm == index && shard.runs;
            if self.shards.values().filter(running).count() > 1 {
                self.fails(format!("VM {index} runs twice"));
            }
            let vm = &self.vms[index];
            if vm.keeper.is_over && !vm.has_ended {
                self.fails(format!(
                    "VM {index} is lost: its keeper ended, and its guest did not"
                ));
            }
        }
    }

    fn fails(&mut self, what: String) {
        self.broken.get_or_insert(what);
    }

    fn say(&mut self, what: impl FnOnce() -> String) {
        self.trace.say(self.now, what);
    }

    /// Adds an event, at most `most` from now.
    fn soon(&mut self, most: Time, event: Event) {
        let at = self.now + 1 + self.chance.below(most);
        self.queue.put(at, event);
    }

    fn later(&mut self, after: std::time::Duration, event: Event) {
        self.queue.put(self.now + crate::nanos(after), event);
    }
}
