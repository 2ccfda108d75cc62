//! Network address translation in user space: guests' connections to the outside, and forwarded ports.
//!
//! One [`Nat`] serves the cards of many networks in one thread. Packets of guests are IP packets without an
//! Ethernet header; the host's side is non-blocking sockets. TCP ends here: `smoltcp` speaks with the guest,
//! the host's kernel with the peer, and bytes are copied between both with bounded buffers.
//!
//! # Use in an event loop
//!
//! The translator has an epoll descriptor of its own, which the loop watches like any other file
//! ([`AsFd`]). It is readable while a socket of the host has an event. A loop does this in each turn:
//!
//! 1. It waits for its descriptors, at most until [`Nat::deadline`].
//! 2. It calls [`Nat::receive`] for each packet that a card sends to the outside.
//! 3. It calls [`Nat::resume`] for each card whose queue had no room and has room again.
//! 4. It calls [`Nat::turn`] once, which handles events of sockets, timers, and the packets of step 2. All
//!    packets of a turn are written to the host, and acknowledged to the guest, together.
//!
//! Connections to the gateway's port of DNS lead to no socket of the host, but to the caller's server of DNS,
//! which takes them by [`Nat::take_dns_streams`] after a turn.
//!
//! Packets to guests go to an [`Output`]. TCP waits while a card's queue has no room; other packets are
//! dropped.
//!
//! # System calls
//!
//! A seccomp filter must allow, beyond reads and writes: `socket` (`AF_INET`, `AF_INET6`), `connect`, `bind`,
//! `listen`, `accept4`, `getsockopt`, `setsockopt`, `getsockname`, `sendto`, `recvfrom`, `shutdown`, `close`,
//! `recvmsg`, `sendmsg`, `socketpair` (`AF_UNIX`, streams), `epoll_ctl`, `epoll_wait`, and what the caller's
//! list of addresses needs.

mod card;
mod connection;
mod dns;
mod egress;
mod events;
mod exchange;
#[cfg(fuzzing)]
pub mod fuzzing;
mod guest;
mod limits;
mod listener;
mod packet;

mod stack;
mod table;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;
use std::{fmt, io};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

pub use self::card::{Card, CardId, Counts, Gateways};
use self::connection::{Connection, Fate};
pub use self::dns::DnsStream;
use self::exchange::{Exchange, Path};
pub use self::limits::Limits;
use self::limits::{Admission, Use};
use self::listener::Listener;
use self::packet::Unreachable;
use self::stack::Stack;
use self::table::{FlowId, FlowKey, Table, Transport};
use crate::filter::Barred;
use crate::listing::{Freshness, Listing};
use crate::{PortForward, SubnetError};

/// Receives packets to guests.
pub trait Output {
    /// Returns whether the card's queue has room for a packet of the largest size.
    fn has_room(&mut self, card: CardId) -> bool;

    /// Takes an IP packet to the card's guest. A card without room loses it.
    fn send(&mut self, card: CardId, packet: &[u8]);
}

/// Returns the current list of addresses that guests may not reach; none if the host does not list them.
pub type ListAddresses = Box<dyn FnMut() -> Option<Barred>>;

/// Settings of a translator.
pub struct Settings {
    /// Bounds of memory and descriptors.
    pub limits: Limits,
    /// Largest packet of guests, in bytes.
    pub mtu: usize,
    /// Addresses that guests may not reach, at the start.
    pub barred: Barred,
    /// Lists barred addresses. It is called at most once a second, when a guest begins an exchange. Without a
    /// list the former one stays.
    pub list_addresses: ListAddresses,
}

/// First port of the gateway's address for forwarded connections.
const FIRST_PORT: u16 = 49_152;
/// Ports that are tried before a forwarded connection is refused.
const PORT_TRIES: usize = 64;

/// A connection or exchange.
enum Flow {
    /// A connection that the host has not opened yet.
    Opening {
        host: OwnedFd,
        /// The guest's packet that requests it.
        syn: Box<[u8]>,
    },
    /// A connection that the host has opened.
    Connection(Box<Connection>),
    /// An exchange of datagrams.
    Exchange(Exchange),
}

/// A card with its state.
struct CardEntry {
    card: Card,
    counts: Counts,
    /// Connections that wait for room in the card's queue, and have sent nothing since it had room.
    waiting: Vec<FlowId>,
    /// Those that have sent something.
    sent: Vec<FlowId>,
}

/// A translator.
pub struct Nat {
    epoll: Epoll,
    limits: Limits,
    mtu: usize,
    cards: HashMap<CardId, CardEntry>,
    flows: Table<Flow>,
    listeners: HashMap<FlowId, Listener>,
    /// Listeners that do not accept until a time, as the process lacks descriptors.
    paused: Vec<(Instant, FlowId)>,
    /// Connections to serve in the next turn.
    queue: Vec<FlowId>,
    stack: Stack,
    listing: Listing,
    list_addresses: ListAddresses,
    /// Connections to the gateway's DNS that its server has not taken yet.
    dns_streams: Vec<DnsStream>,
    next_port: u16,
    /// Time of the last turn.
    turned: Instant,
}

impl Nat {
    /// Creates a translator without cards.
    ///
    /// # Errors
    /// Fails if the kernel creates no epoll descriptor.
    pub fn new(settings: Settings, now: Instant) -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            limits: settings.limits,
            mtu: settings.mtu,
            cards: HashMap::new(),
            flows: Table::new(),
            listeners: HashMap::new(),
            paused: Vec::new(),
            queue: Vec::new(),
            stack: Stack::new(settings.mtu, now, RandomState::new().build_hasher().finish()),
            listing: Listing::new(settings.barred, now),
            list_addresses: settings.list_addresses,
            dns_streams: Vec::new(),
            next_port: FIRST_PORT,
            turned: now,
        })
    }

    /// Adds a card, or changes its settings. Exchanges that the new settings refuse end.
    pub fn add_card(&mut self, id: CardId, card: Card) {
        let fresh = CardEntry {
            card,
            counts: Counts::default(),
            waiting: Vec::new(),
            sent: Vec::new(),
        };
        self.cards.entry(id).or_insert(fresh).card = card;
        self.end_barred();
    }

    /// Removes a card. Its connections are reset, and its forwarded ports closed.
    pub fn remove_card(&mut self, id: CardId) {
        self.reset_card(id);
        self.listeners.retain(|_, listener| listener.card != id);
        self.cards.remove(&id);
    }

    /// Ends all exchanges of a card, as its guest has restarted. Forwarded ports stay.
    pub fn reset_card(&mut self, id: CardId) {
        for flow in self.flows.of_card(id) {
            self.end(flow, Fate::Reset);
        }
    }

    /// Forwards a port of the host to a card's guest.
    ///
    /// # Errors
    /// Fails if the port is in use or not allowed, or if the card does not exist.
    pub fn add_forward(&mut self, card: CardId, forward: PortForward) -> Result<(), SubnetError> {
        let (port, protocol) = (forward.host, forward.protocol.name());
        if !self.cards.contains_key(&card) {
            return Err(SubnetError::PortWithoutCard { port, protocol });
        }
        let listener = Listener::open(card, forward)?;
        let id = self.flows.next_id();
        let watched = self.watch(&listener, EpollFlags::EPOLLIN, id);
        watched.map_err(|error| SubnetError::Port {
            port,
            protocol,
            source: error.into(),
        })?;
        self.listeners.insert(id, listener);
        Ok(())
    }

    /// Closes a forwarded port of the host. Its connections stay. Returns whether it was open.
    pub fn remove_forward(&mut self, card: CardId, forward: PortForward) -> bool {
        let mut listeners = self.listeners.iter();
        let found = listeners.find(|(_, listener)| listener.card == card && listener.forward == forward);
        let Some(listener) = found.map(|(id, _)| *id).and_then(|id| self.listeners.remove(&id)) else {
            return false;
        };
        for exchange in listener.peers.into_values() {
            self.end(exchange, Fate::Ended);
        }
        true
    }

    /// Continues the connections of a card whose queue has room again.
    pub fn resume(&mut self, card: CardId) {
        let Some(card) = self.cards.get_mut(&card) else {
            return;
        };
        // Connections that filled the queue come last. Acknowledgements may have queued them already: others
        // are put before these.
        let queued = std::mem::take(&mut self.queue);
        for waiting in [std::mem::take(&mut card.waiting), std::mem::take(&mut card.sent)] {
            for id in waiting {
                if let Some((_, Flow::Connection(connection))) = self.flows.get_mut(id) {
                    connection.is_waiting = false;
                }
                self.enqueue(id);
            }
        }
        self.queue.extend(queued);
    }

    /// Returns the time at which [`Nat::turn`] must be called, without other events.
    pub fn deadline(&self) -> Option<Instant> {
        let queued = (!self.queue.is_empty()).then_some(self.turned);
        let paused = self.paused.iter().map(|(until, _)| *until);
        paused.chain(queued).chain(self.flows.deadline()).min()
    }

    /// Returns the counters of a card.
    pub fn counts(&self, card: CardId) -> Option<Counts> {
        let entry = self.cards.get(&card)?;
        let (used, _) = self.flows.used(card);
        Some(Counts {
            connections: (used.flows - used.exchanges) as u64,
            exchanges: used.exchanges as u64,
            ..entry.counts
        })
    }

    /// Returns the number of connections, of all cards, that ended by a failure of the TCP stack. Any is an
    /// error of that stack, to be reported.
    pub fn failures(&self) -> u64 {
        self.stack.failures()
    }

    fn card(&self, id: CardId) -> Option<Card> {
        self.cards.get(&id).map(|entry| entry.card)
    }

    /// Adds one to a counter of a card.
    fn count(&mut self, card: CardId, counter: fn(&mut Counts) -> &mut u64) {
        if let Some(entry) = self.cards.get_mut(&card) {
            Counts::add(counter(&mut entry.counts));
        }
    }

    /// Watches a socket under the number of its flow or listener.
    fn watch(&self, socket: impl AsFd, events: EpollFlags, id: FlowId) -> nix::Result<()> {
        self.epoll.add(socket, EpollEvent::new(events, id.0))
    }

    /// Serves a connection in the next turn.
    fn enqueue(&mut self, id: FlowId) {
        if let Some((_, Flow::Connection(connection))) = self.flows.get_mut(id)
            && !connection.is_queued
        {
            connection.is_queued = true;
            self.queue.push(id);
        }
    }

    /// Returns the host's address for a guest's destination; none if the guest may not reach it.
    fn target(&mut self, card: &Card, remote: SocketAddr, now: Instant) -> Option<SocketAddr> {
        if self.listing.freshness(now) == Freshness::Stale {
            match (self.list_addresses)() {
                Some(barred) if barred != *self.listing.barred() => {
                    self.listing.replace(barred, now);
                    self.end_barred();
                }
                _ => self.listing.is_confirmed(now),
            }
        }
        egress::target(card, remote, self.listing.barred())
    }

    /// Ends the flows whose destinations are barred now.
    fn end_barred(&mut self) {
        let barred = self.listing.barred();
        let is_barred = |key: &FlowKey| {
            self.cards.get(&key.card).is_none_or(|entry| {
                // Forwarded flows come from the gateway.
                !entry.card.gateways.contains(key.remote.ip())
                    && egress::target(&entry.card, key.remote, barred).is_none()
            })
        };
        let flows = self.flows.keys().filter(|(_, key)| is_barred(key));
        let ended: Vec<_> = flows.map(|(id, _)| id).collect();
        for id in ended {
            self.end(id, Fate::Reset);
        }
    }

    /// Ends a flow.
    fn end(&mut self, id: FlowId, fate: Fate) {
        match self.flows.remove(id) {
            Some((key, Flow::Connection(connection))) => {
                if connection.is_waiting
                    && let Some(card) = self.cards.get_mut(&key.card)
                {
                    card.waiting.retain(|waiting| *waiting != id);
                    card.sent.retain(|waiting| *waiting != id);
                }
                connection.close(fate);
            }
            Some((_, Flow::Exchange(exchange))) => {
                if let Path::Forwarded { listener, peer } = exchange.path
                    && let Some(listener) = self.listeners.get_mut(&listener)
                {
                    listener.peers.remove(&peer);
                }
            }
            Some((_, Flow::Opening { .. })) | None => {}
        }
    }

    /// Decides on another exchange of a card, and makes room for it. Counts a refusal.
    fn admit_exchange(&mut self, card: CardId) -> bool {
        let (used, all) = self.flows.used(card);
        match self.limits.admit_exchange(&used, &all, self.cards.len()) {
            Admission::Admitted => true,
            Admission::ReplacesOldest => {
                if let Some(oldest) = self.flows.oldest_exchange(card) {
                    self.end(oldest, Fate::Ended);
                }
                true
            }
            Admission::Later | Admission::Refused => {
                self.count(card, |counts| &mut counts.limited);
                false
            }
        }
    }

    /// Adds an exchange, which ends after its time without packets.
    fn add_exchange(&mut self, id: FlowId, key: FlowKey, exchange: Exchange, now: Instant) {
        let used = Use {
            flows: 1,
            exchanges: 1,
            ..Use::default()
        };
        let limit = exchange.limit();
        self.flows.insert(id, key, used, Flow::Exchange(exchange), now);
        self.flows.set_timer(id, now + limit);
        self.count(key.card, |counts| &mut counts.opened);
    }

    /// Returns an unused port of the gateway's address for a forwarded flow to a guest's port.
    fn forwarded_key(&mut self, id: CardId, card: &Card, transport: Transport, port: u16) -> Option<FlowKey> {
        for _ in 0..PORT_TRIES {
            let next = self.next_port;
            self.next_port = next.checked_add(1).unwrap_or(FIRST_PORT);
            let key = FlowKey {
                card: id,
                transport,
                guest: SocketAddr::new(card.address.into(), port),
                remote: SocketAddr::new(card.gateways.ipv4.into(), next),
            };
            if self.flows.find(&key).is_none() {
                return Some(key);
            }
        }
        None
    }

    /// Reports to a guest that its packet did not reach its destination.
    fn report(&mut self, id: CardId, packet: &[u8], reason: Unreachable, output: &mut dyn Output) {
        let Some(card) = self.card(id) else {
            return;
        };
        let gateway = match packet.first().map(|byte| byte >> 4) {
            Some(4) => card.gateways.ipv4.into(),
            _ => card.gateways.ipv6.into(),
        };
        let buffer = self.stack.buffer();
        if let Some(bytes) = packet::write_unreachable(buffer, gateway, packet, reason)
            && output.has_room(id)
        {
            output.send(id, &buffer[..bytes]);
        }
    }
}

impl AsFd for Nat {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

impl fmt::Debug for Nat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Nat").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
