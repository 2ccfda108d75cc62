//! The process of one cell: one thread at a time handles an event, with the cell's state ([`event_queue`]).

mod actions;
mod adoptions;
mod allocation_rate;
mod assertions;
mod calls;
mod clients;
mod cpu_lending;
mod event;
mod event_queue;
mod links;
mod places;
mod recovery;
mod region_actions;
mod region_pages;
mod regions;
mod remote_cells;
mod requests;
mod span_windows;
mod startup;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use protocol::CellId;
use protocol::multicast::Packet;
use registry::cluster::files::{CellFiles, Files};
use registry::journal::{self, Change};
use registry::lease::keep_stacks_small;
use shard_api::Platform;
use tracing::{debug, error, info, trace, warn};
use urpc::host::measure_block_ns;

use self::adoptions::Adoptions;
use self::cpu_lending::LendingReport;
use self::event::Event;
use self::event_queue::{EventQueue, Handle};
use self::regions::RegionFiles;
use self::remote_cells::RemoteCells;
use self::startup::{fresh, initial_state, start_scheduler};
use super::hosts::Hosts;
use super::limits::{BORROWING_PERIOD, ORPHANS_LIMIT, TICK};
use super::link::local::LocalCalls;
use super::link::{CallTable, Sending};
use super::membership::Membership;
use super::peer_table::PeerTable;
use super::state::{Action, Client, State};
use crate::memory_watch::MemoryWatch;
use crate::monitor::raise_file_limit;

/// Events of a cell.
type Events = EventQueue<Cell>;

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
    let window_arbiter = scheduler
        .is_some()
        .then(|| span_windows::arbiter(&files))
        .transpose()?;
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
        adoptions: Adoptions::new(number, is_on_trial, platform, scheduler.clone())
            .with_lending(lending.clone())
            .with_windows(window_arbiter.clone()),
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
    if let Some((scheduler, arbiter)) = scheduler.zip(window_arbiter) {
        span_windows::start(number, &cell.files, &cell.adoptions, scheduler, arbiter)?;
    }
    cell.adoptions.begin_to_watch_memory(watch)?;
    run(me, &events, cell)
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
    end?;
    info!("cell {me} ends by order");
    cell.adoptions.end_scheduling();
    journal::note(Change::CellDown { cell: me.number });
    Ok(())
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

impl Handle for Cell {
    type Event = Event;
    /// By order, or the reason why another process has to be the cell.
    type End = io::Result<()>;

    fn handle(&mut self, event: Event) -> Option<io::Result<()>> {
        match self.take(event) {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(why) => Some(Err(why)),
        }
    }

    /// Everything but what may be followed by many messages, or long ones
    /// ([`links::SHORT_MESSAGE_BYTES_MAX`]): the hello of a cell, with which a link begins, and all messages
    /// before the cell has the others' hellos.
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

    /// Handles one event, and carries out the actions that follow. Returns whether the cell is to end.
    ///
    /// # Errors
    /// The reason why another process has to be the cell.
    fn take(&mut self, event: Event) -> io::Result<bool> {
        let acts = self.actions_of(event)?;
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
        Ok(ends)
    }

    /// The actions that follow from an event.
    fn actions_of(&mut self, event: Event) -> io::Result<Vec<Action>> {
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
            Event::Requested(client, ask) => self.serve_request(client, ask),
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
            Event::LinkEnded(cell, was_alive) => {
                self.link_ended(cell, was_alive)?;
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
            Event::LendersRecorded(name, number, not_recorded) => {
                self.state.lenders_recorded(&name, number, not_recorded)
            }
            Event::RegionPagesMoved(name, number, moved) => {
                self.state.region_pages_moved(&name, number, moved)
            }
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
            Event::VersionMismatch(why) => return Err(io::Error::other(why)),
            Event::Changed(change) => self.membership_changed(change)?,
        };
        Ok(acts)
    }
}
