//! Keepers, and the sockets between them and adopters.

use std::collections::VecDeque;
use std::time::Duration;

use keeper::state::{self, Effect, State};
use urpc::version::Versions;

use super::adopter::Adopter;
use super::cells::Program;
use super::{Event, Flaw, Kind, MESSAGE_NS, Pid, Process, Shard, VmIndex, World};
use crate::MILLISECOND;

/// The status of a process that `SIGKILL` has ended, as `waitpid` returns it.
const KILLED: i32 = 9;
/// A killed process is gone within this time, at most.
const KILL_NS: u64 = 5 * MILLISECOND;

/// The record of a VM that an adopter leaves in the slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// The shard that runs; none between two boots.
    pub(super) boot: Option<i32>,
    /// The versions in which it can be read.
    pub(super) versions: Versions,
}

/// A message from an adopter to its keeper.
#[derive(Clone, Copy, Debug)]
pub(super) enum Request {
    Take,
    /// A whole slot.
    Put(Option<Record>),
    /// The first descriptors of a slot that takes several messages.
    PutFirst,
    /// The last ones.
    PutLast(Record),
    Successor(Program),
    Spawn,
    KillAll,
    Reap(i32),
}

/// A message from a keeper to its adopter.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reply {
    Exited { pid: i32, status: i32 },
    Slot(Option<Record>),
    Done,
    Spawned(i32),
    Left(usize),
}

/// A socket between a keeper and an adopter.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: Pid,
    pub(super) to_keeper: VecDeque<Request>,
    pub(super) to_peer: VecDeque<Reply>,
    /// Whether the adopter has closed its end, or is gone.
    pub(super) is_closed: bool,
}

impl Connection {
    /// A connection whose adopter has requested the slot at once.
    pub(super) fn of(peer: Pid) -> Self {
        Self {
            peer,
            to_keeper: VecDeque::from([Request::Take]),
            to_peer: VecDeque::new(),
            is_closed: false,
        }
    }
}

/// A keeper: the product's state, and the data that its program has around that.
#[derive(Debug)]
pub(super) struct Keeper {
    state: State,
    pub(super) slot: Option<Record>,
    /// The program of the next monitor.
    successor: Program,
    pub(super) connection: Option<Connection>,
    /// Connections that wait to be accepted.
    pub(super) backlog: VecDeque<Connection>,
    /// The number of the start that is due.
    start_due: Option<u64>,
    starts: u64,
    monitor: Option<Pid>,
    pub(super) is_over: bool,
}

impl Keeper {
    /// The keeper of a VM whose files are open, and that has not run yet.
    pub(super) fn of_new_vm(program: Program) -> Self {
        let mut state = State::default();
        let put = state::Event::Put {
            begin: true,
            end: true,
            files: 1,
        };
        for event in [state::Event::Successor, state::Event::Listening, put] {
            state.handle(event);
        }
        Self {
            state,
            slot: Some(Record {
                boot: None,
                versions: program.versions(),
            }),
            successor: program,
            connection: None,
            backlog: VecDeque::new(),
            start_due: None,
            starts: 0,
            monitor: None,
            is_over: false,
        }
    }
}

impl World {
    /// Passes an event to a keeper's state, and carries its decisions out.
    fn dispatch(&mut self, vm: VmIndex, event: state::Event) {
        for effect in self.vms[vm].keeper.state.handle(event) {
            self.say(|| format!("keeper {vm}: {event:?}: {effect:?}"));
            match effect {
                Effect::Report { pid, status } => self.reply(vm, Reply::Exited { pid, status }),
                Effect::Reap { pid } => self.reap(vm, pid),
                Effect::Refuse(_) => self.reply(vm, Reply::Done),
                Effect::StartSuccessor { after } => {
                    self.vms[vm].keeper.connection = None;
                    self.end_former(vm);
                    let keeper = &mut self.vms[vm].keeper;
                    keeper.starts += 1;
                    keeper.start_due = Some(keeper.starts);
                    let number = keeper.starts;
                    self.later(after, Event::KeeperStarts(vm, number));
                    self.soon(MESSAGE_NS, Event::KeeperAccepts(vm));
                }
                Effect::Kill { pid } => self.kill_shard(pid),
                Effect::Exit => self.vms[vm].keeper.is_over = true,
            }
        }
        if self.vms[vm].keeper.is_over {
            // Waiting connections end with it.
            let waiting = std::mem::take(&mut self.vms[vm].keeper.backlog);
            for connection in waiting {
                self.connection_ends(connection.peer, vm);
            }
        }
    }

    fn end_former(&mut self, vm: VmIndex) {
        if let Some(former) = self.vms[vm].keeper.monitor.take() {
            self.end_process(former);
        }
    }

    /// Acknowledges an exit, or forgets it at the VM's end.
    fn reap(&mut self, vm: VmIndex, pid: i32) {
        let Some(shard) = self.shards.get_mut(&pid).filter(|shard| !shard.is_reaped) else {
            return self.fails(format!("shard {pid} of VM {vm} is reaped twice"));
        };
        shard.is_reaped = true;
        let Shard {
            was_left,
            was_killed,
            dealt_with,
            runs,
            ..
        } = *shard;
        if runs {
            self.fails(format!("shard {pid} of VM {vm} is reaped while it runs"));
        }
        // A shard that no adopter has left may not have run: the VM boots again.
        if was_left && !was_killed && dealt_with == 0 {
            self.fails(format!("the exit of shard {pid} of VM {vm} is lost"));
        }
    }

    fn reply(&mut self, vm: VmIndex, reply: Reply) {
        let Some(connection) = &mut self.vms[vm].keeper.connection else {
            return;
        };
        connection.to_peer.push_back(reply);
        let peer = connection.peer;
        self.soon(MESSAGE_NS, Event::AdopterReads(peer, vm));
    }

    /// The monitor of a keeper has closed its connection, or is gone.
    pub(super) fn monitor_is_gone(&mut self, vm: VmIndex) {
        self.vms[vm].keeper.connection = None;
        let now = Duration::from_nanos(self.now);
        self.dispatch(vm, state::Event::MonitorGone { now });
    }

    pub(super) fn keeper_reads(&mut self, vm: VmIndex) {
        let Some(connection) = &mut self.vms[vm].keeper.connection else {
            return;
        };
        let Some(request) = connection.to_keeper.pop_front() else {
            if connection.is_closed {
                self.monitor_is_gone(vm);
            }
            return;
        };
        if !connection.to_keeper.is_empty() || connection.is_closed {
            self.soon(MESSAGE_NS, Event::KeeperReads(vm));
        }
        self.carry_out(vm, request);
    }

    fn carry_out(&mut self, vm: VmIndex, request: Request) {
        match request {
            Request::Take => {
                let keeper = &self.vms[vm].keeper;
                let slot = keeper.slot.filter(|_| keeper.state.has_slot());
                self.reply(vm, Reply::Slot(slot));
                self.dispatch(vm, state::Event::Taken);
            }
            Request::PutFirst => {
                let put = state::Event::Put {
                    begin: true,
                    end: false,
                    files: 1,
                };
                self.dispatch(vm, put);
                self.reply(vm, Reply::Done);
            }
            Request::Put(record) => self.put(vm, record, true),
            Request::PutLast(record) => self.put(vm, Some(record), false),
            Request::Successor(program) => {
                self.vms[vm].keeper.successor = program;
                self.dispatch(vm, state::Event::Successor);
                self.reply(vm, Reply::Done);
            }
            Request::Spawn => {
                let pid = self.shards.last_key_value().map_or(1, |(last, _)| last + 1);
                self.counts.boots += 1;
                let shard = Shard {
                    vm,
                    runs: true,
                    was_left: false,
                    was_killed: false,
                    dealt_with: 0,
                    is_reaped: false,
                };
                self.shards.insert(pid, shard);
                self.dispatch(vm, state::Event::Started { pid });
                self.reply(vm, Reply::Spawned(pid));
            }
            Request::KillAll => {
                self.dispatch(vm, state::Event::KillAll);
                let running = self.vms[vm].keeper.state.running().count();
                self.reply(vm, Reply::Left(running));
            }
            Request::Reap(pid) => {
                self.dispatch(vm, state::Event::Reap { pid });
                self.reply(vm, Reply::Done);
            }
        }
    }

    /// Replaces the slot; `begin`: by this message alone.
    fn put(&mut self, vm: VmIndex, record: Option<Record>, begin: bool) {
        self.vms[vm].keeper.slot = record;
        // Only an adopter that has dealt with the VM's last exit empties the slot.
        self.vms[vm].has_ended |= record.is_none();
        if let Some(boot) = record.and_then(|record| record.boot)
            && let Some(shard) = self.shards.get_mut(&boot)
        {
            shard.was_left = true;
        }
        let put = state::Event::Put {
            begin,
            end: true,
            files: record.iter().count(),
        };
        self.dispatch(vm, put);
        self.reply(vm, Reply::Done);
    }

    /// Takes the next connection while no monitor is connected. That of a process that has ended comes to its
    /// end at once.
    pub(super) fn keeper_accepts(&mut self, vm: VmIndex) {
        let keeper = &mut self.vms[vm].keeper;
        let is_due = keeper.start_due.is_some() || self.flaw == Some(Flaw::AcceptsAtOnce);
        if !is_due || keeper.is_over {
            return;
        }
        let Some(connection) = keeper.backlog.pop_front() else {
            return;
        };
        keeper.start_due = None;
        keeper.connection = Some(connection);
        self.dispatch(vm, state::Event::Connected);
        self.soon(MESSAGE_NS, Event::KeeperReads(vm));
    }

    /// Starts a monitor, if that is still due.
    pub(super) fn keeper_starts(&mut self, vm: VmIndex, number: u64) {
        let pid = self.pids + 1;
        let keeper = &mut self.vms[vm].keeper;
        if keeper.start_due != Some(number) || keeper.is_over {
            return;
        }
        keeper.start_due = None;
        self.pids = pid;
        self.counts.monitors += 1;
        let program = self.vms[vm].keeper.successor;
        let process = Process {
            kind: Kind::Monitor,
            program,
            adopters: [(vm, Adopter::default())].into(),
            stands_still: false,
            held: Vec::new(),
        };
        self.processes.insert(pid, process);
        let keeper = &mut self.vms[vm].keeper;
        keeper.connection = Some(Connection::of(pid));
        keeper.monitor = Some(pid);
        self.say(|| format!("keeper {vm} starts monitor {pid} of version {}", program.version));
        self.dispatch(vm, state::Event::SuccessorStarted);
        self.soon(MESSAGE_NS, Event::KeeperReads(vm));
    }

    /// Kills the keeper's child.
    fn kill_shard(&mut self, pid: i32) {
        let Some(shard) = self.shards.get_mut(&pid).filter(|shard| shard.runs) else {
            return;
        };
        (shard.runs, shard.was_killed) = (false, true);
        let vm = shard.vm;
        self.soon(KILL_NS, Event::ShardEnded(vm, pid, KILLED));
    }

    pub(super) fn shard_ended(&mut self, vm: VmIndex, pid: i32, status: i32) {
        self.dispatch(vm, state::Event::Exited { pid, status });
    }

    /// Ends a VM's shard with a status as `waitpid` returns it.
    pub(super) fn end_shard(&mut self, vm: VmIndex, status: i32) {
        let Some((&pid, shard)) = self
            .shards
            .iter_mut()
            .find(|(_, shard)| shard.vm == vm && shard.runs)
        else {
            return;
        };
        shard.runs = false;
        self.say(|| format!("shard {pid} of VM {vm} ends with status {status:#x}"));
        self.soon(KILL_NS, Event::ShardEnded(vm, pid, status));
    }
}
