//! Cells' processes: they start, handle inputs, hang and die.

use std::collections::{BTreeSet, VecDeque};

use cell::cluster::limits::{
    ANSWER_TIMEOUT, BORROWING_PERIOD, HELLO_TIMEOUT, LINK_END_CHECK_DELAY, ORPHANS_LIMIT, RETRY, TICK,
};
use cell::cluster::membership::MembershipEvent;
use cell::cluster::peer_table::{EndedLink, PeerTable, Verdict};
use cell::cluster::state::{Action, Client, State};
use protocol::CellId;
use registry::cluster::interface::{CellRequest, CellResponse, RunningVm};

use super::members::Watch;
use super::{EVENT_NS, Event, Input, SILENCE_MS, START_NS, World};
use crate::{MILLISECOND, SECOND, Time, nanos};

/// Lifetime below which a process may have died of its start, in its guard's view.
const SHORT: Time = 10 * SECOND;
/// Short lives in a row, after which its guard gives it up.
const SHORT_LIVES_MAX: u32 = 10;

#[derive(Debug)]
pub(super) struct Process {
    pub(super) state: State,
    pub(super) id: CellId,
    started: Time,
    /// Time before which it handles nothing.
    busy_until: Time,
    /// Time until which all its threads are stopped.
    stopped_until: Time,
    /// Factor by which everything takes longer.
    pub(super) slowness: u64,
    /// Inputs that are not handled yet. If it is not empty, a turn is due.
    inbox: VecDeque<Input>,
    /// Its state of the other cells.
    pub(super) peers: PeerTable<()>,
    /// Lives to which its end of a link is open.
    pub(super) wires: BTreeSet<CellId>,
    /// Its watch over the cells of other hosts; none if there are none.
    pub(super) watch: Option<Watch>,
    /// Whether a tick is due.
    ticking: bool,
    /// Whether a pass over loans is due.
    passing: bool,
}

impl World {
    /// A cell's guard starts its process.
    pub(super) fn start(&mut self, number: u16) {
        let runs = self.processes.contains_key(&number) || self.joiners.contains_key(&number);
        if runs || self.down.contains(&self.host_of(number)) {
            return;
        }
        if self.cells.hosts() > 1 {
            self.join(number);
            return;
        }
        let life = &mut self.lives[usize::from(number)];
        *life += 1;
        let id = CellId { number, life: *life };
        self.begin(id, None, Vec::new());
        self.to(id, self.now + START_NS, Input::Called);
    }

    /// Begins a life of a cell, with links to all cells of its host that run.
    pub(super) fn begin(&mut self, id: CellId, watch: Option<Watch>, expected: Vec<u16>) {
        self.say(|| format!("{id} starts"));
        self.lives[usize::from(id.number)] = id.life;
        let plan = self.cells.plans[usize::from(id.number)].clone();
        let peers: Vec<CellId> = self.living();
        let peers = peers
            .into_iter()
            .filter(|peer| self.are_near(peer.number, id.number));
        let peers: Vec<CellId> = peers.collect();
        let running = self.monitors.values().filter(|monitor| monitor.runs);
        let running = running.filter(|monitor| self.are_near(monitor.cell, id.number));
        let running = running.map(|monitor| RunningVm {
            name: monitor.host.name.clone(),
            cell: monitor.cell,
            share: monitor.host.share,
            borrowed: monitor.host.borrowed.clone(),
            cells: monitor.host.cells.clone(),
            borrowed_cpus: Vec::new(),
            regions: Vec::new(),
        });
        let lent = self.lent.get(&id.number).cloned();
        let requested = self.requested.get(&id.number).cloned().unwrap_or_default();
        let requested = lent.is_some().then_some(requested);
        let limits = self.cells.limits(&plan);
        let elsewhere = self.numbers().filter(|number| !self.are_near(*number, id.number));
        let process = Process {
            state: State::new(id, u32::from(id.number), plan, lent, running.collect::<Vec<_>>())
                .with_borrowing(limits, requested)
                .with_cordon(self.cordoned.contains_key(&id.number))
                .with_route_costs(self.cells.known.clone())
                .expecting(expected),
            id,
            started: self.now,
            busy_until: self.now,
            stopped_until: self.now,
            slowness: 1,
            inbox: VecDeque::new(),
            peers: PeerTable::new(elsewhere),
            wires: BTreeSet::new(),
            watch,
            ticking: false,
            passing: false,
        };
        self.processes.insert(id.number, process);
        for peer in peers {
            self.link(id, peer, self.now + START_NS);
        }
        self.to(id, self.now + nanos(ORPHANS_LIMIT), Input::Orphans);
    }

    /// A cell's process dies; its guard starts it again after `pause`.
    pub fn kill(&mut self, number: u16, pause: Time) {
        self.joiners.remove(&number);
        if let Some(dead) = self.processes.remove(&number) {
            self.counts.deaths += 1;
            self.say(|| format!("{} dies", dead.id));
            for peer in dead.wires {
                self.hang_up(dead.id, peer);
            }
            self.lose(dead.id);
        }
        self.queue.put(self.now + pause, Event::Restart(number));
    }

    /// The monitors of a cell's VMs have lost it.
    fn lose(&mut self, dead: CellId) {
        let held = self.monitors.iter_mut();
        let held = held.filter(|(_, monitor)| monitor.connected == Some(dead));
        let lost = held.map(|(client, monitor)| {
            monitor.connected = None;
            *client
        });
        for client in lost.collect::<Vec<_>>() {
            self.queue.put(self.now + nanos(RETRY), Event::Come(client));
        }
    }

    /// Has a cell that was taken for dead start anew.
    fn start_anew(&mut self, cell: CellId, why: &str) {
        self.say(|| format!("{cell} starts anew: {why}"));
        self.counts.evicted += 1;
        let started = self
            .processes
            .get(&cell.number)
            .map_or(0, |process| process.started);
        let short_lives = &mut self.short_lives[usize::from(cell.number)];
        *short_lives = if self.now - started < SHORT {
            *short_lives + 1
        } else {
            0
        };
        if *short_lives >= SHORT_LIVES_MAX {
            self.broken = Some(format!("the guard of cell {} gives it up", cell.number));
        }
        let pause = u64::from(*short_lives) * 20 * MILLISECOND;
        self.kill(cell.number, pause);
    }

    /// Stops a cell's process for a time.
    pub fn hang(&mut self, number: u16, time: Time) {
        let until = self.now + time;
        let Some(process) = self.processes.get_mut(&number) else {
            return;
        };
        process.busy_until = process.busy_until.max(until);
        process.stopped_until = process.stopped_until.max(until);
        let (id, peers) = (process.id, process.wires.clone());
        self.say(|| format!("{id} hangs for {} ms", time / MILLISECOND));
        if time <= SILENCE_MS * MILLISECOND {
            return;
        }
        for peer in peers
            .iter()
            .filter(|peer| !self.are_near(peer.number, number))
            .copied()
            .collect::<Vec<_>>()
        {
            let at = self.silent_at();
            self.to(peer, at, Input::Ended(id));
            // When it wakes, its own time limits may end before it reads its inputs.
            if self.chance.once_in(2) {
                self.to(id, until, Input::Ended(peer));
            }
        }
    }

    /// The time until which a life of a cell is stopped, if it is.
    pub(super) fn stopped_until(&self, cell: CellId) -> Option<Time> {
        let process = self.processes.get(&cell.number)?;
        (process.id == cell && process.stopped_until > self.now).then_some(process.stopped_until)
    }

    /// Delivers an input to a life of a cell.
    pub(super) fn arrive(&mut self, cell: CellId, input: Input) {
        let alive = self.processes.get_mut(&cell.number);
        let Some(process) = alive.filter(|process| process.id == cell) else {
            return;
        };
        match &input {
            // A link that is closed at this end delivers nothing.
            Input::Heard(from, _) if !process.wires.contains(from) => return,
            Input::Ended(from) => _ = process.wires.remove(from),
            _ => {}
        }
        process.inbox.push_back(input);
        if process.inbox.len() == 1 {
            let at = process.busy_until.max(self.now);
            self.queue.put(at, Event::Turn(cell));
        }
    }

    /// Handles one event, if the cell lives and does not hang.
    pub(super) fn turn(&mut self, cell: CellId) {
        let alive = |process: &&mut Process| process.id == cell;
        let Some(process) = self.processes.get_mut(&cell.number).filter(alive) else {
            return;
        };
        if process.busy_until > self.now {
            let at = process.busy_until;
            self.queue.put(at, Event::Turn(cell));
            return;
        }
        let Some(input) = process.inbox.front().cloned() else {
            return;
        };
        process.busy_until = self.now + EVENT_NS * process.slowness;
        self.handle(cell, input);
        self.meet(cell);
        // Unless the event has ended it.
        if let Some(process) = self.processes.get_mut(&cell.number).filter(alive) {
            process.inbox.pop_front();
            let at = process.busy_until;
            if !process.inbox.is_empty() {
                self.queue.put(at, Event::Turn(cell));
            }
        }
    }

    fn handle(&mut self, cell: CellId, input: Input) {
        let Some(process) = self.processes.get_mut(&cell.number) else {
            return;
        };
        let acts = match input {
            Input::Linked(peer) if process.peers.has_later(peer) => return self.close(cell, peer),
            Input::Linked(peer) => {
                process.peers.linked(peer, ());
                let acts = process.state.linked(peer, true);
                self.to(cell, self.now + nanos(HELLO_TIMEOUT), Input::HelloDue(peer));
                self.to(cell, self.now + nanos(ORPHANS_LIMIT), Input::Orphans);
                acts
            }
            Input::HelloDue(peer) => {
                if process.state.is_unheard(peer) {
                    self.give_up(cell, peer);
                }
                return;
            }
            Input::Called => {
                process.peers.await_calls([]);
                return;
            }
            Input::Heard(from, message) => {
                let acts = process.state.handle_message(from, message.clone());
                self.witness(cell, from, &message);
                acts
            }
            Input::Ended(peer) => {
                if process.peers.must_check_end(peer) {
                    self.to(
                        cell,
                        self.now + nanos(LINK_END_CHECK_DELAY),
                        Input::LinkEnded(peer, false),
                    );
                }
                self.give_up(cell, peer);
                return;
            }
            Input::LinkEnded(peer, was_alive) => return self.link_ended(cell, peer, was_alive),
            Input::Changed(MembershipEvent::Evicted) => return self.start_anew(cell, "all take it for dead"),
            Input::Changed(MembershipEvent::Lapsed(number)) => process.state.lapsed(number),
            Input::Changed(news) => match process.peers.apply(news) {
                Some(dead) => return self.dead(cell, dead),
                None => return,
            },
            Input::Asked(client, ask) => {
                let acts = process.state.handle_request(client, ask.clone());
                self.note_request(cell, client, &ask);
                self.watch(cell, client);
                acts
            }
            Input::Gone(client) => process.state.handle_disconnect(client),
            Input::Overdue(client, then) => {
                let silent = process.state.silent_since(client, &then);
                silent.into_iter().for_each(|silent| self.give_up(cell, silent));
                self.watch(cell, client);
                return;
            }
            Input::Orphans => process.state.give_up_orphans(),
            Input::Tick => {
                process.ticking = false;
                process.state.tick()
            }
            Input::Pass => {
                process.passing = false;
                self.last_pass = self.now;
                self.counts.passes += 1;
                process.state.pass()
            }
        };
        self.act(cell, acts);
    }

    /// Checks a peer whose link has ended some time ago.
    fn link_ended(&mut self, cell: CellId, peer: CellId, was_alive: bool) {
        let runs = self
            .processes
            .get(&peer.number)
            .is_some_and(|other| other.id == peer);
        match self.processes[&cell.number]
            .peers
            .check_end(peer, runs, was_alive)
        {
            EndedLink::Settled => {}
            EndedLink::LooksAlive => {
                self.to(
                    cell,
                    self.now + nanos(LINK_END_CHECK_DELAY),
                    Input::LinkEnded(peer, true),
                );
            }
            EndedLink::StartsAnew => self.start_anew(cell, &format!("{peer} takes it for dead")),
        }
    }

    /// Records cordons, and the cordon of a cell that admits a VM, for the checks.
    fn note_request(&mut self, cell: CellId, client: Client, request: &CellRequest) {
        match request {
            CellRequest::Cordon { cordoned: true } => {
                self.counts.cordons += 1;
                self.cordoned.entry(cell.number).or_insert(self.counts.cordons);
            }
            CellRequest::Cordon { cordoned: false } => {
                self.counts.cordons += 1;
                self.cordoned.remove(&cell.number);
            }
            CellRequest::AdmitVm(_) => {
                if let Some(monitor) = self.monitors.get_mut(&client) {
                    monitor.asked_under = self.cordoned.get(&cell.number).copied();
                }
            }
            _ => {}
        }
    }

    /// Processes the inputs that came early, if there are links to all by now.
    fn meet(&mut self, cell: CellId) {
        let alive = |process: &&mut Process| process.id == cell;
        if let Some(process) = self.processes.get_mut(&cell.number).filter(alive)
            && process.peers.have_all_called()
        {
            let acts = process.state.handle_all_linked();
            self.act(cell, acts);
        }
    }

    fn watch(&mut self, cell: CellId, client: Client) {
        let awaited = self.processes[&cell.number].state.awaited(client);
        if !awaited.is_empty() {
            let at = self.now + nanos(ANSWER_TIMEOUT);
            self.to(cell, at, Input::Overdue(client, awaited));
        }
    }

    /// A cell's wait for a silent one times out, and it closes its link.
    fn give_up(&mut self, at: CellId, silent: CellId) {
        let Some(process) = self.processes.get_mut(&at.number) else {
            return;
        };
        match process.peers.lose(silent) {
            Verdict::Dead => self.dead(at, silent),
            Verdict::Suspect => {
                self.close(at, silent);
                self.accuse(at, silent);
            }
        }
    }

    fn dead(&mut self, at: CellId, dead: CellId) {
        self.say(|| format!("to {at} {dead} is dead"));
        self.close(at, dead);
        if let Some(process) = self.processes.get_mut(&at.number) {
            let acts = process.state.dead(dead);
            self.act(at, acts);
        }
    }

    /// A cell closes its end of a link.
    fn close(&mut self, at: CellId, peer: CellId) {
        let process = self.processes.get_mut(&at.number);
        let was_open = process.is_some_and(|process| process.wires.remove(&peer));
        if was_open || self.wires.contains_key(&(at, peer)) {
            self.hang_up(at, peer);
        }
    }

    fn act(&mut self, at: CellId, acts: Vec<Action>) {
        let mut sent: Time = 0;
        let slowness = self
            .processes
            .get(&at.number)
            .map_or(1, |process| process.slowness);
        let mut acts = VecDeque::from(acts);
        while let Some(act) = acts.pop_front() {
            let process = self.processes.get_mut(&at.number);
            match act {
                Action::Send(to, message) => match process {
                    Some(process) if process.peers.has(to) => {
                        sent += slowness;
                        self.send(at, to, sent, message);
                    }
                    Some(process) => acts.extend(process.state.handle_unsent(to, message)),
                    None => {}
                },
                Action::PersistLent(lent) => _ = self.lent.insert(at.number, lent),
                Action::PersistLentOnRequest(lent) => {
                    self.counts.requested += 1;
                    self.requested.insert(at.number, lent);
                }
                Action::Answer(client, CellResponse::Hosted(_)) if self.must_not_host(at, client) => {
                    return self.start_anew(at, "its names may be others'");
                }
                Action::Answer(client, answer) => self.answer(at, client, answer),
                // Monitors serve its VMs, none of which has a shared region.
                Action::Adopt(..)
                | Action::ReportVcpus(_)
                | Action::ReportCpuLending(_)
                | Action::ReturnCpu { .. }
                | Action::ArrangeWindows(..)
                | Action::ReportAdopted(_)
                | Action::ReportProtocols(_)
                | Action::AwaitLeft(..)
                | Action::EndVm { .. }
                | Action::AwaitEnd(_)
                | Action::CreateRegion { .. }
                | Action::SendRegion { .. }
                | Action::SearchRegion { .. }
                | Action::ProbeRegion { .. }
                | Action::CloseRegion(_)
                | Action::RecordLenders { .. }
                | Action::MoveRegionPages { .. }
                | Action::End => {}
            }
        }
        if let Some(process) = self.processes.get_mut(&at.number) {
            let done = self.now + EVENT_NS * slowness + sent * self.cells.ways.send_ns();
            process.busy_until = process.busy_until.max(done);
            if !process.ticking && process.state.needs_tick() {
                process.ticking = true;
                self.to(at, self.now + nanos(TICK), Input::Tick);
            }
        }
        if let Some(process) = self.processes.get_mut(&at.number)
            && !process.passing
            && process.state.needs_pass()
        {
            process.passing = true;
            self.to(at, self.now + nanos(BORROWING_PERIOD), Input::Pass);
        }
    }
}
