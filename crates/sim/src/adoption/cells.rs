//! The cell's process, its guard, and the faults of both.

use std::collections::BTreeMap;
use std::time::Duration;

use cell::cluster::adoption_table::{AdoptionTable, Failures, Verdict};
use cell::cluster::guard::lives::Lives;
use urpc::version::Versions;

use super::adopter::{Adopter, cid};
use super::keepers::Connection;
use super::{Event, Kind, MESSAGE_NS, Pid, Process, STEP_NS, VmIndex, World};
use crate::{MILLISECOND, Time};

/// Longest time until the guard notices the end of a process.
const NOTICE_NS: Time = 5 * MILLISECOND;
/// Time between two checks of a process on trial by the guard.
const TRIAL_INTERVAL: Duration = Duration::from_millis(50);
/// Times of `cell::cluster::guard`, of `cell::cluster::serve` and of `keeper::client`.
const TRIAL_LIMIT: Duration = Duration::from_secs(30);
const FIRST_LIMIT: Duration = Duration::from_secs(25);
const PING_INTERVAL: Duration = Duration::from_secs(2);
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
const SLOT_LIMIT: Duration = Duration::from_secs(20);
const HAND_OVER_INTERVAL: Duration = Duration::from_millis(500);

/// A program of the cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// Newest version of the record that it speaks.
    pub version: u16,
    /// Whether each of its processes ends in its first adoption.
    pub crashes: bool,
    /// Whether its processes do nothing.
    pub hangs: bool,
}

impl Program {
    /// The program of the first process.
    pub(super) const fn first() -> Self {
        Self {
            version: 1,
            crashes: false,
            hangs: false,
        }
    }

    /// The versions of the record that it reads and writes.
    pub(super) fn versions(self) -> Versions {
        Versions::up_to(self.version)
    }
}

/// One life of the cell, from its start to its end.
#[derive(Debug)]
pub(super) struct CellProcess {
    pub(super) table: AdoptionTable<()>,
}

impl World {
    /// Starts a process of the cell.
    pub(super) fn guard_starts(&mut self, is_on_trial: bool) {
        if self.guard.is_over || self.guard.cell.is_some() {
            return;
        }
        let program = *self.guard.trials.program();
        if !is_on_trial && program != self.guard.proven {
            self.fails(format!(
                "the cell goes on with {program:?}, which has failed its trial"
            ));
        }
        self.pids += 1;
        let pid = self.pids;
        let kind = Kind::Cell(CellProcess {
            table: AdoptionTable::new(is_on_trial),
        });
        let process = Process {
            kind,
            program,
            adopters: BTreeMap::new(),
            stands_still: program.hangs,
            held: Vec::new(),
        };
        self.processes.insert(pid, process);
        self.guard.cell = Some(pid);
        self.say(|| format!("the guard starts process {pid} of {program:?}"));
        self.soon(STEP_NS, Event::List(pid, 0));
        self.later(PING_INTERVAL, Event::GuardPings(pid));
    }

    /// The process adopts the next VM that an earlier one left.
    pub(super) fn list(&mut self, pid: Pid, vm: VmIndex) {
        if vm >= self.vms.len() {
            if let Some(table) = self.table(pid) {
                table.all_are_listed();
            }
            return;
        }
        if !self.vms[vm].keeper.is_over {
            if let Some(table) = self.table(pid) {
                table.await_first(cid(vm));
            }
            self.begin(pid, vm);
            if let Some(table) = self.table(pid) {
                table.tried_first(cid(vm));
            }
        }
        self.soon(STEP_NS, Event::List(pid, vm + 1));
    }

    fn table(&mut self, pid: Pid) -> Option<&mut AdoptionTable<()>> {
        match &mut self.processes.get_mut(&pid)?.kind {
            Kind::Cell(cell) => Some(&mut cell.table),
            Kind::Monitor => None,
        }
    }

    /// Has a process of the cell adopt a VM. Returns whether it is about to.
    fn begin(&mut self, pid: Pid, vm: VmIndex) -> bool {
        let is_set_aside = self.vms[vm].failures.is_some_and(Failures::is_set_aside);
        let is_over = self.vms[vm].keeper.is_over;
        let Some(table) = self.table(pid) else {
            return false;
        };
        if !table.begin(cid(vm)) {
            return true;
        }
        if is_set_aside || is_over {
            table.is_over(cid(vm));
            return false;
        }
        self.vms[vm].keeper.backlog.push_back(Connection::of(pid));
        if let Some(process) = self.processes.get_mut(&pid) {
            process.adopters.insert(vm, Adopter::default());
        }
        self.soon(MESSAGE_NS, Event::KeeperAccepts(vm));
        self.later(SLOT_LIMIT, Event::SlotIsLate(pid, vm, 0));
        true
    }

    /// A monitor requests that the cell adopt its VM, and ends if the cell does.
    pub(super) fn hand_over(&mut self, pid: Pid) {
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        let Some((&vm, adopter)) = process.adopters.first_key_value() else {
            return;
        };
        let is_left = adopter.is_left();
        let cell = self.guard.cell.filter(|cell| {
            let process = self.processes.get(cell);
            process.is_some_and(|process| !process.stands_still)
        });
        if is_left && cell.is_some_and(|cell| self.begin(cell, vm)) {
            return self.end_process(pid);
        }
        self.later(HAND_OVER_INTERVAL, Event::HandOver(pid));
    }

    pub(super) fn cell_has_ended(&mut self, pid: Pid) {
        self.soon(NOTICE_NS, Event::GuardSees(pid));
    }

    /// The guard finds that the cell's process has ended.
    pub(super) fn guard_sees(&mut self, pid: Pid) {
        if self.guard.cell != Some(pid) {
            return;
        }
        self.guard.cell = None;
        if self.guard.trial.is_some() {
            return self.end_trial(false);
        }
        let lived = Duration::from_nanos(self.now - self.guard.started);
        match self.guard.lives.died(lived) {
            Some(after) => self.later(after, Event::GuardStarts),
            None => {
                self.say(|| "the guard gives the cell up".to_owned());
                self.guard.is_over = true;
            }
        }
    }

    pub(super) fn guard_pings(&mut self, pid: Pid) {
        if self.guard.cell != Some(pid) {
            return;
        }
        let stands_still = self
            .processes
            .get(&pid)
            .is_some_and(|process| process.stands_still);
        // It waits for a trial, and pings no process meanwhile.
        if stands_still && self.guard.trial.is_none() {
            return self.later(ANSWER_LIMIT, Event::PingIsLate(pid));
        }
        self.later(PING_INTERVAL, Event::GuardPings(pid));
    }

    pub(super) fn ping_is_late(&mut self, pid: Pid) {
        let process = self.processes.get(&pid);
        if self.guard.cell == Some(pid) && process.is_some_and(|process| process.stands_still) {
            return self.end_process(pid);
        }
        self.guard_pings(pid);
    }

    /// The guard checks whether the process on trial has adopted the VMs.
    pub(super) fn guard_tries(&mut self, pid: Pid, since: Time) {
        if self.guard.cell != Some(pid) || self.guard.trial.is_none() {
            return;
        }
        let elapsed = Duration::from_nanos(self.now - since);
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        let verdict = match &mut process.kind {
            Kind::Cell(cell) if !process.stands_still => match cell.table.verdict() {
                Verdict::Adopted => Some(true),
                Verdict::Refused(_) => Some(false),
                Verdict::Late(_) => (elapsed >= FIRST_LIMIT).then_some(false),
            },
            _ => (elapsed >= TRIAL_LIMIT).then_some(false),
        };
        match verdict {
            Some(has_adopted) => self.end_trial(has_adopted),
            None => self.later(TRIAL_INTERVAL, Event::GuardTries(pid, since)),
        }
    }

    fn end_trial(&mut self, has_adopted: bool) {
        let Some(former) = self.guard.trial.take() else {
            return;
        };
        self.guard.trials.end(has_adopted);
        self.say(|| format!("the trial ends: {has_adopted}"));
        let pid = self.guard.cell;
        if has_adopted {
            self.counts.upgrades += 1;
            self.guard.proven = *self.guard.trials.program();
            for vm in former {
                let is_served = pid
                    .and_then(|pid| self.processes.get(&pid))
                    .and_then(|process| process.adopters.get(&vm))
                    .is_some_and(|adopter| adopter.is_served);
                let gone = &self.vms[vm];
                let is_set_aside = gone.failures.is_some_and(Failures::is_set_aside);
                if !is_served && !is_set_aside && !gone.has_ended {
                    self.fails(format!("a trial ends well, though VM {vm} is not adopted"));
                }
            }
            return;
        }
        self.counts.failed_upgrades += 1;
        self.guard.cell = None;
        if let Some(pid) = pid {
            self.end_process(pid);
        }
        self.guard_starts(false);
    }

    pub(super) fn go_on(&mut self, pid: Pid) {
        let now = self.now;
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        process.stands_still = false;
        for event in std::mem::take(&mut process.held) {
            self.queue.put(now, event);
        }
    }

    /// Kills the cell's process.
    pub fn kill_cell(&mut self) {
        if let Some(pid) = self.guard.cell {
            self.end_process(pid);
        }
    }

    /// Kills a VM's monitor, if it has one.
    pub fn kill_monitor(&mut self, vm: usize) {
        let is_monitor =
            |process: &Process| matches!(process.kind, Kind::Monitor) && process.adopters.contains_key(&vm);
        let found = self.processes.iter().find(|(_, process)| is_monitor(process));
        if let Some(pid) = found.map(|(pid, _)| *pid) {
            self.end_process(pid);
        }
    }

    /// Stops the cell's process for a while.
    pub fn stop_cell(&mut self, time: Time) {
        let Some(pid) = self.guard.cell else { return };
        if let Some(process) = self
            .processes
            .get_mut(&pid)
            .filter(|process| !process.stands_still)
        {
            process.stands_still = true;
            self.queue.put(self.now + time, Event::Continue(pid));
        }
    }

    /// Puts another program in the place of the cell's, on trial.
    pub fn upgrade(&mut self, program: Program) {
        let Some(pid) = self.guard.cell.filter(|_| self.guard.trial.is_none()) else {
            return;
        };
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        let served = process.adopters.iter().filter(|(_, adopter)| adopter.is_served);
        let served = served.map(|(vm, _)| *vm).collect();
        self.guard.cell = None;
        self.end_process(pid);
        self.guard.trials.begin(program);
        self.guard_starts(true);
        self.guard.trial = Some(served);
        if let Some(pid) = self.guard.cell {
            self.queue.put(self.now, Event::GuardTries(pid, self.now));
        }
    }

    /// Begins the cell again, if its guard has given it up.
    pub fn up_again(&mut self) {
        if self.guard.is_over {
            self.guard.is_over = false;
            self.guard.lives = Lives::default();
            self.queue.put(self.now, Event::GuardStarts);
        }
    }

    /// The command that adopts a VM that was set aside.
    pub fn adopt_again(&mut self, vm: usize) {
        if let Some(pid) = self.guard.cell
            && self.vms[vm].failures.is_some_and(Failures::is_set_aside)
        {
            self.vms[vm].failures = None;
            self.vms[vm].ended_adopters = 0;
            self.begin(pid, vm);
        }
    }
}
