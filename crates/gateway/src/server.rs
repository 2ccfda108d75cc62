//! The event loop.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use registry::subnet::{HostFacts, Join, Request, Response};
use subnet::filter::Barred;
use subnet::nat::{self, Nat};
use subnet::network::{CardId, MTU_DEFAULT, dns};
use subnet::pcap;
use subnet::resolver::Resolver;

use crate::capture::is_of;
use crate::card::{PACKET_BYTES_MAX, Read};
use crate::client::{Asked, Client, Role};
use crate::dns_stream::{DnsStreams, Outcome};
use crate::joining::{CARDS_MAX, Networks};
use crate::path::{Inward, Paths};
use crate::report;

/// Time without cards after which the gateway ends.
pub const IDLE_LIMIT: Duration = Duration::from_secs(5);
/// Greatest number of frames of one card in a turn, so that a card that floods leaves others their share.
const FRAMES_PER_TURN: usize = 64;
/// Greatest number of events in a turn, and of connections that are accepted in one.
const EVENTS_MAX: usize = 256;
const ACCEPTED_MAX: usize = 16;
/// Greatest number of connections.
const CLIENTS_MAX: usize = CARDS_MAX + 64;
/// Age of the facts of the host after which the gateway requests others, while guests use the outside.
const FACTS_AGE: Duration = Duration::from_secs(1);

/// Kinds of event sources, in the low bits of an event's number. The other bits are the client's number,
/// which its card has, too.
const KIND_BITS: u32 = 2;
const FIXED: u64 = 0;
const CLIENT: u64 = 1;
const CARD: u64 = 2;

/// The gateway.
#[derive(Debug)]
pub struct Gateway {
    epoll: Epoll,
    listener: UnixListener,
    /// The user whose processes may connect.
    owner: u32,
    idle_limit: Duration,
    /// Layers of the sandbox that this process could not apply; none if it has all.
    missing_layers: Option<String>,
    clients: HashMap<u64, Client>,
    next_client: u64,
    networks: Networks,
    paths: Paths,
    dns_streams: DnsStreams,
    /// Addresses that guests without `host` don't reach.
    barred: Rc<RefCell<Barred>>,
    facts: HostFacts,
    facts_time: Instant,
    /// Client that gets the next request for facts.
    next_asked: u64,
    /// Time since when there has been no card.
    idle_since: Option<Instant>,
    buffer: Vec<u8>,
}

impl Gateway {
    /// Creates a gateway that serves processes of the user `owner` on a listening socket. `descriptors` is
    /// the process's limit of them.
    ///
    /// # Errors
    /// If the kernel lacks descriptors.
    pub fn new(listener: UnixListener, owner: u32, descriptors: u64) -> io::Result<Self> {
        let now = Instant::now();
        listener.set_nonblocking(true)?;
        let barred = Rc::new(RefCell::new(Barred::default()));
        let listed = barred.clone();
        let nat = Nat::new(
            nat::Settings {
                limits: nat::Limits::of_descriptors(descriptors),
                mtu: usize::from(MTU_DEFAULT),
                barred: Barred::default(),
                list_addresses: Box::new(move || Some(listed.borrow().clone())),
            },
            now,
        )?;
        let paths = Paths::new(nat, Resolver::new("")?);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, FIXED))?;
        let dns_streams = DnsStreams::new()?;
        for file in [paths.nat.as_fd(), paths.resolver.as_fd(), dns_streams.as_fd()] {
            // Their events are handled in each turn.
            epoll.add(file, EpollEvent::new(EpollFlags::EPOLLIN, 1 << KIND_BITS))?;
        }
        Ok(Self {
            epoll,
            listener,
            owner,
            idle_limit: IDLE_LIMIT,
            missing_layers: None,
            clients: HashMap::new(),
            next_client: 1,
            networks: Networks::default(),
            paths,
            dns_streams,
            barred,
            facts: HostFacts::default(),
            facts_time: now,
            next_asked: 0,
            idle_since: Some(now),
            buffer: vec![0; PACKET_BYTES_MAX + 1],
        })
    }

    /// Changes the time without cards after which the gateway ends.
    pub fn with_idle_limit(mut self, limit: Duration) -> Self {
        self.idle_limit = limit;
        self
    }

    /// Names the layers of the sandbox that this process lacks. Cards of VMs that require all are refused
    /// then.
    pub fn with_missing_layers(mut self, missing: Option<String>) -> Self {
        self.missing_layers = missing;
        self
    }

    /// Serves until there has been no card for the idle limit.
    ///
    /// # Errors
    /// If the kernel does not let it wait.
    pub fn run(&mut self) -> io::Result<()> {
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        loop {
            let timeout = self.timeout(Instant::now());
            let count = match self.epoll.wait(&mut events, timeout) {
                Err(nix::Error::EINTR) => 0,
                waited => waited?,
            };
            let now = Instant::now();
            self.paths.captured.is_on = self
                .clients
                .values()
                .any(|client| matches!(client.role, Role::Capturing { .. }));
            for event in &events[..count] {
                let (kind, number) = (event.data() & ((1 << KIND_BITS) - 1), event.data() >> KIND_BITS);
                match kind {
                    CLIENT => self.serve_client(number, now),
                    CARD => self.serve_card(CardId(number), event.events(), now),
                    _ if number == 0 => self.accept(),
                    _ => {}
                }
            }
            self.paths.turn(now);
            self.serve_dns_streams(now);
            self.deliver(now);
            self.turn_networks(now);
            self.send_captured();
            self.ask_for_facts(now);
            self.update_interests();
            if self.is_over(now) && !self.accept_last() {
                return Ok(());
            }
        }
    }

    fn timeout(&self, now: Instant) -> EpollTimeout {
        let networks = self.networks.networks.values();
        let turns = networks.filter_map(subnet::network::Network::deadline);
        let idle = self.idle_since.map(|since| since + self.idle_limit);
        let outside = self.paths.deadline().into_iter();
        let outside = outside.chain(self.dns_streams.deadline(now));
        let deadline = turns.chain(outside).chain(idle).min();
        let Some(deadline) = deadline else {
            return EpollTimeout::NONE;
        };
        let left = deadline.saturating_duration_since(now);
        // Rounded up, so that the last millisecond is waited for instead of spinning.
        let left = if left.is_zero() {
            left
        } else {
            left + Duration::from_micros(999)
        };
        EpollTimeout::try_from(left).unwrap_or(EpollTimeout::MAX)
    }

    fn is_over(&mut self, now: Instant) -> bool {
        if !self.networks.members.is_empty() {
            self.idle_since = None;
            return false;
        }
        let since = *self.idle_since.get_or_insert(now);
        now.saturating_duration_since(since) >= self.idle_limit
    }

    /// Accepts clients that came at the last moment. Returns whether there are any.
    fn accept_last(&mut self) -> bool {
        let before = self.next_client;
        self.accept();
        let came = self.next_client > before;
        if came {
            self.idle_since = None;
        }
        came
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTED_MAX {
            // A process without descriptors serves the clients that it has.
            let Ok((socket, _)) = self.listener.accept() else {
                return;
            };
            if self.clients.len() < CLIENTS_MAX && self.is_owners(&socket) {
                self.add_client(socket);
            }
        }
    }

    fn is_owners(&self, socket: &UnixStream) -> bool {
        getsockopt(socket, PeerCredentials).is_ok_and(|peer| peer.uid() == self.owner)
    }

    fn add_client(&mut self, socket: UnixStream) {
        let number = self.next_client;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, number << KIND_BITS | CLIENT);
        if self.epoll.add(&socket, event).is_ok() {
            self.next_client += 1;
            self.clients.insert(number, Client::new(socket));
        }
    }

    fn serve_client(&mut self, number: u64, now: Instant) {
        let Some(client) = self.clients.get_mut(&number) else {
            return;
        };
        client.flush();
        match client.read() {
            Ok(requests) => {
                for request in requests {
                    if !self.serve_request(number, request, now) {
                        return self.remove_client(number);
                    }
                }
            }
            Err(_) => self.remove_client(number),
        }
    }

    /// Removes a client, and the card that it has joined.
    fn remove_client(&mut self, number: u64) {
        self.leave(CardId(number));
        self.clients.remove(&number);
    }

    fn leave(&mut self, card: CardId) {
        if let Some(socket) = self.paths.sockets.get(&card) {
            // The monitor has a copy of the socket, so that closing it would not end its events. A socket
            // whose shard is gone has none.
            let _ = self.epoll.delete(socket);
        }
        self.networks.leave(card, &mut self.paths);
        self.dns_streams.remove_card(card);
    }

    /// Returns whether the connection goes on.
    fn serve_request(&mut self, number: u64, (request, files): Asked, now: Instant) -> bool {
        let response = match request {
            Request::Join(join) => match self.join(number, &join, files, now) {
                Ok(addresses) => Response::Joined {
                    addresses,
                    offloads: join.offloads,
                },
                Err(why) => Response::Refused { why },
            },
            Request::Facts(facts) => {
                let Some(Client {
                    role: Role::Joined { owes_facts },
                    ..
                }) = self.clients.get_mut(&number)
                else {
                    return false;
                };
                *owes_facts = false;
                self.note_facts(facts, now);
                return true;
            }
            Request::List => report::networks(&self.networks, &self.paths, &self.clients),
            Request::Capture { of } => {
                if !self.networks.members.values().any(|member| is_of(&of, member)) {
                    Response::Refused {
                        why: "no such network or VM; help: `mirrorball net ls` lists them".to_owned(),
                    }
                } else {
                    return self.begin_capture(number, of);
                }
            }
        };
        if let Some(client) = self.clients.get_mut(&number) {
            client.respond(&response);
        }
        true
    }

    fn begin_capture(&mut self, number: u64, of: registry::subnet::Captured) -> bool {
        let Some(client) = self.clients.get_mut(&number) else {
            return false;
        };
        if !matches!(client.role, Role::Asking) {
            return false;
        }
        client.respond(&Response::Capturing);
        client.role = Role::Capturing { of, lost: 0 };
        client.capture([&pcap::file_header(), &[]]);
        client.flush();
        true
    }

    fn join(
        &mut self,
        number: u64,
        join: &Join,
        files: Vec<std::os::fd::OwnedFd>,
        now: Instant,
    ) -> Result<Vec<std::net::IpAddr>, String> {
        let client = self.clients.get_mut(&number);
        let client = client.filter(|client| matches!(client.role, Role::Asking));
        let client = client.ok_or("this connection has joined a card already")?;
        if join.sandbox_required
            && let Some(missing) = &self.missing_layers
        {
            return Err(format!(
                "the VM requires the sandbox, and the subnet's gateway lacks {missing}; help: repair the \
                 host, or run the VM with --sandbox=auto"
            ));
        }
        let [socket] = <[_; 1]>::try_from(files).map_err(|_| "a card has one socket")?;
        let card = CardId(number);
        let addresses = self.networks.join(card, join, socket, &mut self.paths, now)?;
        let added = self.paths.sockets.get(&card).map(|socket| {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, number << KIND_BITS | CARD);
            self.epoll.add(socket, event)
        });
        if let Some(Err(error)) = added {
            self.networks.leave(card, &mut self.paths);
            return Err(format!("the gateway can't watch the card's socket: {error}"));
        }
        client.role = Role::Joined { owes_facts: false };
        self.idle_since = None;
        self.note_facts(join.facts.clone(), now);
        Ok(addresses)
    }

    fn note_facts(&mut self, facts: HostFacts, now: Instant) {
        self.facts_time = now;
        self.paths.is_outside_used = false;
        if facts == self.facts {
            return;
        }
        if facts.resolv_conf != self.facts.resolv_conf {
            self.paths.resolver.set_servers(&facts.resolv_conf);
        }
        *self.barred.borrow_mut() = Barred {
            own: facts.own.iter().copied().collect(),
            cluster: facts.cluster.iter().copied().collect(),
        };
        self.facts = facts;
    }

    /// Asks the next client with a card for the facts of the host, if they are old and guests use the
    /// outside.
    fn ask_for_facts(&mut self, now: Instant) {
        let is_old = now.saturating_duration_since(self.facts_time) >= FACTS_AGE;
        if !is_old || !self.paths.is_outside_used {
            return;
        }
        let mut joined: Vec<u64> = self.networks.members.keys().map(|card| card.0).collect();
        joined.sort_unstable();
        let next = joined.iter().find(|number| **number > self.next_asked);
        let Some(number) = next.or_else(|| joined.first()).copied() else {
            return;
        };
        self.next_asked = number;
        // The next client gets a request only after another such time, whether this one replies or not.
        self.facts_time = now;
        if let Some(client) = self.clients.get_mut(&number)
            && let Role::Joined { owes_facts } = &mut client.role
            && !std::mem::replace(owes_facts, true)
        {
            client.respond(&Response::NeedFacts);
        }
    }

    fn serve_card(&mut self, card: CardId, events: EpollFlags, now: Instant) {
        if events.contains(EpollFlags::EPOLLOUT) {
            self.flush_card(card);
        }
        for _ in 0..FRAMES_PER_TURN {
            let Some(socket) = self.paths.sockets.get(&card) else {
                return;
            };
            match socket.read(&mut self.buffer) {
                Read::Packet(bytes) => {
                    let packet = &self.buffer[..bytes.min(self.buffer.len())];
                    let (header, frame) = socket.split(packet);
                    self.paths.captured.record(card, frame);
                    if let Some(network) = self.networks.of(card) {
                        let output = &mut self.paths.of_network(now);
                        network.receive_unfinished(card, &header, frame, now, output);
                    }
                    self.deliver(now);
                }
                Read::Empty => return,
                Read::Ended if events.contains(EpollFlags::EPOLLHUP) => {
                    // The card stays until its connection ends, but its socket has no further events.
                    let _ = self.epoll.delete(socket);
                    return;
                }
                // An empty packet.
                Read::Ended => {}
            }
        }
    }

    fn flush_card(&mut self, card: CardId) {
        if let Some(socket) = self.paths.sockets.get_mut(&card) {
            socket.flush();
        }
    }

    /// Passes packets of the outside to the networks of their guests.
    fn deliver(&mut self, now: Instant) {
        // A network sends nothing to the outside for these, so there is one pass.
        let mut inward = std::mem::take(&mut self.paths.inward);
        for item in inward.drain(..) {
            match item {
                Inward::Packet(card, packet) => {
                    if let Some(socket) = self.paths.sockets.get_mut(&card) {
                        socket.reserved_bytes = socket.reserved_bytes.saturating_sub(packet.len());
                    }
                    if let Some(network) = self.networks.of(card) {
                        network.receive_outside(card, &packet, now, &mut self.paths.of_network(now));
                    }
                }
                Inward::StreamAnswer(stream, message) => self.dns_streams.answer(stream, &message, now),
                Inward::Answer(query, message) => {
                    if let Some(network) = self.networks.of(query.card) {
                        network.answer(query, &message, &mut self.paths.of_network(now));
                    }
                }
            }
        }
        if self.paths.inward.is_empty() {
            // The list keeps its memory for the next turn.
            self.paths.inward = inward;
        }
    }

    /// Answers queries of guests' connections, or sends them to the host's resolver.
    fn serve_dns_streams(&mut self, now: Instant) {
        let Self {
            dns_streams,
            networks,
            paths,
            ..
        } = self;
        for stream in paths.nat.take_dns_streams() {
            dns_streams.add(stream, now);
        }
        dns_streams.turn(now, &mut |stream, card, query| {
            let Some(network) = networks.of(card) else {
                return Outcome::End;
            };
            match network.decide_query(card, query) {
                dns::Decision::Answer(answer) => Outcome::Answer(answer),
                dns::Decision::Upstream if paths.ask_for_stream(stream, card, query, now) => Outcome::Later,
                dns::Decision::Upstream | dns::Decision::Ignore => Outcome::End,
            }
        });
    }

    fn turn_networks(&mut self, now: Instant) {
        for network in self.networks.networks.values_mut() {
            network.turn(now, &mut self.paths.of_network(now));
        }
    }

    fn send_captured(&mut self) {
        let (captured, members) = (&mut self.paths.captured, &self.networks.members);
        captured.send(&mut self.clients, members);
        for client in self.clients.values_mut() {
            if matches!(client.role, Role::Capturing { .. }) {
                client.flush();
            }
        }
    }

    /// Waits for room in the sockets that need it, and no longer in the others. Connections of cards that
    /// have room again go on.
    fn update_interests(&mut self) {
        let interest = |is_waiting: bool| match is_waiting {
            true => EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT,
            false => EpollFlags::EPOLLIN,
        };
        for (card, socket) in &mut self.paths.sockets {
            if socket.has_held_up && socket.has_room() {
                socket.has_held_up = false;
                self.paths.nat.resume(*card);
            }
            let is_waiting = socket.is_waiting();
            if is_waiting != socket.waits_for_room {
                let mut event = EpollEvent::new(interest(is_waiting), card.0 << KIND_BITS | CARD);
                // A socket whose shard is gone is not watched.
                let _ = self.epoll.modify(&*socket, &mut event);
                socket.waits_for_room = is_waiting;
            }
        }
        for (number, client) in &mut self.clients {
            let is_waiting = client.is_waiting();
            if is_waiting != client.waits_for_room {
                let mut event = EpollEvent::new(interest(is_waiting), number << KIND_BITS | CLIENT);
                let _ = self.epoll.modify(&*client, &mut event);
                client.waits_for_room = is_waiting;
            }
        }
    }
}

#[cfg(test)]
mod tests;
