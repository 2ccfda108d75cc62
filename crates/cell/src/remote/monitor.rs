//! The monitor of a VM's part on a host that is not its home's: holds the part's place, starts its shard at
//! each boot, and passes orders and reports between the shard and the home's monitor. It ends with the
//! control connection.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use config::VmSpec;
use config::cluster::SpanTransport;
use keeper::client::Keeper;
use keeper::limits::Limits;
use keeper::spawn::Namespaces;
use protocol::CellId;
use registry::cluster::files::Files;
use registry::cluster::interface::shard_name;
use registry::vms::{Entry, Record, Registry, State};
use shard_api::Platform;
use shard_api::chain::chain;
use shard_api::launch::{
    Answer, CoherenceLaunch, Fd, LaneSockets, Launch, Order, SandboxPolicy, SecondaryLaunch, ShardChannels,
    ShardMemory, SharedLanes, SpanLaunch,
};
use shard_api::message::ReceiveError;
use shard_api::platform::HostProcessor;

use super::connections::{Connections, connect, connect_first, receive};
use super::host;
use super::part::is_awaited;
use super::protocol::{
    Endpoint, Ends, FromPart, HostRequest, LaneEnds, OF_PART, Other, PartAnswer, PartRequest, PartStart,
    Role, ToPart,
};
use super::reports::{AwaitedAnswers, tell, watch};
use super::shared_memory::SlotResult;
use crate::affinity;
use crate::cluster::hosts::Hosts;
use crate::cluster::link::stream::beating;
use crate::cluster::reservation::{Reservation, begin_part};
use crate::coherence::{self, pipes_of, without_memory};
use crate::control_group::ControlGroup;
use crate::identity::{Given, IdOwner};
use crate::monitor::raise_file_limit;
use crate::programs::{ProgramError, Programs};
use crate::shard_log::ShardLog;
use crate::shard_process::ACKNOWLEDGEMENT_LIMIT;
use crate::shard_process::{self, ShardProcess};

/// Time limit for the home to connect after its part has a place.
const HOME_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for the other shards' monitors to connect.
const LINKS_LIMIT: Duration = Duration::from_secs(10);
/// Interval between two checks of the place.
const LOOK: Duration = Duration::from_millis(200);
/// Maximum length of the home's request, in bytes.
const REQUEST_BYTES_MAX: u64 = 1 << 20;

/// Runs the monitor of the part that the request on `asked` describes, until the part has ended. `platform`
/// describes the processor; `programs` starts shards.
///
/// # Errors
/// If the request is invalid.
pub fn run(
    mut asked: UnixStream,
    platform: Platform,
    programs: Result<Programs, ProgramError>,
) -> io::Result<()> {
    raise_file_limit()?;
    let request = OF_PART.read(&io::read_to_string(io::Read::take(&asked, REQUEST_BYTES_MAX))?);
    let request = request.map_err(|error| error.to_string());
    let programs = programs.map_err(|error| error.to_string());
    let held = request.and_then(|request| Held::take(request, platform, programs?));
    let (answer, held) = match held {
        Ok(held) => (
            PartAnswer::Holds {
                port: held.connections.port(),
                processor: held.processor.clone(),
                versions: OF_PART.versions,
            },
            Some(held),
        ),
        Err(why) => (PartAnswer::Refused { why }, None),
    };
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    asked.write_all(&line)?;
    drop(asked);
    held.map_or(Ok(()), Held::serve)
}

/// A part with its place.
struct Held {
    request: PartRequest,
    programs: Programs,
    hosts: Hosts,
    connections: Connections,
    namespaces: Namespaces,
    group: Option<ControlGroup>,
    kvm: File,
    processor: HostProcessor,
    entry: Entry,
    log: Arc<ShardLog>,
    record: Record,
    reservation: Reservation,
    lister: host::VcpuLister,
    /// The number of this part among those that this host has had.
    number: u32,
}

/// An event of the monitor.
enum Event {
    Told(ToPart),
    /// The connection to the home has ended.
    Alone,
    /// The shard's process has ended.
    Gone,
}

impl Held {
    /// Takes all resources that the part needs of this host; an error is one line.
    fn take(request: PartRequest, platform: Platform, programs: Programs) -> Result<Self, String> {
        let line = |error: &dyn std::error::Error| chain(error);
        let files = Files::open().map_err(|error| line(&error))?;
        let site = files.site().map_err(|error| line(&error))?;
        let site =
            site.ok_or("no cluster of several hosts is up here; start it with `mirrorball cluster up`")?;
        let hosts = Hosts::open(site).map_err(|error| line(&error))?;
        let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm");
        let kvm = kvm.map_err(|error| {
            format!("KVM /dev/kvm: {error}; load the kvm module, or join the group `kvm`")
        })?;
        let processor = (platform.processor)().map_err(|error| line(&error))?;
        let (cell, part) = (request.cell, usize::from(request.part));
        let (vcpus, bytes) = (request.spec.cpus, request.spec.memory.0);
        let reservation = begin_part(&request.vm, part, cell, vcpus, bytes).map_err(|error| line(&error))?;
        reservation.settle().map_err(|error| line(&error))?;
        let registry = Registry::of_secondary_shards().map_err(|error| line(&error))?;
        let entry = registry.claim(&format!("{}.{part}", request.vm));
        let entry = entry.map_err(|error| line(&error))?;
        let number = registry.next_cid().map_err(|error| line(&error))?;
        let record = record(&request);
        entry.write(&record).map_err(|error| line(&error))?;
        let log = ShardLog::create(&entry.folder().join("shard.log")).map_err(|error| line(&error))?;
        log.begin_to_read().map_err(|error| line(&error))?;
        // The disks are the home's.
        let spec = VmSpec {
            io_limit: None,
            ..request.spec.clone()
        };
        let owner = std::process::id();
        let group = ControlGroup::of(&request.vm, owner, &spec, std::iter::empty());
        let group = group.map_err(|error| line(&error))?;
        let connections = Connections::listen(hosts.clone(), &request).map_err(|error| line(&error))?;
        Ok(Self {
            namespaces: Namespaces::probe(),
            request,
            programs,
            hosts,
            connections,
            group,
            kvm,
            processor,
            entry,
            log: Arc::new(log),
            record,
            reservation,
            lister: host::VcpuLister::default(),
            number,
        })
    }

    /// Carries out the home's orders until there are no further ones. Nothing of the part is left when it
    /// returns.
    fn serve(mut self) -> io::Result<()> {
        let (events, happened) = mpsc::channel();
        let home = self.listen(&events);
        let mut shard: Option<Arc<ShardProcess>> = None;
        let served = match &home {
            Ok(home) => self.obey(home, &happened, &events, &mut shard),
            Err(error) => Err(error.kind().into()),
        };
        // In any case the shard ends: its watcher has it, too, and would let it run on in a place that is
        // another VM's by then.
        shard.iter().for_each(|shard| _ = shard.kill());
        drop(self.entry);
        self.reservation.leave();
        // The end of the connection reports to the home that all of the part has ended.
        drop(home);
        served
    }

    /// Accepts the home's connection, and turns its messages into events.
    fn listen(&self, events: &Sender<Event>) -> io::Result<Arc<Mutex<UnixStream>>> {
        let socket = UnixStream::from(self.connections.take(Role::Control, HOME_LIMIT)?);
        let silence = Duration::from_millis(self.hosts.site().silence_ms);
        let peer = CellId {
            number: self.request.cell,
            life: 0,
        };
        let (sending, incoming) = beating(peer, socket, silence)?;
        let events = events.clone();
        std::thread::Builder::new().name("home".into()).spawn(move || {
            let mut incoming = BufReader::new(incoming);
            while let Ok(told) = receive(&mut incoming) {
                if events.send(Event::Told(told)).is_err() {
                    return;
                }
            }
            let _ = events.send(Event::Alone);
        })?;
        Ok(sending)
    }

    /// Handles events, until there are no further ones; the shard may still run then.
    fn obey(
        &mut self,
        home: &Arc<Mutex<UnixStream>>,
        happened: &mpsc::Receiver<Event>,
        events: &Sender<Event>,
        shard: &mut Option<Arc<ShardProcess>>,
    ) -> io::Result<()> {
        // The deadline of a shard that was ordered to end.
        let mut deadline: Option<Instant> = None;
        let mut awaited = Arc::<AwaitedAnswers>::default();
        loop {
            let event = match happened.recv_timeout(LOOK) {
                Ok(event) => event,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    if self.reservation.lost() {
                        let why = format!(
                            "cell {}, which it spans, is lost; see `mirrorball cluster status`",
                            self.request.cell
                        );
                        tell(home, &FromPart::Lost(why))?;
                    }
                    if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                        shard.iter().for_each(|shard| _ = shard.kill());
                    }
                    continue;
                }
            };
            match event {
                Event::Told(ToPart::Start(start)) if shard.is_none() => match self.start(&start) {
                    Ok(process) => {
                        let process = Arc::new(process);
                        self.note(Some(process.pid));
                        awaited = Arc::default();
                        let gone = events.clone();
                        let gone = move || drop(gone.send(Event::Gone));
                        watch(process.clone(), home.clone(), awaited.clone(), gone)?;
                        *shard = Some(process);
                    }
                    Err(why) => tell(home, &FromPart::Gone(why))?,
                },
                Event::Told(ToPart::Start(_)) => return Err(io::ErrorKind::InvalidData.into()),
                Event::Told(ToPart::Order(order)) => {
                    // At the end of a boot the home orders all shards to end, running or not: the next boot's
                    // shard is not meant.
                    if order == Order::Quit && shard.is_some() {
                        // It has no disks, so there is nothing that it could have to write.
                        deadline = Some(Instant::now() + ACKNOWLEDGEMENT_LIMIT);
                    }
                    // A shard that is gone is reported by its watcher.
                    let told = shard.as_ref().map(|shard| awaited.order(shard, &order));
                    if is_awaited(&order) && !matches!(told, Some(Ok(()))) {
                        let why = "it is not running just now".to_owned();
                        tell(home, &FromPart::Answered(Answer::Refused { why }))?;
                    }
                }
                Event::Told(ToPart::OfHost { number, request }) => {
                    self.act_on_host(
                        home,
                        number,
                        request,
                        shard.as_ref().map(|shard| (shard, &awaited)),
                    )?;
                }
                Event::Gone => {
                    self.note(None);
                    (*shard, deadline) = (None, None);
                }
                Event::Told(ToPart::Leave) | Event::Alone => return Ok(()),
            }
        }
    }

    /// Carries out a request about this host, and answers it.
    ///
    /// # Errors
    /// If the connection to the home has ended, or this process has no threads left.
    fn act_on_host(
        &mut self,
        home: &Arc<Mutex<UnixStream>>,
        number: u64,
        request: HostRequest,
        running: Option<(&Arc<ShardProcess>, &Arc<AwaitedAnswers>)>,
    ) -> io::Result<()> {
        let cell = self.request.cell;
        let done = match (request, running) {
            (HostRequest::Vcpus, Some((shard, awaited))) => {
                return self.lister.begin(home, number, cell, shard, awaited);
            }
            (HostRequest::Pin { vcpu, cpus }, Some((shard, _))) => {
                affinity::pin(shard.pid, vcpu, &cpus, Some(cell))
            }
            (HostRequest::Vcpus | HostRequest::Pin { .. }, None) => {
                Err(io::Error::other("it is not running just now"))
            }
            (HostRequest::Limit(limits), running) => {
                let shard = running.map(|(shard, _)| shard.pid);
                let spec = limits.applied_to(&self.record.spec);
                let limited = host::limit(&mut self.group, &self.request.vm, &spec, shard);
                limited.map(|()| self.record.spec = spec)
            }
        };
        host::answer(home, number, done)
    }

    /// Records the process of the shard.
    fn note(&self, shard_pid: Option<i32>) {
        // The entry is for people, and for cells that start anew, which don't need it.
        let _ = self.entry.write(&Record {
            shard_pid,
            ..self.record.clone()
        });
    }

    /// Starts the shard of one boot; an error is one line.
    fn start(&self, start: &PartStart) -> Result<ShardProcess, String> {
        self.connections.begin(start.boot);
        let failed = |error: io::Error| error.to_string();
        let namespaces = match start.sandbox {
            SandboxPolicy::Off => &Namespaces::none(),
            _ => &self.namespaces,
        };
        let log = self.log.clone();
        let vm = &self.request.vm;
        // The keeper has the CPUs and the nodes of this thread, and the shard has those of the keeper.
        let keeper = Keeper::start(self.programs.keeper.file().as_fd(), vm).map_err(failed)?;
        let start_of_shard = shard_process::Start {
            keeper: &Arc::new(keeper),
            program: &self.programs.shard,
            name: vm,
            file_bytes: Limits::new(start.memory.bytes, 0).file_bytes,
            policy: start.sandbox,
            namespaces,
            given: &Given::of(IdOwner::Part(self.number)),
        };
        let process = ShardProcess::start(start_of_shard, log).map_err(failed)?;
        if let Some(group) = &self.group {
            group.add(process.pid).map_err(|error| chain(&error))?;
        }
        coherence::permit_priority(process.pid);
        let mut files: Vec<OwnedFd> = Vec::new();
        let span = self.span(start, &mut files)?;
        let count = files.len();
        let launch = SecondaryLaunch {
            kvm: Fd(count),
            memory: start.memory.clone(),
            span,
            log: Fd(count + 1),
            sandbox: process.sandbox.clone(),
        };
        let mut passed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        passed.extend([self.kvm.as_fd(), process.log.as_fd()]);
        match process.link.launch(&Launch::Secondary(Box::new(launch)), &passed) {
            Err(error @ ReceiveError::TooManyFiles(_)) => Err(format!("{error}; span fewer cells")),
            // A shard that dies at once breaks the socket; its log has the reason.
            _ => Ok(process),
        }
    }
}

impl Held {
    /// The description of the other shards for the shard of one boot, with the connections to them; its files
    /// are added to `files`.
    fn span(&self, start: &PartStart, files: &mut Vec<OwnedFd>) -> Result<SpanLaunch, String> {
        let mut add = |file: OwnedFd| {
            files.push(file);
            Fd(files.len() - 1)
        };
        let shards = start.shares.len();
        let userfaultfd = coherence::userfaultfd().map(&mut add);
        let mut channels = vec![None; shards];
        let mut lanes = vec![vec![None; shards]; usize::from(start.coherence.lanes)];
        let (mut shared, mut notes) = (vec![None; shards], Vec::new());
        for other in &start.others {
            let shard = usize::from(other.shard);
            let place = channels.get_mut(shard).ok_or("a shard too many")?;
            *place = Some(ShardChannels::Stream {
                socket: add(self.meet(start.boot, other, Role::Link)?),
                peer: other.place.clone(),
            });
            for (lane, row) in (0..).zip(&mut lanes) {
                let control = |ends| Role::Coherence(LaneEnds { ends, lane });
                let bulk = |ends| Role::Pages(LaneEnds { ends, lane });
                let control = match lane {
                    0 => {
                        let (socket, found) = self.meet_first(start.boot, other, control)?;
                        match found {
                            Ok(Some(place)) => {
                                // The slot is the shard's from now on.
                                let pipes = pipes_of(&place, start.coherence.lanes.into());
                                let memory = add(place.into_memory().into());
                                shared[shard] = Some(SharedLanes { memory, lanes: pipes });
                            }
                            Ok(None) => {}
                            Err(why) => notes.push(without_memory(&start.coherence.names[shard], &why)),
                        }
                        socket
                    }
                    _ => self.meet(start.boot, other, control)?,
                };
                row[shard] = Some(LaneSockets {
                    control: add(control),
                    bulk: add(self.meet(start.boot, other, bulk)?),
                });
            }
        }
        let share = |bytes: &u64| ShardMemory {
            bytes: *bytes,
            file: None,
            host_nodes: self.reservation.nodes().to_vec(),
        };
        Ok(SpanLaunch {
            shard: self.request.part,
            vcpus: start.vcpus.clone(),
            memory: start.shares.iter().map(share).collect(),
            coherence: Some(CoherenceLaunch {
                userfaultfd,
                lanes,
                names: start.coherence.names.clone(),
                kernel: start.coherence.kernel.clone(),
                shared,
                notes,
                encrypted: self.hosts.site().spans == SpanTransport::Tls,
            }),
            channels,
            tsc: start.tsc,
            cpuid: start.cpuid.clone(),
        })
    }

    /// The connection with another shard for this role: this monitor calls, or accepts the call.
    fn meet(&self, boot: u32, other: &Other, role: impl Fn(Ends) -> Role) -> Result<OwnedFd, String> {
        let met = match self.call(boot, other, role) {
            (Some(reach), role) => connect(&self.hosts, reach, role),
            (None, role) => self.connections.take(role, LINKS_LIMIT),
        };
        met.map_err(|error| format!("no connection with {}: {error}", other.place))
    }

    /// The same for the first connection of their lanes.
    fn meet_first(
        &self,
        boot: u32,
        other: &Other,
        role: impl Fn(Ends) -> Role,
    ) -> Result<(OwnedFd, SlotResult), String> {
        let met = match self.call(boot, other, role) {
            (Some(reach), role) => connect_first(&self.hosts, self.request.cell, reach, role),
            (None, role) => self.connections.take_first(role, LINKS_LIMIT),
        };
        met.map_err(|error| format!("no connection with {}: {error}", other.place))
    }

    /// The endpoint to call, if this monitor calls, and the role of the connection.
    fn call<'a>(
        &self,
        boot: u32,
        other: &'a Other,
        role: impl Fn(Ends) -> Role,
    ) -> (Option<&'a Endpoint>, Role) {
        let (me, shard) = (self.request.part, other.shard);
        let (from, to) = match other.reach {
            Some(_) => (me, shard),
            None => (shard, me),
        };
        (other.reach.as_ref(), role(Ends { boot, from, to }))
    }
}

/// The record, for a cell that starts anew, and for people.
fn record(request: &PartRequest) -> Record {
    let name = shard_name(&request.vm, usize::from(request.part));
    Record {
        state: State::Running,
        cell: Some(request.cell),
        ..Record::new(name, request.spec.clone(), 0)
    }
}
