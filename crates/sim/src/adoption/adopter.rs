//! A process that serves a VM: its requests to the keeper, in the order of `cell::monitor::adopt` and
//! `cell::vm`.

use std::collections::BTreeMap;
use std::time::Duration;

use cell::cluster::adoption_table::{FAILURES_MAX, Failures, Unreadable};
use cell::reboot::{Next, Reboots, starts_again};
use shard_api::launch::Ending;

use super::keepers::{Record, Reply, Request};
use super::{Event, Flaw, Kind, MESSAGE_NS, Pid, STEP_NS, VmIndex, World};
use crate::{MILLISECOND, Time};

/// Longest time from the start of a shard until its vCPUs run.
const BOOT_NS: Time = 30 * MILLISECOND;
/// Time between two requests of a monitor to its cell.
const HAND_OVER_INTERVAL: Duration = Duration::from_millis(500);
/// The exit status of a shard whose guest has rebooted, as `waitpid` returns it.
pub(super) const REBOOT: i32 = 32 << 8;

/// The next step of an adopter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Step {
    /// Waits for the slot.
    #[default]
    AwaitSlot,
    /// Reads the record.
    Read,
    /// Counts the adoption, in the cell's process.
    Count,
    /// Takes the VM over.
    Take,
    /// Names its program as that of the next monitor.
    Name,
    /// Leaves the boot that runs.
    Leave,
    /// Kills what the predecessor may have started.
    KillAll,
    /// Acknowledges all exits.
    Reap,
    /// Lets clients reach the VM.
    Serve,
    /// Leaves the VM without a boot.
    LeaveBetween,
    /// Starts a shard.
    Spawn,
    /// Waits until its vCPUs run.
    AwaitRunning,
    /// Leaves the new boot.
    LeaveRunning,
    /// Waits for the shard's exit.
    Follow,
    /// Sends the rest of a slot.
    PutLast,
    /// Empties the slot, since the VM ends.
    Clear,
    /// Closes the connection.
    Close,
}

#[derive(Debug, Default)]
pub(super) struct Adopter {
    step: Step,
    /// Count of the steps, which makes an event of an earlier step invalid.
    number: u64,
    record: Option<Record>,
    boot: Option<i32>,
    /// The boot before the next one.
    former: Option<i32>,
    boot_began: Time,
    /// The rest of a slot that takes several messages, and the step after it.
    rest: Option<(Record, Step)>,
    /// Exits that the keeper has reported and this process has not acknowledged.
    exits: BTreeMap<i32, i32>,
    reboots: Reboots,
    /// Whether the keeper has all that another process needs to go on.
    is_left: bool,
    /// Whether its adoption counts as failed if the process ends.
    pub(super) is_counted: bool,
    pub(super) is_served: bool,
}

impl Adopter {
    /// Whether it has copies of the VM's descriptors.
    pub(super) fn has_vm(&self) -> bool {
        !matches!(self.step, Step::AwaitSlot | Step::Close)
    }

    /// Whether its process can end without a loss except that of its time.
    pub(super) fn is_left(&self) -> bool {
        self.is_served && self.is_left
    }
}

impl World {
    fn adopter(&mut self, pid: Pid, vm: VmIndex) -> Option<&mut Adopter> {
        self.processes.get_mut(&pid)?.adopters.get_mut(&vm)
    }

    fn next(&mut self, pid: Pid, vm: VmIndex, step: Step, within: Time) {
        if let Some(adopter) = self.adopter(pid, vm) {
            adopter.step = step;
            adopter.number += 1;
            let number = adopter.number;
            self.soon(within, Event::Step(pid, vm, number));
        }
    }

    /// Sends a request; `then` is the step when its reply has come.
    fn request(&mut self, pid: Pid, vm: VmIndex, request: Request, then: Step) {
        let (request, then) = match request {
            Request::Put(Some(record)) if self.vms[vm].has_many_files => {
                if let Some(adopter) = self.adopter(pid, vm) {
                    adopter.rest = Some((record, then));
                }
                (Request::PutFirst, Step::PutLast)
            }
            whole => (whole, then),
        };
        let connection = &mut self.vms[vm].keeper.connection;
        let Some(connection) = connection.as_mut().filter(|connection| connection.peer == pid) else {
            // The keeper has ended.
            return self.adopter_is_over(pid, vm);
        };
        connection.to_keeper.push_back(request);
        self.soon(MESSAGE_NS, Event::KeeperReads(vm));
        if let Some(adopter) = self.adopter(pid, vm) {
            adopter.step = then;
            adopter.number += 1;
        }
    }

    pub(super) fn adopter_reads(&mut self, pid: Pid, vm: VmIndex) {
        let connection = &mut self.vms[vm].keeper.connection;
        let connection = connection.as_mut().filter(|connection| connection.peer == pid);
        let Some(reply) = connection.and_then(|connection| connection.to_peer.pop_front()) else {
            return;
        };
        let Some(adopter) = self.adopter(pid, vm) else {
            return;
        };
        let number = adopter.number;
        match reply {
            Reply::Exited { pid: shard, status } => {
                adopter.exits.insert(shard, status);
                if adopter.step != Step::Follow || adopter.boot != Some(shard) {
                    return;
                }
            }
            Reply::Slot(record) => {
                adopter.record = record;
                adopter.step = Step::Read;
            }
            Reply::Spawned(shard) => adopter.boot = Some(shard),
            Reply::Left(0) => adopter.step = Step::Reap,
            Reply::Left(_) => adopter.step = Step::KillAll,
            Reply::Done => {}
        }
        self.soon(STEP_NS, Event::Step(pid, vm, number));
    }

    pub(super) fn slot_is_late(&mut self, pid: Pid, vm: VmIndex, number: u64) {
        let is_late = |adopter: &mut Adopter| adopter.step == Step::AwaitSlot && adopter.number == number;
        if self.adopter(pid, vm).is_some_and(is_late) {
            self.adopter_is_over(pid, vm);
        }
    }

    pub(super) fn step(&mut self, pid: Pid, vm: VmIndex, number: u64) {
        let Some(adopter) = self.adopter(pid, vm).filter(|adopter| adopter.number == number) else {
            return;
        };
        let (step, boot, record) = (adopter.step, adopter.boot, adopter.record);
        self.say(|| format!("process {pid}, VM {vm}: {step:?}"));
        let Some(program) = self.processes.get(&pid).map(|process| process.program) else {
            return;
        };
        let leave = |boot| {
            let versions = program.versions();
            Request::Put(Some(Record { boot, versions }))
        };
        match step {
            Step::AwaitSlot => {}
            Step::Read => self.read(pid, vm),
            Step::Count => self.count(pid, vm),
            Step::Take => {
                let is_cell = self.is_cell(pid);
                if is_cell && (self.vms[vm].is_poison || program.crashes) {
                    return self.end_process(pid);
                }
                self.next(pid, vm, Step::Name, STEP_NS);
            }
            Step::Name => {
                let then = record.and_then(|record| record.boot);
                let then = then.map_or(Step::KillAll, |_| Step::Leave);
                if self.flaw == Some(Flaw::NamesNoSuccessor) {
                    return self.next(pid, vm, then, STEP_NS);
                }
                self.request(pid, vm, Request::Successor(program), then);
            }
            Step::Leave => {
                let boot = record.and_then(|record| record.boot);
                let now = self.now;
                if let Some(adopter) = self.adopter(pid, vm) {
                    (adopter.boot, adopter.boot_began, adopter.is_left) = (boot, now, true);
                }
                self.request(pid, vm, leave(boot), Step::Serve);
            }
            Step::KillAll if self.flaw == Some(Flaw::KillsNothing) => {
                self.next(pid, vm, Step::Reap, STEP_NS);
            }
            Step::KillAll => self.request(pid, vm, Request::KillAll, Step::KillAll),
            Step::Reap => self.acknowledge(pid, vm),
            Step::Serve => self.serve(pid, vm),
            Step::LeaveBetween => {
                let Some(adopter) = self.adopter(pid, vm) else {
                    return;
                };
                let former = adopter.former;
                let kept = former.filter(|_| self.flaw == Some(Flaw::KeepsFormerBoot));
                self.request(pid, vm, leave(kept), Step::Reap);
            }
            Step::Spawn => {
                let now = self.now;
                if let Some(adopter) = self.adopter(pid, vm) {
                    adopter.boot_began = now;
                }
                self.request(pid, vm, Request::Spawn, Step::AwaitRunning);
            }
            Step::AwaitRunning => self.next(pid, vm, Step::LeaveRunning, BOOT_NS),
            Step::LeaveRunning => self.request(pid, vm, leave(boot), Step::Follow),
            Step::Follow => self.follow(pid, vm),
            Step::PutLast => {
                let rest = self.adopter(pid, vm).and_then(|adopter| adopter.rest.take());
                if let Some((record, then)) = rest {
                    self.request(pid, vm, Request::PutLast(record), then);
                }
            }
            Step::Clear => self.request(pid, vm, Request::Put(None), Step::Close),
            Step::Close => self.adopter_is_over(pid, vm),
        }
    }

    fn is_cell(&self, pid: Pid) -> bool {
        let process = self.processes.get(&pid);
        process.is_some_and(|process| matches!(process.kind, Kind::Cell(_)))
    }

    fn read(&mut self, pid: Pid, vm: VmIndex) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        let record = process.adopters.get(&vm).and_then(|adopter| adopter.record);
        let agreed = record.map(|record| {
            let ours = process.program.versions();
            ours.agree(
                record.versions,
                "the record of a running VM",
                "the former program",
            )
        });
        let why = match (agreed, &process.kind) {
            (Some(Ok(_)), Kind::Cell(_)) => return self.next(pid, vm, Step::Count, STEP_NS),
            (Some(Ok(_)), Kind::Monitor) => return self.next(pid, vm, Step::Take, STEP_NS),
            (Some(Err(unlike)), _) => unlike.to_string(),
            (None, _) => "nothing was left".to_owned(),
        };
        self.say(|| format!("process {pid} can't read VM {vm}: {why}"));
        if let Some(Kind::Cell(cell)) = self.processes.get_mut(&pid).map(|process| &mut process.kind)
            && cell.table.is_unreadable(why) == Unreadable::SetAside
        {
            self.vms[vm].failures = Some(Failures::SET_ASIDE);
            self.counts.set_aside += 1;
        }
        self.adopter_is_over(pid, vm);
    }

    fn count(&mut self, pid: Pid, vm: VmIndex) {
        let before = self.vms[vm].failures.unwrap_or_default();
        let Some(Kind::Cell(cell)) = self.processes.get_mut(&pid).map(|process| &mut process.kind) else {
            return;
        };
        if !cell.table.begin_attempt(cid(vm), before) {
            return self.next(pid, vm, Step::Count, STEP_NS);
        }
        if self.flaw != Some(Flaw::CountsNothing) {
            self.vms[vm].failures = Some(before.with_begun());
            self.counts.set_aside += u64::from(before.with_begun().is_set_aside());
        }
        if let Some(adopter) = self.adopter(pid, vm) {
            adopter.is_counted = true;
        }
        self.next(pid, vm, Step::Take, STEP_NS);
    }

    fn acknowledge(&mut self, pid: Pid, vm: VmIndex) {
        let Some(adopter) = self.adopter(pid, vm) else {
            return;
        };
        if let Some((shard, _)) = adopter.exits.pop_first() {
            return self.request(pid, vm, Request::Reap(shard), Step::Reap);
        }
        let then = if adopter.is_served {
            Step::Spawn
        } else {
            Step::Serve
        };
        self.next(pid, vm, then, STEP_NS);
    }

    fn serve(&mut self, pid: Pid, vm: VmIndex) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        let Some(adopter) = process.adopters.get_mut(&vm) else {
            return;
        };
        (adopter.is_served, adopter.is_counted) = (true, false);
        let then = adopter.boot.map_or(Step::LeaveBetween, |_| Step::Follow);
        match &mut process.kind {
            Kind::Cell(cell) => {
                cell.table.is_served(cid(vm), ());
                self.vms[vm].failures = None;
                self.vms[vm].ended_adopters = 0;
            }
            Kind::Monitor => self.later(HAND_OVER_INTERVAL, Event::HandOver(pid)),
        }
        self.counts.adoptions += u64::from(self.vms[vm].was_served);
        self.vms[vm].was_served = true;
        self.next(pid, vm, then, STEP_NS);
    }

    /// Deals with the exit of the boot, if it has come.
    fn follow(&mut self, pid: Pid, vm: VmIndex) {
        let now = self.now;
        let Some(adopter) = self.adopter(pid, vm) else {
            return;
        };
        adopter.is_left = true;
        let Some(boot) = adopter.boot else { return };
        let Some(&status) = adopter.exits.get(&boot) else {
            return;
        };
        if self.flaw == Some(Flaw::AcknowledgesFirst)
            && self.shards.get(&boot).is_some_and(|shard| !shard.is_reaped)
        {
            return self.request(pid, vm, Request::Reap(boot), Step::Follow);
        }
        let ending = match status {
            0 => Ending::PowerOff,
            REBOOT => Ending::Reboot,
            _ => Ending::ShardFailed {
                detail: String::new(),
            },
        };
        self.deal_with(vm, boot);
        let is_again = starts_again(self.vms[vm].restart, &ending);
        let Some(adopter) = self.adopter(pid, vm) else {
            return;
        };
        (adopter.former, adopter.boot) = (Some(boot), None);
        let ran = Duration::from_nanos(now - adopter.boot_began);
        match adopter.reboots.note(ran) {
            Next::Boot(pause) if is_again => {
                let within = STEP_NS + crate::nanos(pause);
                self.next(pid, vm, Step::LeaveBetween, within);
            }
            Next::Boot(_) | Next::End => {
                adopter.is_left = false;
                self.next(pid, vm, Step::Clear, STEP_NS);
            }
        }
    }

    fn deal_with(&mut self, vm: VmIndex, boot: i32) {
        let Some(shard) = self.shards.get_mut(&boot) else {
            return;
        };
        shard.dealt_with += 1;
        let (is_reaped, is_again) = (shard.is_reaped, shard.dealt_with > 1);
        self.counts.repeated += u64::from(is_again);
        if is_reaped {
            self.fails(format!(
                "the exit of shard {boot} of VM {vm} is dealt with after its acknowledgement"
            ));
        }
    }

    /// An adopter releases its VM, which has ended or goes on without it.
    pub(super) fn adopter_is_over(&mut self, pid: Pid, vm: VmIndex) {
        self.disconnect(pid, vm);
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        process.adopters.remove(&vm);
        match &mut process.kind {
            Kind::Cell(cell) => cell.table.is_over(cid(vm)),
            Kind::Monitor => _ = self.processes.remove(&pid),
        }
    }

    /// Closes a process's end of its connection to a VM's keeper.
    fn disconnect(&mut self, pid: Pid, vm: VmIndex) {
        let keeper = &mut self.vms[vm].keeper;
        for connection in keeper.connection.iter_mut().chain(&mut keeper.backlog) {
            if connection.peer == pid {
                connection.is_closed = true;
            }
        }
        self.soon(MESSAGE_NS, Event::KeeperReads(vm));
    }

    /// A process ends in the midst of its work.
    pub(super) fn end_process(&mut self, pid: Pid) {
        let Some(process) = self.processes.remove(&pid) else {
            return;
        };
        self.say(|| format!("process {pid} ends"));
        for (&vm, adopter) in &process.adopters {
            self.disconnect(pid, vm);
            if adopter.is_counted {
                self.vms[vm].ended_adopters += 1;
                if self.vms[vm].ended_adopters > FAILURES_MAX {
                    let ended = self.vms[vm].ended_adopters;
                    self.fails(format!(
                        "VM {vm} is not set aside, though its adoption has ended {ended} processes"
                    ));
                }
            }
        }
        if let Kind::Cell(_) = process.kind {
            self.counts.cell_deaths += 1;
            self.cell_has_ended(pid);
        }
    }

    /// The keeper of a connection that waits has ended.
    pub(super) fn connection_ends(&mut self, pid: Pid, vm: VmIndex) {
        if self
            .adopter(pid, vm)
            .is_some_and(|adopter| adopter.step == Step::AwaitSlot)
        {
            self.adopter_is_over(pid, vm);
        }
    }
}

/// The address of a VM on the socket device.
pub(super) fn cid(vm: VmIndex) -> u32 {
    u32::try_from(vm).map_or(u32::MAX, |vm| vm + 3)
}
