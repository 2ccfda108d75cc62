//! The connections of one VM's part on another host: made by [`connect`], accepted by [`Connections`].
//!
//! Each is a TLS stream whose ends have proven which hosts they are, as the links of cells. A thread of the
//! monitor that has it encrypts, so a shard receives a plain socket without keys. Where the cluster's file
//! has `spans = "plain"`, the connections of shards are plain TCP: only the first message, with the part's
//! token, identifies the caller.

use std::collections::{HashMap, HashSet};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use config::cluster::SpanTransport;
use locks::IgnorePoison;
use serde::Serialize;
use serde::de::DeserializeOwned;
use urpc::tls::Deadline;

use super::clock;
use super::protocol::{Endpoint, Ends, Hello, LaneEnds, PartRequest, Role};
use super::shared_memory::{LanesError, Offer, ShmSlot, SlotResult};
use crate::cluster::callers::{Callers, HANDSHAKE_LIMIT, Unproven};
use crate::cluster::hosts::Hosts;
use crate::cluster::link::{MESSAGE_TIMEOUT, stream};
use crate::remote::shared_memory::LANES_MAX;

/// Maximum number of a part's connections in one boot: control, clock, and with each other part a link and
/// two for each lane.
const ADMITTED_MAX: usize = 2 + 63 * (1 + 2 * LANES_MAX);
/// The first byte of a connection without TLS; that of a connection with TLS is 22.
const PLAIN: u8 = b'p';

impl Role {
    /// Whether it carries data of shards.
    fn is_data(self) -> bool {
        self != Self::Control
    }

    /// Whether it is of an earlier boot.
    fn is_before(self, boot: u32) -> bool {
        match self {
            Self::Control => false,
            Self::Clock(of) => of < boot,
            Self::Link(ends) => ends.boot < boot,
            Self::Coherence(of) | Self::Pages(of) => of.ends.boot < boot,
        }
    }
}

/// Connects to a part's monitor. Reads of the socket have no time limit, except for the clock.
pub fn connect(hosts: &Hosts, to: &Endpoint, role: Role) -> io::Result<OwnedFd> {
    call(hosts, to, role, None).map(|(socket, _)| socket)
}

/// The same for the first connection of the lanes of two shards, which finds out the memory that the hosts
/// share. This one is in cell `me`.
pub fn connect_first(hosts: &Hosts, me: u16, to: &Endpoint, role: Role) -> io::Result<(OwnedFd, SlotResult)> {
    let shared = ShmSlot::hold(&hosts.site(), me, to.cell);
    let place = shared.as_ref().ok().and_then(Option::as_ref);
    let offer = place.map(|place| place.offer(me)).transpose()?;
    let (socket, is_shared) = call(hosts, to, role, offer)?;
    let shared = match (offer, is_shared) {
        (Some(_), false) => Err(LanesError::NotSeen(to.to_string())),
        _ => shared,
    };
    Ok((socket, shared))
}

/// Returns the socket, and whether the offered memory is shared.
fn call(hosts: &Hosts, to: &Endpoint, role: Role, offer: Option<Offer>) -> io::Result<(OwnedFd, bool)> {
    let failed = |error: io::Error| io::Error::new(error.kind(), format!("{to}: {error}"));
    let hello = Hello {
        token: to.token,
        role,
        offer,
    };
    let patience = matches!(role, Role::Clock(_)).then_some(MESSAGE_TIMEOUT);
    if role.is_data() && hosts.site().spans == SpanTransport::Plain {
        let mut tcp = TcpStream::connect_timeout(&to.address, MESSAGE_TIMEOUT).map_err(failed)?;
        let mut greet = || {
            tcp.set_nodelay(true)?;
            limit(&tcp, Some(MESSAGE_TIMEOUT))?;
            tcp.write_all(&[PLAIN])?;
            send(&mut tcp, &hello)?;
            let is_shared = welcome(&mut tcp)?;
            limit(&tcp, patience)?;
            Ok(is_shared)
        };
        let is_shared = greet().map_err(failed)?;
        return Ok((tcp.into(), is_shared));
    }
    let mut socket = hosts.connect(to.address, &to.host)?;
    let mut greet = || {
        socket.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        send(&mut socket, &hello)?;
        let is_shared = welcome(&mut socket)?;
        socket.set_read_timeout(patience)?;
        Ok(is_shared)
    };
    let is_shared = greet().map_err(failed)?;
    Ok((socket.into(), is_shared))
}

/// The connections to a part's monitor.
#[derive(Debug)]
pub struct Connections {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    hosts: Hosts,
    request: PartRequest,
    arrived: Mutex<Arrived>,
    changed: Condvar,
    callers: Callers,
}

#[derive(Debug, Default)]
struct Arrived {
    /// Connections that were not taken yet.
    waiting: HashMap<Role, (OwnedFd, SlotResult)>,
    /// Roles of the connections that were admitted in this boot.
    admitted: HashSet<Role>,
    boot: u32,
}

impl Connections {
    /// Accepts connections at this host's address until the process ends.
    pub fn listen(hosts: Hosts, request: &PartRequest) -> io::Result<Self> {
        let site = hosts.site();
        let host = site.host_of(request.cell).ok_or(ErrorKind::NotFound)?;
        let listener = TcpListener::bind(SocketAddr::new(host.address.ip(), 0))?;
        let shared = Arc::new(Shared {
            hosts,
            request: request.clone(),
            arrived: Mutex::default(),
            changed: Condvar::new(),
            callers: Callers::default(),
        });
        let port = listener.local_addr()?.port();
        let taking = shared.clone();
        std::thread::Builder::new()
            .name("connections".into())
            .spawn(move || Shared::take_all(&taking, &listener))?;
        Ok(Self { port, shared })
    }

    /// The port at which it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Begins a boot: connections of earlier ones come too late.
    pub fn begin(&self, boot: u32) {
        let mut arrived = self.shared.lock();
        arrived.boot = boot;
        arrived.waiting.retain(|role, _| !role.is_before(boot));
        arrived.admitted.retain(|role| !role.is_before(boot));
    }

    /// Waits for a connection, and takes it.
    ///
    /// # Errors
    /// `TimedOut` when none has come within the limit.
    pub fn take(&self, role: Role, limit: Duration) -> io::Result<OwnedFd> {
        self.take_first(role, limit).map(|(socket, _)| socket)
    }

    /// The same for the first connection of the lanes of two shards ([`connect_first`]).
    ///
    /// # Errors
    /// `TimedOut` when none has come within the limit.
    pub fn take_first(&self, role: Role, limit: Duration) -> io::Result<(OwnedFd, SlotResult)> {
        let deadline = Instant::now() + limit;
        let mut arrived = self.shared.lock();
        loop {
            if let Some(taken) = arrived.waiting.remove(&role) {
                return Ok(taken);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            let waited = self.shared.changed.wait_timeout(arrived, left);
            arrived = waited.ignore_poison().0;
        }
    }
}

impl Shared {
    fn take_all(shared: &Arc<Self>, listener: &TcpListener) {
        for tcp in listener.incoming().flatten() {
            let Ok(place) = shared.callers.admit(&tcp) else {
                continue;
            };
            let own = shared.clone();
            // A caller that breaks the protocol, or is not allowed here, is dropped.
            let caller = move || drop(own.take_one(tcp, place));
            let _ = std::thread::Builder::new().name("caller".into()).spawn(caller);
        }
    }

    fn take_one(&self, mut tcp: TcpStream, place: Unproven) -> io::Result<()> {
        let deadline = Deadline::after(HANDSHAKE_LIMIT);
        let mut first = [0];
        tcp.set_read_timeout(Some(deadline.left()?))?;
        tcp.peek(&mut first)?;
        if first == [PLAIN] {
            tcp.set_nodelay(true)?;
            let mut timed = deadline.over(&tcp);
            timed.read_exact(&mut first)?;
            let hello: Hello = receive(&mut timed)?;
            let is_allowed = hello.role.is_data() && self.hosts.site().spans == SpanTransport::Plain;
            self.admit(&hello, is_allowed)?;
            drop(place);
            limit(&tcp, Some(MESSAGE_TIMEOUT))?;
            let shared = self.shared(&hello);
            answer(&mut tcp, &shared)?;
            limit(&tcp, None)?;
            if let Role::Clock(_) = hello.role {
                return clock::answer(tcp);
            }
            self.keep(hello.role, tcp.into(), shared);
            return Ok(());
        }
        let (mut socket, peer) = self.hosts.accept(tcp, deadline)?;
        let hello: Hello = receive(&mut deadline.over(&socket))?;
        let is_allowed = match hello.role {
            Role::Control => peer.is(&self.request.home),
            _ => self.hosts.site().spans == SpanTransport::Tls,
        };
        self.admit(&hello, is_allowed)?;
        drop(place);
        let shared = self.shared(&hello);
        answer(&mut socket, &shared)?;
        socket.set_read_timeout(None)?;
        if let Role::Clock(_) = hello.role {
            return clock::answer(socket);
        }
        self.keep(hello.role, socket.into(), shared);
        Ok(())
    }

    /// Admits a connection. Each is admitted once.
    fn admit(&self, hello: &Hello, is_allowed: bool) -> io::Result<()> {
        let is_mine = |ends: Ends| ends.to == self.request.part && ends.from != ends.to;
        let has_use = match hello.role {
            Role::Control | Role::Clock(_) => true,
            Role::Link(ends) => is_mine(ends),
            Role::Coherence(of) | Role::Pages(of) => is_mine(of.ends) && usize::from(of.lane) < LANES_MAX,
        };
        let mut arrived = self.lock();
        let is_welcome = is_allowed
            && has_use
            && hello.token == self.request.token
            && !hello.role.is_before(arrived.boot)
            && arrived.admitted.len() < ADMITTED_MAX
            && arrived.admitted.insert(hello.role);
        match is_welcome {
            true => Ok(()),
            false => Err(ErrorKind::PermissionDenied.into()),
        }
    }

    /// The memory that an admitted caller offers, if it is on this host too.
    fn shared(&self, hello: &Hello) -> SlotResult {
        match (&hello.offer, hello.role) {
            (Some(offer), Role::Coherence(LaneEnds { lane: 0, .. })) => {
                ShmSlot::accept(&self.hosts.site(), self.request.cell, offer)
            }
            _ => Ok(None),
        }
    }

    fn keep(&self, role: Role, socket: OwnedFd, shared: SlotResult) {
        let mut arrived = self.lock();
        if !role.is_before(arrived.boot) {
            arrived.waiting.insert(role, (socket, shared));
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Arrived> {
        self.arrived.lock().ignore_poison()
    }
}

/// Sends a message in the form of the control connection.
pub fn send(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    stream::write(stream, &serde_json::to_vec(message)?)
}

/// Receives a message; empty ones are heartbeats.
pub fn receive<M: DeserializeOwned>(stream: &mut impl Read) -> io::Result<M> {
    let mut bytes = Vec::new();
    while bytes.is_empty() {
        stream::read(stream, &mut bytes)?;
    }
    Ok(serde_json::from_slice(&bytes)?)
}

/// Reports to the caller that it is admitted, and whether the memory that it offers is shared.
fn answer(stream: &mut impl Write, shared: &SlotResult) -> io::Result<()> {
    send(stream, &matches!(shared, Ok(Some(_))))
}

/// Reads that answer. A caller that is not admitted receives no reason.
fn welcome(stream: &mut impl Read) -> io::Result<bool> {
    match receive(stream) {
        Ok(is_shared) => Ok(is_shared),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(ErrorKind::ConnectionRefused.into()),
        Err(error) => Err(error),
    }
}

fn limit(tcp: &TcpStream, limit: Option<Duration>) -> io::Result<()> {
    tcp.set_read_timeout(limit)?;
    tcp.set_write_timeout(limit)
}
