//! Connections between the hosts of a cluster: links of cells, and commands that one host's user runs on
//! another host.
//!
//! Every connection is a TLS stream whose ends have proven which hosts they are. The caller's first message
//! names its request. Only the hosts in the cluster's file are served, whatever other keys their authority
//! has signed. A host runs only this program for another, as [`super::commands`] decides: a process with the
//! key of a host has the rights of the cells' user on all of them, but for the names of files.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use agent::protocol::ExecRequest;
use config::cluster::{HostPlan, Site};
use hostfiles::passwd::user_of;
use knowledge::route_costs::{SHARED, TLS, choose};
use locks::IgnorePoison;
use nix::unistd::geteuid;
use protocol::CellId;
use serde::{Deserialize, Serialize};
use urpc::tls::{Deadline, Identity, Peer, TlsError, in_days};
use urpc::version::Versions;

use super::callers::{Callers, HANDSHAKE_LIMIT, Unproven};
pub use super::commands::PROGRAM;
use super::commands::{name_rules, prepare};
use super::link::encoding::{decode, encode};
use super::link::shared::{LinkSlot, SharedMemory};
use super::link::{self, CallAnswer, CallTable, Link, MESSAGE_TIMEOUT, VERSIONS, stream};

#[cfg(test)]
mod tests;

/// Maximum number of commands that run for other hosts.
const COMMANDS_MAX: usize = 256;
/// Time before the end of the host's certificate at which warnings begin.
const WARN_BEFORE: Duration = Duration::from_secs(30 * 24 * 3600);

#[derive(Debug, Serialize, Deserialize)]
enum ConnectionPurpose {
    /// A link with a cell.
    Link {
        /// The cell that calls.
        cell: CellId,
        /// The protocol versions of the caller.
        versions: Versions,
        /// The number that the caller has left in memory which both hosts may see.
        number: Option<u64>,
    },
    /// A command of this program.
    Command,
}

/// The reply to a request for channels.
#[derive(Debug, Serialize, Deserialize)]
struct Reply {
    answer: CallAnswer,
    /// Whether the number was found in shared memory.
    is_shared: bool,
}

/// Decodes and encodes a call's first message and a reply to one, for `fuzz/`.
#[cfg(fuzzing)]
pub fn read_again(bytes: &[u8]) -> [Option<Vec<u8>>; 2] {
    let wish = decode::<ConnectionPurpose>(bytes).ok();
    let reply = decode::<Reply>(bytes).ok();
    [
        wish.and_then(|wish| encode(&wish).ok()),
        reply.and_then(|reply| encode(&reply).ok()),
    ]
}

/// The view of this host on the other hosts of its cluster.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// Site of the cluster, shared by all clones: hosts come and go while a cell runs.
    site: Arc<RwLock<Arc<Site>>>,
    memory: Option<SharedMemory>,
    /// Costs of routes between cells, shared by all clones.
    costs: Arc<RwLock<Arc<knowledge::RouteCosts>>>,
    identity: Identity,
}

impl Hosts {
    /// Opens the keys of this host.
    ///
    /// # Errors
    /// [`TlsError::Keys`].
    pub fn open(site: Site) -> Result<Self, TlsError> {
        Ok(Self {
            identity: Identity::load(&site.keys, &site.here)?,
            site: Arc::new(RwLock::new(Arc::new(site))),
            memory: None,
            costs: Arc::new(RwLock::new(Arc::new(knowledge::RouteCosts::of(
                &knowledge::Base::default(),
            )))),
        })
    }

    /// The current site of the cluster.
    pub fn site(&self) -> Arc<Site> {
        self.site.read().ignore_poison().clone()
    }

    /// Replaces the site. A host that is not in it any more is not served.
    pub fn set_site(&self, site: Site) {
        *self.site.write().ignore_poison() = Arc::new(site);
    }

    /// Sets the route costs, which count from the next link on.
    pub fn set_route_costs(&self, costs: Arc<knowledge::RouteCosts>) {
        *self.costs.write().ignore_poison() = costs;
    }

    /// The memory for a link between two cells: none if this host shares none, or the stream is known to be
    /// faster.
    fn memory_between(&self, me: u16, cell: u16) -> Option<&SharedMemory> {
        let memory = self.memory.as_ref()?;
        let costs = self.costs.read().ignore_poison();
        let chosen = choose(&costs.between(me, cell), &[SHARED, TLS]);
        (chosen == Some(SHARED)).then_some(memory)
    }

    /// A line about the host's certificate, if its end is near.
    pub fn warning(&self) -> Option<String> {
        warning(&self.site().here, self.identity.end())
    }

    /// The same, with links through the memory that this host shares with others, if it does.
    ///
    /// # Errors
    /// As [`SharedMemory::open`].
    pub fn with_shared_memory(self) -> io::Result<Self> {
        let memory = SharedMemory::open(&self.site())?;
        Ok(Self { memory, ..self })
    }

    /// Listens on the address of this host's cell.
    ///
    /// # Errors
    /// If the port is taken or the address is not this host's.
    pub fn listen(&self, cell: u16) -> io::Result<TcpListener> {
        let site = self.site();
        let host = site.host_of(cell);
        let address = host.ok_or(io::ErrorKind::NotFound)?.address_of(cell);
        TcpListener::bind(address)
            .map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))
    }

    /// Calls a cell of another host; none if that cell is calling this one at the moment.
    pub fn call(&self, me: CellId, cell: u16, calling: &CallTable) -> io::Result<Option<Link>> {
        calling.during(cell, || {
            let offer = self
                .memory_between(me.number, cell)
                .and_then(|memory| memory.offer(me.number, cell));
            let (place, number) = offer.unzip();
            let wish = ConnectionPurpose::Link {
                cell: me,
                versions: VERSIONS,
                number,
            };
            let mut stream = self.reach(cell, &wish)?;
            stream.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
            let mut bytes = Vec::new();
            stream::read(&mut stream, &mut bytes)?;
            let reply: Reply = decode(&bytes)?;
            match reply.answer.peer().map_err(io::Error::other)? {
                None => Ok(None),
                Some((peer, version)) if peer.number == cell => {
                    let link = self.link(peer, stream, place.filter(|_| reply.is_shared))?;
                    Ok(Some(link.speaking(version)))
                }
                Some(_) => Err(io::ErrorKind::InvalidData.into()),
            }
        })
    }

    /// A connection over which a cell's host runs a command of this program, in the agent's protocol.
    ///
    /// # Errors
    /// If the host can't be reached.
    pub fn command(&self, cell: u16) -> io::Result<UnixStream> {
        self.reach(cell, &ConnectionPurpose::Command)
    }

    /// A connection to `address`, whose peer proves that it is the host `host`.
    ///
    /// # Errors
    /// If the address can't be reached, or is another host's.
    pub(crate) fn connect(&self, address: SocketAddr, host: &str) -> io::Result<UnixStream> {
        let reached = self.identity.connect(address, host, MESSAGE_TIMEOUT);
        reached.map_err(|error| io::Error::new(io::ErrorKind::NotConnected, format!("host {host}: {error}")))
    }

    /// The connection of a caller, and the identity that it has proven.
    ///
    /// # Errors
    /// If it is no host of the cluster's file, or the deadline passes.
    pub(crate) fn accept(&self, tcp: TcpStream, deadline: Deadline) -> io::Result<(UnixStream, Peer)> {
        let (stream, peer) = self.identity.accept(tcp, deadline).map_err(io::Error::other)?;
        // The key of a host that has left the cluster, or etcd's, is of the same authority.
        let is_member = self.site().hosts.iter().any(|host| peer.is(&host.name));
        match is_member {
            true => Ok((stream, peer)),
            false => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    fn reach(&self, cell: u16, wish: &ConnectionPurpose) -> io::Result<UnixStream> {
        let site = self.site();
        let host = site.host_of(cell).ok_or(io::ErrorKind::NotFound)?;
        let mut stream = self.connect(host.address_of(cell), &host.name)?;
        stream::write(&mut stream, &encode(wish)?)?;
        Ok(stream)
    }

    /// Accepts connections until the process ends.
    pub fn take(
        &self,
        listener: &TcpListener,
        calling: &Arc<CallTable>,
        linked: impl Fn(Link) + Clone + Send + 'static,
    ) {
        let (callers, commands) = (Callers::default(), Arc::<AtomicUsize>::default());
        for tcp in listener.incoming().flatten() {
            let Ok(place) = callers.admit(&tcp) else { continue };
            let (hosts, calling, linked) = (self.clone(), calling.clone(), linked.clone());
            let commands = commands.clone();
            // A slow caller blocks no other one. A caller that breaks the protocol is dropped.
            let _ = std::thread::Builder::new().name("caller".into()).spawn(move || {
                if let Ok(Some(link)) = hosts.take_one(tcp, place, &calling, &commands) {
                    linked(link);
                }
            });
        }
    }

    /// Serves a caller. `commands` counts the commands that run.
    fn take_one(
        &self,
        tcp: TcpStream,
        place: Unproven,
        calling: &CallTable,
        commands: &AtomicUsize,
    ) -> io::Result<Option<Link>> {
        let deadline = Deadline::after(HANDSHAKE_LIMIT);
        let (mut stream, peer) = self.accept(tcp, deadline)?;
        let mut bytes = Vec::new();
        stream::read(&mut deadline.over(&stream), &mut bytes)?;
        stream.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        drop(place);
        match decode(&bytes)? {
            ConnectionPurpose::Link {
                cell,
                versions,
                number,
            } if self.is_of(&peer, cell.number) => {
                let answer = calling.answer(cell, versions);
                let CallAnswer::Welcome { cell: me, .. } = answer else {
                    reply(&mut stream, answer, false)?;
                    return Ok(None);
                };
                let memory = self.memory_between(me.number, cell.number).zip(number);
                let place = memory.and_then(|(memory, number)| memory.accept(me.number, cell.number, number));
                reply(&mut stream, answer, place.is_some())?;
                let version = link::agree(versions, cell).map_err(io::Error::other)?;
                let link = self.link(cell, stream, place)?;
                Ok(Some(link.speaking(version)))
            }
            ConnectionPurpose::Link { .. } => Err(io::ErrorKind::PermissionDenied.into()),
            ConnectionPurpose::Command => {
                let served = if commands.fetch_add(1, Ordering::Relaxed) < COMMANDS_MAX {
                    run_command(stream, &self.site())
                } else {
                    Err(io::ErrorKind::QuotaExceeded.into())
                };
                commands.fetch_sub(1, Ordering::Relaxed);
                served.map(|()| None)
            }
        }
    }

    /// Whether a cell is on the host that the other side has proven to be.
    fn is_of(&self, peer: &Peer, cell: u16) -> bool {
        self.site()
            .host_of(cell)
            .is_some_and(|host: &HostPlan| peer.is(&host.name))
    }

    fn link(&self, peer: CellId, stream: UnixStream, place: Option<LinkSlot>) -> io::Result<Link> {
        let silence = Duration::from_millis(self.site().silence_ms);
        match place {
            Some(place) => place.link(peer, stream, silence),
            None => stream::link(peer, stream, silence),
        }
    }
}

/// A warning about the key of a host or of etcd, if its end is near.
pub fn warning(name: &str, end: SystemTime) -> Option<String> {
    let left = end.duration_since(SystemTime::now()).unwrap_or_default();
    (left < WARN_BEFORE).then(|| {
        format!(
            "the key of {name} ends in {} days; help: run `mirrorball cluster keys FILE --renew` where \
             authority.key is, give each host its new keys, then `mirrorball cluster down --leave` and `up` \
             there",
            in_days(left)
        )
    })
}

fn run_command(stream: UnixStream, site: &Site) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    let own = geteuid().as_raw();
    let prepared = |request: &mut ExecRequest| prepare(request, &name_rules(site), own, user_of);
    agent::server::serve_programs(stream, prepared)
}

fn reply(stream: &mut UnixStream, answer: CallAnswer, is_shared: bool) -> io::Result<()> {
    stream::write(stream, &encode(&Reply { answer, is_shared })?)
}
