//! The process of one cell: everything that happens comes as an event to one thread, which owns the state.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use protocol::CellId;
use urpc::host::measure_block_ns;

use super::contacts::{Contacts, Parted, Verdict};
use super::files::{CellFiles, Files};
use super::hosts::Hosts;
use super::interface::{Answer, Ask, Running, VmShare, part_name};
use super::limits::{HELLO_LIMIT, LOOK_AFTER, ORPHANS_LIMIT, TICK, WORD_LIMIT};
use super::link::local::Calls;
use super::link::{Calling, Link, Sending};
use super::membership::{Membership, News};
use super::routes::Ways;
use super::state::{Act, Awaited, CellMessage, Client, State};
use crate::known;
use crate::monitor::bind;
use crate::registry::{Record, Registry};

/// Bytes of a client's line at most.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// How long a cell that is calling this one may take.
const CROSSED_LIMIT: Duration = Duration::from_secs(2);

enum Event {
    Linked(Box<Link>),
    /// Of those that were calling this cell, these are awaited; none: no more are.
    Called(Vec<u16>),
    Waited,
    Heard(CellId, CellMessage),
    Dead(CellId),
    Came(Client, UnixStream),
    Asked(Client, Ask),
    Gone(Client),
    /// Does this client still wait for these?
    Overdue(Client, Awaited),
    /// Has this cell said hello?
    HelloDue(CellId),
    /// This cell ended its link some time ago. Whether it was seen to live since: its next life takes a moment to be
    /// told from it.
    Parted(CellId, bool),
    OrphansLate,
    Tick,
    /// Of the cells of all hosts.
    Changed(News),
}

/// Is the cell until it is told to end.
///
/// # Errors
/// If the cell runs already, there is no such cell, or its sockets can't be made.
pub fn serve(number: u16) -> io::Result<()> {
    let files = Files::open()?;
    let own = files.cell(number);
    let plan = files.plan()?.into_iter().find(|cell| cell.number == number);
    let plan = plan.ok_or_else(|| io::Error::other(format!("the cluster has no cell {number}")))?;
    let claim = own.claim(number)?;
    let (events, happened) = mpsc::channel();
    let hosts = files
        .site()?
        .map(|site| Hosts::open(site).map_err(io::Error::other)?.with_shared_memory())
        .transpose()?;
    // Others call as soon as they know of it.
    let listener = hosts.as_ref().map(|hosts| hosts.listen(number)).transpose()?;
    let membership = hosts.as_ref().map(|hosts| Membership::join(&hosts.site, number));
    let me = membership.as_ref().map_or(claim.id, |membership| membership.me);
    own.set_life(me.life)?;
    let state = State::new(me, std::process::id(), plan, own.lent()?, running()?)
        .with_ways(Ways::of(&known::all(&files)?));
    let calling = Arc::new(Calling::new(me));
    let calls = Calls::new(me, measure_block_ns(), calling.clone());
    take_calls(fresh(&own.link_socket())?, &calls, &events)?;
    take_clients(fresh(&own.socket())?, &events)?;
    let others: Vec<u16> = hosts
        .as_ref()
        .map(|hosts| hosts.site.elsewhere().collect())
        .unwrap_or_default();
    let mut elsewhere = None;
    if let (Some(hosts), Some(listener), Some(membership)) = (hosts, listener, membership) {
        elsewhere = Some(Elsewhere::start(hosts, listener, membership, &calling, &events)?);
    }
    call_others(files.clone(), calls, elsewhere.clone(), calling, &events)?;
    later(ORPHANS_LIMIT, Event::OrphansLate, &events)?;
    let mut cell = Cell {
        own,
        files,
        state,
        contacts: Contacts::new(others),
        clients: BTreeMap::new(),
        elsewhere,
        ticking: false,
        events,
    };
    eprintln!("cell {me}: runs");
    for event in happened {
        match cell.take(event) {
            Next::GoOn => {}
            Next::End => break,
            Next::StartAnew(why) => return Err(io::Error::other(why)),
        }
    }
    eprintln!("cell {me}: ends as told");
    Ok(())
}

/// The VMs of this host that run in cells, and the parts of other hosts' VMs.
fn running() -> io::Result<Vec<Running>> {
    let mut records = Registry::open()?.list()?;
    records.extend(Registry::listed_parts()?);
    Ok(records.iter().flat_map(places).collect())
}

/// The places that a VM has: one, or one for each of its parts.
fn places(record: &Record) -> Vec<Running> {
    let place = |name: String, cell, vcpus, memory_bytes, borrowed| Running {
        name,
        cell,
        share: VmShare { vcpus, memory_bytes },
        borrowed,
    };
    if record.span.is_empty() {
        let (vcpus, bytes) = (u32::from(record.spec.cpus), record.spec.memory.0);
        let one = |cell| place(record.name.clone(), cell, vcpus, bytes, record.borrowed.clone());
        return record.cell.map(one).into_iter().collect();
    }
    // Each cell gave room for a copy of all of it, if the memory is coherent.
    let copy_bytes = record.spec.is_coherent().then_some(record.spec.memory.0);
    let numbered = record.span.iter().enumerate();
    numbered
        .map(|(number, part)| {
            let name = part_name(&record.name, number);
            let vcpus = part.vcpus.len() as u32;
            // Parts borrow nothing.
            let memory_bytes = copy_bytes.unwrap_or(part.memory_bytes);
            place(name, part.cell, vcpus, memory_bytes, Vec::new())
        })
        .collect()
}

/// What comes after an event.
#[derive(Debug, PartialEq)]
enum Next {
    GoOn,
    End,
    /// Another cell takes this one for dead, so it has to be one.
    StartAnew(String),
}

struct Cell {
    own: CellFiles,
    files: Files,
    state: State,
    contacts: Contacts<Sending>,
    clients: BTreeMap<Client, UnixStream>,
    /// The cells of other hosts.
    elsewhere: Option<Elsewhere>,
    /// There is a tick to come.
    ticking: bool,
    events: Sender<Event>,
}

/// The cells of other hosts, and who says which of them live.
#[derive(Clone)]
struct Elsewhere {
    hosts: Hosts,
    /// Of them, those that lived when this one joined.
    members: Arc<Vec<CellId>>,
    suspects: Sender<CellId>,
}

impl Elsewhere {
    fn start(
        hosts: Hosts,
        listener: TcpListener,
        membership: Membership,
        calling: &Arc<Calling>,
        events: &Sender<Event>,
    ) -> io::Result<Self> {
        let of_others = |(number, life): (&u16, &u32)| {
            hosts.site.is_elsewhere(*number).then_some(CellId {
                number: *number,
                life: *life,
            })
        };
        let members = Arc::new(membership.members.iter().filter_map(of_others).collect());
        let (suspects, suspected) = mpsc::channel();
        let changed = events.clone();
        std::thread::Builder::new()
            .name("membership".into())
            .spawn(move || membership.run(&suspected, |news| _ = changed.send(Event::Changed(news))))?;
        let (taking, calling, linked) = (hosts.clone(), calling.clone(), events.clone());
        std::thread::Builder::new().name("hosts".into()).spawn(move || {
            taking.take(&listener, &calling, move |link| {
                _ = linked.send(Event::Linked(Box::new(link)));
            });
        })?;
        Ok(Self {
            hosts,
            members,
            suspects,
        })
    }

    /// Calls every cell that lived when this one joined. Those that are calling this one just now.
    fn call_all(&self, me: CellId, calling: &Calling, linked: &impl Fn(Link)) -> Vec<u16> {
        let mut crossed = Vec::new();
        for cell in self.members.iter() {
            match self.hosts.call(me, cell.number, calling) {
                Ok(Some(link)) => linked(link),
                Ok(None) => crossed.push(cell.number),
                // One of the two is cut off.
                Err(error) => {
                    eprintln!("cell {cell}: {error}");
                    let _ = self.suspects.send(*cell);
                }
            }
        }
        crossed
    }
}

impl Cell {
    fn take(&mut self, event: Event) -> Next {
        let acts = match event {
            Event::Linked(link) => self.linked(*link),
            Event::Called(awaited) => {
                self.contacts.wait_for(awaited);
                Vec::new()
            }
            Event::Waited => {
                self.contacts.wait_for([]);
                Vec::new()
            }
            Event::Heard(from, message) => self.state.heard(from, message),
            Event::Dead(cell) => {
                self.parted(cell);
                self.give_up(cell)
            }
            Event::Came(client, stream) => {
                self.clients.insert(client, stream);
                Vec::new()
            }
            Event::Asked(client, ask) => {
                let acts = self.state.asked(client, ask);
                self.watch(client);
                acts
            }
            Event::Overdue(client, then) => {
                let silent = self.state.silent_since(client, &then);
                let acts = silent.into_iter().flat_map(|cell| self.give_up(cell)).collect();
                self.watch(client);
                acts
            }
            Event::HelloDue(cell) if self.state.is_unheard(cell) => self.give_up(cell),
            Event::HelloDue(_) => Vec::new(),
            Event::Parted(cell, ran) => {
                let other = self.files.cell(cell.number);
                let runs = other.runs() && other.life() == cell.life;
                match self.contacts.parted(cell, runs, ran) {
                    Parted::Settled => {}
                    Parted::LooksAlive => _ = later(LOOK_AFTER, Event::Parted(cell, true), &self.events),
                    Parted::StartsAnew => {
                        return Next::StartAnew(format!("cell {cell} takes this one for dead"));
                    }
                }
                Vec::new()
            }
            Event::Gone(client) => {
                self.clients.remove(&client);
                self.state.gone(client)
            }
            Event::OrphansLate => self.state.give_up_orphans(),
            Event::Tick => {
                self.ticking = false;
                self.state.tick()
            }
            Event::Changed(News::Outcast) => {
                return Next::StartAnew("the other hosts take this cell for dead".to_owned());
            }
            Event::Changed(news) => self
                .contacts
                .over(news)
                .map_or_else(Vec::new, |cell| self.dead(cell)),
        };
        let mut ends = self.act(acts);
        if self.contacts.has_met() {
            let acts = self.state.met();
            ends |= self.act(acts);
        }
        if !self.ticking && self.state.needs_tick() {
            self.ticking = later(TICK, Event::Tick, &self.events).is_ok();
        }
        if ends { Next::End } else { Next::GoOn }
    }

    /// There is no more to be had from a cell. One of another host is dead only when all agree.
    fn give_up(&mut self, cell: CellId) -> Vec<Act> {
        if self.contacts.has(cell) {
            eprintln!("no link to cell {cell}");
        }
        match self.contacts.give_up(cell) {
            Verdict::Dead => self.dead(cell),
            Verdict::Suspect => {
                if let Some(elsewhere) = &self.elsewhere {
                    let _ = elsewhere.suspects.send(cell);
                }
                Vec::new()
            }
        }
    }

    /// A cell has ended its link: looks in a moment whether it died, or takes this one for dead.
    fn parted(&self, cell: CellId) {
        if self.contacts.looks_after(cell) {
            let _ = later(LOOK_AFTER, Event::Parted(cell, false), &self.events);
        }
    }

    /// Looks after a while whether a client's question is still not answered.
    fn watch(&self, client: Client) {
        let awaited = self.state.awaited(client);
        if !awaited.is_empty() {
            // Without a thread to spare nobody is hurried.
            let _ = later(WORD_LIMIT, Event::Overdue(client, awaited), &self.events);
        }
    }

    fn linked(&mut self, link: Link) -> Vec<Act> {
        let peer = link.peer;
        if self.contacts.is_outlived(peer) {
            return Vec::new();
        }
        let Link {
            way,
            sending,
            receiving,
            ..
        } = link;
        let (heard, dead) = (self.events.clone(), self.events.clone());
        let reader = std::thread::Builder::new()
            .name(format!("from {peer}"))
            .spawn(move || {
                // The main thread ends with the process.
                receiving.run(|message| _ = heard.send(Event::Heard(peer, message)));
                let _ = dead.send(Event::Dead(peer));
            });
        if reader.is_err() {
            return Vec::new();
        }
        eprintln!("linked to cell {peer} by {way}");
        self.contacts.linked(peer, sending);
        let _ = later(HELLO_LIMIT, Event::HelloDue(peer), &self.events);
        // It may know of VMs here that nobody has.
        let _ = later(ORPHANS_LIMIT, Event::OrphansLate, &self.events);
        self.state.linked(peer)
    }

    fn dead(&mut self, cell: CellId) -> Vec<Act> {
        eprintln!("cell {cell} is dead");
        self.state.dead(cell)
    }

    fn act(&mut self, mut acts: Vec<Act>) -> bool {
        while !acts.is_empty() {
            let mut next = Vec::new();
            for act in acts {
                match act {
                    Act::Send(to, message) => {
                        let link = self.contacts.link(to);
                        let sent = link.map(|link| link.send(&message));
                        if let Some(Err(error)) = &sent {
                            eprintln!("cell {to}: {error}");
                            if error.kind() == io::ErrorKind::BrokenPipe {
                                self.parted(to);
                            }
                            next.extend(self.give_up(to));
                        }
                        if !matches!(sent, Some(Ok(()))) {
                            next.extend(self.state.unsent(to, message));
                        }
                    }
                    Act::Keep(lent) => {
                        if let Err(error) = self.own.keep_lent(&lent) {
                            // What follows must not be done; nothing of it is known if this process ends here.
                            eprintln!("what is lent cannot be put in writing: {error}");
                            std::process::exit(1);
                        }
                    }
                    Act::Answer(client, answer) => self.answer(client, &answer),
                    Act::End => return true,
                }
            }
            acts = next;
        }
        false
    }

    fn answer(&mut self, client: Client, answer: &Answer) {
        let Some(stream) = self.clients.get_mut(&client) else {
            return;
        };
        if let Ok(mut line) = serde_json::to_vec(answer) {
            line.push(b'\n');
            // A client that does not read its answer has gone, and is seen to.
            let _ = stream.write_all(&line);
        }
    }
}

/// A socket in the place of what a dead process left.
fn fresh(path: &Path) -> io::Result<UnixListener> {
    let _ = std::fs::remove_file(path);
    bind(path)
}

fn take_calls(listener: UnixListener, calls: &Calls, events: &Sender<Event>) -> io::Result<()> {
    let (calls, events) = (calls.clone(), events.clone());
    std::thread::Builder::new()
        .name("calls".into())
        .spawn(move || calls.take(&listener, |link| _ = events.send(Event::Linked(Box::new(link)))))?;
    Ok(())
}

fn call_others(
    files: Files,
    calls: Calls,
    elsewhere: Option<Elsewhere>,
    calling: Arc<Calling>,
    events: &Sender<Event>,
) -> io::Result<()> {
    let events = events.clone();
    std::thread::Builder::new().name("caller".into()).spawn(move || {
        let linked = |link| _ = events.send(Event::Linked(Box::new(link)));
        let mut crossed = calls.call_all(&files, &linked).unwrap_or_default();
        if let Some(elsewhere) = elsewhere {
            crossed.extend(elsewhere.call_all(calls.me, &calling, &linked));
        }
        let _ = events.send(Event::Called(crossed.into_iter().collect()));
        std::thread::sleep(CROSSED_LIMIT);
        let _ = events.send(Event::Waited);
    })?;
    Ok(())
}

fn later(time: Duration, event: Event, events: &Sender<Event>) -> io::Result<()> {
    let events = events.clone();
    std::thread::Builder::new().name("later".into()).spawn(move || {
        std::thread::sleep(time);
        let _ = events.send(event);
    })?;
    Ok(())
}

fn take_clients(listener: UnixListener, events: &Sender<Event>) -> io::Result<()> {
    let events = events.clone();
    std::thread::Builder::new()
        .name("clients".into())
        .spawn(move || {
            for (client, stream) in (0..).zip(listener.incoming().flatten()) {
                let events = events.clone();
                // A host without threads to spare loses this client, not the cell.
                let _ = std::thread::Builder::new().name("client".into()).spawn(move || {
                    // Nobody listens any more when the process ends.
                    let _ = read_client(client, stream, &events);
                    let _ = events.send(Event::Gone(client));
                });
            }
        })?;
    Ok(())
}

/// Passes on what a client asks, until it makes no sense or ends.
fn read_client(client: Client, stream: UnixStream, events: &Sender<Event>) -> io::Result<()> {
    stream.set_write_timeout(Some(Duration::from_secs(2)))?;
    let mut lines = BufReader::new(stream.try_clone()?);
    let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
    events.send(Event::Came(client, stream)).map_err(gone)?;
    loop {
        let mut line = String::new();
        if Read::take(&mut lines, LINE_BYTES_MAX).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let ask = serde_json::from_str(&line)?;
        events.send(Event::Asked(client, ask)).map_err(gone)?;
    }
}

#[cfg(test)]
mod tests;
