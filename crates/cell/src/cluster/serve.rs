//! The process of one cell: one thread at a time handles an event, with the cell's state ([`events`]).

mod adoptions;
mod allocation_rate;
mod assertions;
mod calls;
mod clients;
mod cpu_lending;
mod events;
mod places;
mod recovery;
mod region_actions;
mod regions;
mod remote_cells;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use config::cluster::{CellPlan, CpuScheduler, Site};
use fault_point::fault_point;
use hostinfo::{facts, topology};
use protocol::CellId;
use protocol::multicast::Packet;
use registry::cluster::files::{CellFiles, Files};
use registry::cluster::interface::{CellRequest, CellResponse, LentCpu, OF_CELL, owner_of};
use registry::journal::{self, Change};
use registry::lease::keep_stacks_small;
use shard_api::Platform;
use tracing::{debug, error, info, trace, warn};
use urpc::host::measure_block_ns;

use self::adoptions::Adoptions;
use self::assertions::Asserted;
use self::cpu_lending::LendingReport;
use self::events::{EventQueue, Handle};
use self::region_actions::SoughtRegion;
use self::regions::RegionFiles;
use self::remote_cells::RemoteCells;
use super::hosts::Hosts;
use super::limits::{
    ANSWER_TIMEOUT, BORROWING_PERIOD, HELLO_TIMEOUT, LINK_END_CHECK_DELAY, ORPHANS_LIMIT, TICK,
};
use super::link::local::LocalCalls;
use super::link::{CallTable, GATHERS_REPLIES, Link, Sending};
use super::lost;
use super::membership::{Membership, MembershipEvent};
use super::peer_table::{EndedLink, PeerTable, Verdict};
use super::protocols::protocols;
use super::state::{Action, Awaited, BusyCpus, CellMessage, Client, State, borrowing_limits};
use crate::memory_watch::MemoryWatch;
use crate::monitor::raise_file_limit;
use crate::scheduler::Scheduler;
use crate::socket::bind;

/// Maximum length of a message that a link's thread handles itself, in bytes. While such a thread waits for
/// room in a channel to another cell, it receives nothing, and two cells could wait for each other. So the
/// messages that it sends meanwhile must be few and short. A channel takes some 50 KiB, even if nobody reads.
const SHORT_MESSAGE_BYTES_MAX: usize = 2 << 10;

/// Events of a cell.
type Events = EventQueue<Cell>;

enum Event {
    Linked(Box<Link>),
    /// The cells among those that were calling this one which are awaited; empty: no further one.
    Called(Vec<u16>),
    Waited,
    Received(CellId, CellMessage),
    Dead(CellId),
    Connected(Client, UnixStream),
    Requested(Client, CellRequest),
    Disconnected(Client),
    /// Whether this client still waits for these cells.
    Overdue(Client, Awaited),
    /// Whether this cell has sent its hello.
    HelloDue(CellId),
    /// This cell ended its link some time ago. Says whether it was seen to live since: its next incarnation
    /// takes a moment to be told apart.
    LinkEnded(CellId, bool),
    OrphansLate,
    /// Time is up for a VM's next process to come.
    LeftLate(String, u64),
    /// The asserted facts have changed.
    Asserted(Box<Asserted>),
    /// The response to a client's request is ready.
    Responded(Client, CellResponse),
    /// No VM of the host depends on this failed cell any more.
    NoDependents(u16),
    /// The search for the file of a shared region has ended.
    RegionSought(SoughtRegion),
    /// A shared region that had no member and was used is to be probed again.
    RegionProbeDue(String),
    Tick,
    /// Memory may be missing, or to be returned.
    Pass,
    /// The busy vCPUs of the cell. The answer is sent to the balancer of cells.
    CpusMeasured(BusyCpus, Sender<Vec<LentCpu>>),
    /// A cell of this host has no version in common with this one.
    VersionMismatch(String),
    /// The membership of the cells of all hosts has changed.
    Changed(MembershipEvent),
}

/// Runs the cell until it is ordered to end. On trial it sets no VM aside that it can't adopt: its guard goes
/// back to the former program. `platform` answers what only KVM can about the cell's VMs.
///
/// # Errors
/// If the cell runs already, there is no such cell, or its sockets can't be made.
pub fn serve(number: u16, is_on_trial: bool, platform: Platform) -> io::Result<()> {
    raise_file_limit()?;
    keep_stacks_small();
    let files = Files::open()?;
    let own = files.cell(number);
    let plan = files.plan()?.into_iter().find(|cell| cell.number == number);
    let plan = plan.ok_or_else(|| io::Error::other(format!("the cluster has no cell {number}")))?;
    let claim = own.claim(number)?;
    // The process that marks the cell as failed may have found no process just before.
    let may_run = || match own.has_failed() {
        true => Err(io::Error::other(format!("cell {number} has failed"))),
        false => Ok(()),
    };
    may_run()?;
    let events = Events::start()?;
    let hosts = files
        .site()?
        .map(|site| Hosts::open(site).map_err(io::Error::other)?.with_shared_memory())
        .transpose()?;
    // Other cells call as soon as the socket is there.
    let listener = hosts.as_ref().map(|hosts| hosts.listen(number)).transpose()?;
    if let Some(warning) = hosts.as_ref().and_then(Hosts::warning) {
        warn!("{warning}");
    }
    let membership = match &hosts {
        Some(hosts) => {
            let joined = Membership::join(&hosts.site(), number, claim.id.life - 1, || own.is_to_end())?;
            if joined.is_none() {
                info!("cell {number} ends by order, before it was a member");
                return Ok(());
            }
            joined
        }
        None => None,
    };
    let me = membership.as_ref().map_or(claim.id, |membership| membership.me);
    own.set_life(me.life)?;
    let scheduler = start_scheduler(&files, &plan)?;
    let lends_cpus = files.scheduling()?.lend_cpus;
    let lending = lends_cpus.then(Arc::<LendingReport>::default);
    let (asserted_facts, asserted) = assertions::Reader::start(&files)?;
    let watch = MemoryWatch::new(files.pressure()?.low_water, plan.nodes.clone());
    let state = initial_state(
        me,
        plan,
        &own,
        &files,
        hosts.as_ref(),
        membership.as_ref(),
        asserted,
    )?
    .with_drivers(scheduler.is_some())
    .with_automatic_cpu_loans(lending.is_some());
    let calling = Arc::new(CallTable::new(me));
    let calls = LocalCalls::new(me, measure_block_ns(), calling.clone());
    calls::take(fresh(&own.link_socket())?, &calls, &events)?;
    // Joining may have taken long.
    may_run()?;
    clients::take(fresh(&own.socket())?, &events, &asserted_facts)?;
    let others: Vec<u16> = hosts
        .as_ref()
        .map(|hosts| hosts.site().elsewhere().collect())
        .unwrap_or_default();
    let mut remote_cells = None;
    if let (Some(hosts), Some(listener), Some(membership)) = (hosts, listener, membership) {
        remote_cells = Some(RemoteCells::start(
            hosts, &own, listener, membership, &calling, &events,
        )?);
    }
    calls::call_others(files.clone(), calls, remote_cells.clone(), calling, &events)?;
    events.post_after(ORPHANS_LIMIT, Event::OrphansLate);
    let mut cell = Cell {
        number,
        own,
        files,
        state,
        adoptions: Adoptions::new(number, is_on_trial, platform, scheduler).with_lending(lending.clone()),
        peers: PeerTable::new(others),
        clients: BTreeMap::new(),
        regions: RegionFiles::default(),
        remote_cells,
        ticking: false,
        passing: false,
        events: events.clone(),
    };
    cell.begin()?;
    if let Some(report) = lending {
        cpu_lending::start(number, &cell.files, &cell.adoptions, report, &cell.events)?;
    }
    cell.adoptions.begin_to_watch_memory(watch)?;
    run(me, &events, cell)
}

/// Starts the drivers of the cell's CPUs, if the cluster file asks for them.
fn start_scheduler(files: &Files, plan: &CellPlan) -> io::Result<Option<Scheduler>> {
    let scheduling = files.scheduling()?;
    if scheduling.cpus == CpuScheduler::Linux {
        return Ok(None);
    }
    let facts: knowledge::Base = topology::discover().into_iter().collect();
    let nodes = facts::nodes(&knowledge::Machine::of(&facts), |_| true);
    Scheduler::start(&plan.cpus, &nodes, scheduling.tunables.unwrap_or_default()).map(Some)
}

/// State of a cell that starts, from the records of lent memory, VMs, cordon and cells, and the facts.
fn initial_state(
    me: CellId,
    plan: CellPlan,
    own: &CellFiles,
    files: &Files,
    hosts: Option<&Hosts>,
    membership: Option<&Membership>,
    asserted: Asserted,
) -> io::Result<State> {
    let expected = membership.zip(hosts);
    let expected = expected.map_or_else(Vec::new, |(membership, hosts)| {
        remote_cells::expected(membership, &hosts.site())
    });
    let Asserted { capacity, costs } = asserted;
    if let Some(hosts) = hosts {
        hosts.set_route_costs(costs.route_costs());
    }
    let (cpus, memory_bytes) = (plan.cpus.len(), plan.memory_bytes);
    let borrowing = files.borrowing()?;
    let limits = borrowing_limits(&borrowing, allocation_rate::measure, cpus, memory_bytes);
    let lent = own.lent()?;
    let requested = lent.is_some().then(|| own.lent_on_request()).transpose()?;
    let mut state = State::new(me, std::process::id(), plan, lent, places::running(files)?)
        .with_borrowing(limits, requested)
        .with_cordon(own.is_cordoned())
        .with_regions(files.regions()?)
        .with_route_costs(costs)
        .expecting(expected);
    state.assert(capacity);
    Ok(state)
}

/// Serves events until the cell ends by order.
///
/// # Errors
/// The reason why another process has to be the cell.
fn run(me: CellId, events: &Events, cell: Cell) -> io::Result<()> {
    info!("cell {me} runs");
    journal::note(Change::CellUp {
        cell: me.number,
        life: me.life,
        pid: std::process::id(),
    });
    let (cell, end) = events.run(Box::new(cell));
    if let End::StartAnew(why) = end {
        return Err(io::Error::other(why));
    }
    info!("cell {me} ends by order");
    cell.adoptions.end_scheduling();
    journal::note(Change::CellDown { cell: me.number });
    Ok(())
}

/// The next step after an event.
#[derive(Debug, PartialEq)]
enum Next {
    GoOn,
    End(End),
}

/// The end of a cell's process.
#[derive(Debug, PartialEq)]
enum End {
    /// By order.
    Ordered,
    /// Another cell takes this one for dead, so it must die.
    StartAnew(String),
}

struct Cell {
    number: u16,
    own: CellFiles,
    files: Files,
    state: State,
    adoptions: Adoptions,
    peers: PeerTable<Sending>,
    clients: BTreeMap<Client, UnixStream>,
    regions: RegionFiles,
    /// The cells of other hosts.
    remote_cells: Option<RemoteCells>,
    /// Whether a tick is scheduled.
    ticking: bool,
    /// Whether a pass over loans is scheduled.
    passing: bool,
    events: Events,
}

impl Next {
    fn start_anew(why: String) -> Self {
        Self::End(End::StartAnew(why))
    }
}

impl Handle for Cell {
    type Event = Event;
    type End = End;

    fn handle(&mut self, event: Event) -> Option<End> {
        match self.take(event) {
            Next::GoOn => None,
            Next::End(end) => Some(end),
        }
    }

    /// Everything but what may be followed by many messages, or long ones ([`SHORT_MESSAGE_BYTES_MAX`]): the
    /// hello of a cell, with which a link begins, and all messages before the cell has the others' hellos.
    fn allows_any_thread(&self, event: &Event) -> bool {
        match event {
            Event::Received(_, Packet::Direct { begins: true, .. }) => false,
            Event::Received(..) => self.state.has_started(),
            _ => true,
        }
    }
}

impl Cell {
    /// Acts on cells that failed while this cell had no process, and starts to adopt its VMs.
    fn begin(&mut self) -> io::Result<()> {
        // Cells that failed while this cell had no process are included.
        let failed: Vec<u16> = self.failed_here();
        let acts = failed
            .into_iter()
            .flat_map(|number| self.state.failed(number))
            .collect();
        self.act(acts);
        let adoptions = self.adoptions.clone();
        std::thread::Builder::new()
            .name("adoptions".into())
            .spawn(move || {
                if let Err(error) = adoptions.begin_all() {
                    error!(%error, "the VMs of the cell's last process are not adopted");
                }
            })?;
        Ok(())
    }

    fn take(&mut self, event: Event) -> Next {
        match &event {
            Event::Requested(client, ask) => debug!(client, ?ask, "a client asks"),
            Event::Received(from, message) => trace!(%from, ?message, "a message has come"),
            _ => {}
        }
        let acts = match event {
            Event::Linked(link) => self.linked(*link),
            Event::Called(awaited) => {
                self.peers.await_calls(awaited);
                Vec::new()
            }
            Event::Waited => {
                self.peers.await_calls([]);
                Vec::new()
            }
            Event::Received(from, message) => self.state.handle_message(from, message),
            Event::Dead(cell) => {
                self.parted(cell);
                self.give_up(cell)
            }
            Event::Connected(client, stream) => {
                self.clients.insert(client, stream);
                Vec::new()
            }
            Event::Requested(client, CellRequest::Recover { cell })
                if !self.files.cell(cell).has_failed() =>
            {
                let why = format!("cell {cell} has not failed");
                vec![Action::Answer(client, CellResponse::Refused { why })]
            }
            Event::Requested(client, CellRequest::TakeHosts) => self.take_hosts(client),
            Event::Requested(client, ask) => match self.serve_request(client, ask) {
                Some(acts) => acts,
                None => return Next::GoOn,
            },
            Event::Asserted(asserted) => {
                self.take_facts(*asserted);
                Vec::new()
            }
            Event::Responded(client, answer) => vec![Action::Answer(client, answer)],
            Event::Overdue(client, then) => {
                let silent = self.state.silent_since(client, &then);
                let acts = silent.into_iter().flat_map(|cell| self.give_up(cell)).collect();
                self.watch(client);
                acts
            }
            Event::HelloDue(cell) if self.state.is_unheard(cell) => self.give_up(cell),
            Event::HelloDue(_) => Vec::new(),
            Event::LinkEnded(cell, ran) => {
                let other = self.files.cell(cell.number);
                let runs = other.runs() && other.life() == cell.life;
                match self.peers.check_end(cell, runs, ran) {
                    EndedLink::Settled => {}
                    EndedLink::LooksAlive => {
                        let event = Event::LinkEnded(cell, true);
                        self.events.post_after(LINK_END_CHECK_DELAY, event);
                    }
                    EndedLink::StartsAnew => {
                        return Next::start_anew(format!("cell {cell} takes this one for dead"));
                    }
                }
                Vec::new()
            }
            Event::Disconnected(client) => {
                self.clients.remove(&client);
                self.state.handle_disconnect(client)
            }
            Event::OrphansLate => self.state.give_up_orphans(),
            Event::LeftLate(name, number) => self.state.give_up(&name, number),
            Event::NoDependents(cell) => {
                info!("no VM depends on the failed cell {cell} any more");
                self.state.bury(cell)
            }
            Event::RegionSought(sought) => self.region_sought(sought),
            Event::RegionProbeDue(name) => vec![self.state.probe_region_again(name)],
            Event::Tick => {
                self.ticking = false;
                self.state.tick()
            }
            Event::Pass => {
                self.passing = false;
                self.state.pass()
            }
            Event::CpusMeasured(busy, tell) => {
                // The balancer waits for it.
                let _ = tell.send(self.state.set_busy_cpus(busy));
                Vec::new()
            }
            Event::VersionMismatch(why) => return Next::start_anew(why),
            Event::Changed(MembershipEvent::Evicted) => {
                return Next::start_anew("the other hosts take this cell for dead".to_owned());
            }
            Event::Changed(MembershipEvent::Lapsed(cell)) => {
                info!("the names of cell {cell}'s VMs are free: its host has ended them");
                self.state.lapsed(cell)
            }
            Event::Changed(news) => self
                .peers
                .apply(news)
                .map_or_else(Vec::new, |cell| self.dead(cell)),
        };
        let mut ends = self.act(acts);
        if self.peers.have_all_called() {
            let acts = self.state.handle_all_linked();
            ends |= self.act(acts);
        }
        let probes = self.state.region_probes();
        ends |= self.act(probes);
        if !self.ticking && self.state.needs_tick() {
            self.ticking = true;
            self.events.post_after(TICK, Event::Tick);
        }
        if !self.passing && self.state.needs_pass() {
            self.passing = true;
            self.events.post_after(BORROWING_PERIOD, Event::Pass);
        }
        if ends { Next::End(End::Ordered) } else { Next::GoOn }
    }

    /// Serves a client's request. A cordon that can't be written down is refused here, without actions.
    fn serve_request(&mut self, client: Client, ask: CellRequest) -> Option<Vec<Action>> {
        if let CellRequest::Cordon { cordoned } = &ask
            && let Err(error) = self.write_cordon(*cordoned)
        {
            // Other cells must not learn of a cordon that the next process would not have.
            let why = format!("the cordon can't be written down: {error}; see whether the disk is full");
            self.answer(client, &CellResponse::Refused { why });
            return None;
        }
        let acts = self.state.handle_request(client, ask);
        self.watch(client);
        Some(acts)
    }

    /// Applies the facts that a user asserts now.
    fn take_facts(&mut self, Asserted { capacity, costs }: Asserted) {
        if let Some(remote_cells) = &self.remote_cells {
            remote_cells.set_route_costs(costs.route_costs());
        }
        self.state.assert(capacity);
        self.state.set_route_costs(costs);
    }

    fn write_cordon(&self, cordoned: bool) -> io::Result<()> {
        let before = self.own.is_cordoned();
        self.own.cordon(cordoned)?;
        let cell = self.number;
        match (before, cordoned) {
            (false, true) => journal::note(Change::CellCordoned { cell }),
            (true, false) => journal::note(Change::CellUncordoned { cell }),
            _ => {}
        }
        Ok(())
    }

    /// Takes the hosts that the cell's files name now.
    fn take_hosts(&mut self, client: Client) -> Vec<Action> {
        let refused = |why: String| vec![Action::Answer(client, CellResponse::Refused { why })];
        let Some(remote_cells) = &self.remote_cells else {
            return refused("the cluster has this host only".to_owned());
        };
        let next = match self.files.site() {
            Ok(Some(next)) => next,
            Ok(None) => return refused("the cluster has this host only".to_owned()),
            Err(error) => return refused(format!("the cluster's hosts can't be read: {error}")),
        };
        let left = remote_cells.site().cells_without(&next);
        info!("goes on with hosts {}", names(&next));
        self.peers.add_remote(next.elsewhere());
        remote_cells.set_site(next);
        let mut acts: Vec<Action> = left
            .into_iter()
            .flat_map(|cell| self.state.departed(cell))
            .collect();
        acts.extend(self.state.handle_request(client, CellRequest::TakeHosts));
        acts
    }

    /// Drops a cell that has failed to answer. One of another host is dead only when all agree.
    fn give_up(&mut self, cell: CellId) -> Vec<Action> {
        if self.peers.has(cell) {
            warn!("no link to cell {cell}");
        }
        match self.peers.lose(cell) {
            Verdict::Dead => self.dead(cell),
            Verdict::Suspect => {
                if let Some(remote_cells) = &self.remote_cells {
                    let _ = remote_cells.suspects.send(cell);
                }
                Vec::new()
            }
        }
    }

    /// Handles the end of a cell's link: checks after a while whether the cell died, or takes this one for
    /// dead.
    fn parted(&self, cell: CellId) {
        if self.peers.must_check_end(cell) {
            self.events
                .post_after(LINK_END_CHECK_DELAY, Event::LinkEnded(cell, false));
        }
    }

    /// Checks after a while whether a client's request is still not answered.
    fn watch(&self, client: Client) {
        let awaited = self.state.awaited(client);
        if !awaited.is_empty() {
            self.events
                .post_after(ANSWER_TIMEOUT, Event::Overdue(client, awaited));
        }
    }

    fn linked(&mut self, link: Link) -> Vec<Action> {
        let peer = link.peer;
        if self.peers.has_later(peer) {
            return Vec::new();
        }
        let Link {
            version,
            transport,
            sending,
            receiving,
            ..
        } = link;
        let (heard, dead) = (self.events.clone(), self.events.clone());
        let reader = std::thread::Builder::new()
            .name(format!("from {peer}"))
            .spawn(move || {
                // The main thread ends with the process.
                receiving.run(|message, length| {
                    let event = Event::Received(peer, message);
                    match length <= SHORT_MESSAGE_BYTES_MAX {
                        true => heard.handle(event),
                        false => heard.post(event),
                    }
                });
                dead.post(Event::Dead(peer));
            });
        if reader.is_err() {
            return Vec::new();
        }
        info!("linked to cell {peer} by {transport}");
        self.peers.linked(peer, sending);
        self.events.post_after(HELLO_TIMEOUT, Event::HelloDue(peer));
        // The cell may have a record of VMs here that no process holds.
        self.events.post_after(ORPHANS_LIMIT, Event::OrphansLate);
        self.state.linked(peer, version >= GATHERS_REPLIES)
    }

    fn dead(&mut self, cell: CellId) -> Vec<Action> {
        warn!("cell {cell} is dead");
        let mut acts = self.state.dead(cell);
        // The dead cell may have failed, or have been the one to end the VMs of a failed one. Failures on
        // another host are handled there.
        for failed in self.failed_here() {
            acts.extend(self.state.failed(failed));
        }
        acts
    }

    /// The cells of this host that have failed.
    fn failed_here(&self) -> Vec<u16> {
        let plan = self.files.plan().unwrap_or_default();
        let numbers = plan.into_iter().map(|cell| cell.number);
        numbers
            .filter(|number| self.files.cell(*number).has_failed())
            .collect()
    }

    fn act(&mut self, mut acts: Vec<Action>) -> bool {
        while !acts.is_empty() {
            let mut next = Vec::new();
            for act in acts {
                match act {
                    Action::Send(to, message) => {
                        let link = self.peers.link(to);
                        let sent = link.map(|link| link.send(&message));
                        if let Some(Err(error)) = &sent {
                            warn!(%error, "a message to cell {to} was not sent");
                            if error.kind() == io::ErrorKind::BrokenPipe {
                                self.parted(to);
                            }
                            next.extend(self.give_up(to));
                        }
                        fault_point!(message_sent);
                        if !matches!(sent, Some(Ok(()))) {
                            next.extend(self.state.handle_unsent(to, message));
                        }
                    }
                    Action::PersistLent(lent) => {
                        if let Err(error) = self.own.keep_lent(&lent) {
                            // The effects that follow must not happen. If the process ends here, no other
                            // process has seen any of them.
                            error!(%error, "the record of lent memory cannot be written");
                            std::process::exit(1);
                        }
                    }
                    Action::PersistLentOnRequest(lent) => {
                        if let Err(error) = self.own.keep_lent_on_request(&lent) {
                            error!(%error, "the record of requested memory cannot be written");
                            std::process::exit(1);
                        }
                    }
                    Action::Answer(client, answer) => {
                        if matches!(answer, CellResponse::Hosted(_)) && self.may_have_lost_names() {
                            // The process may have been suspended while its claim won. The effects that
                            // follow do not happen.
                            error!(
                                "the cell has not been a member for too long to give names, and starts anew"
                            );
                            std::process::exit(1);
                        }
                        self.answer(client, &answer);
                    }
                    Action::Adopt(client, name, again) => {
                        let answer = match self.adoptions.begin(&name, again) {
                            Ok(()) => CellResponse::Done,
                            Err(error) => CellResponse::Refused {
                                why: format!("{name}: {error}"),
                            },
                        };
                        self.answer(client, &answer);
                    }
                    Action::ReportVcpus(client) => {
                        let events = self.events.clone();
                        let told = move |answer| events.post(Event::Responded(client, answer));
                        if let Err(error) = self.adoptions.begin_to_list_vcpus(told) {
                            let why = error.to_string();
                            self.answer(client, &CellResponse::Refused { why });
                        }
                    }
                    Action::ReturnCpu {
                        client,
                        vm,
                        vcpu,
                        lender,
                    } => {
                        let events = self.events.clone();
                        let told = move |answer| _ = events.send(Event::Responded(client, answer));
                        let begun = self.adoptions.begin_to_return_cpu((vm, vcpu), lender, told);
                        if let Err(error) = begun {
                            let why = error.to_string();
                            self.answer(client, &CellResponse::Refused { why });
                        }
                    }
                    Action::ReportProtocols(client) => {
                        self.answer(client, &CellResponse::Protocols(protocols()))
                    }
                    Action::ReportAdopted(client) => {
                        let events = self.events.clone();
                        let told = move |answer| events.post(Event::Responded(client, answer));
                        if let Err(error) = self.adoptions.begin_to_await_first(told) {
                            let why = error.to_string();
                            self.answer(client, &CellResponse::Refused { why });
                        }
                    }
                    Action::AwaitLeft(name, number) => {
                        self.events
                            .post_after(ORPHANS_LIMIT, Event::LeftLate(name, number));
                    }
                    Action::EndVm { name, failed } => {
                        warn!(vm = name, "the VM ends, since cell {failed} has failed");
                        match owner_of(&name) {
                            None => self.adoptions.end(&name, failed),
                            Some(_) => recovery::end_user_vm(&self.files, name),
                        }
                    }
                    Action::AwaitEnd(failed) => {
                        let events = self.events.clone();
                        let told = move || events.post(Event::NoDependents(failed));
                        if let Err(error) = recovery::await_end(&self.files, failed, told) {
                            error!(%error, "the ends of the VMs of the failed cell {failed} are not awaited");
                        }
                    }
                    act @ (Action::CreateRegion { .. }
                    | Action::SendRegion { .. }
                    | Action::SearchRegion { .. }
                    | Action::ProbeRegion { .. }
                    | Action::CloseRegion(_)) => next.extend(self.act_on_region(act)),
                    Action::End => return true,
                }
            }
            acts = next;
        }
        false
    }

    /// Whether other cells may have given names of this one to their VMs, by `on_lost = "stop"`.
    fn may_have_lost_names(&self) -> bool {
        let remote_cells = self.remote_cells.as_ref();
        remote_cells.is_some_and(|remote_cells| lost::is_past_lease(&self.own, &remote_cells.site()))
    }

    fn answer(&mut self, client: Client, answer: &CellResponse) {
        let Some(stream) = self.clients.get_mut(&client) else {
            return;
        };
        if let CellResponse::Hosted(_) = answer {
            fault_point!(place_given);
        }
        if let Ok(line) = OF_CELL.write(answer) {
            // A client that does not read its answer has disconnected, and its event follows.
            let _ = stream.write_all(&line);
        }
    }
}

/// The names of the hosts.
fn names(site: &Site) -> String {
    let names: Vec<&str> = site.hosts.iter().map(|host| &host.name[..]).collect();
    names.join(", ")
}

/// A socket in place of the one that a dead process left.
fn fresh(path: &Path) -> io::Result<UnixListener> {
    let _ = std::fs::remove_file(path);
    bind(path)
}
