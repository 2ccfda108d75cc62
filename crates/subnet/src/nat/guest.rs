//! Packets of guests.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;
use smoltcp::iface::SocketSet;

use super::exchange::{self, Exchange, Path, Sent};
use super::limits::{Admission, Use};
use super::listener::ListeningSocket;
use super::packet::{self, Content, Parsed, Unreachable};
use super::stack::Link;
use super::table::{FlowId, FlowKey, Transport};
use super::{Card, CardId, Fate, Flow, Nat, Output};
use crate::host_socket as socket;

/// Longest time in which the host opens a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// Largest packet that requests a connection: both headers with all options. Such packets are kept while
/// the host opens the connection, and the stack ignores a payload.
const SYN_BYTES_MAX: usize = 120;

/// Events of a connection's socket. Each change is reported once.
const STREAM_EVENTS: EpollFlags = EpollFlags::EPOLLIN
    .union(EpollFlags::EPOLLOUT)
    .union(EpollFlags::EPOLLRDHUP)
    .union(EpollFlags::EPOLLET);

impl Nat {
    /// Handles a packet from a card's guest to the outside or to the gateway.
    pub fn receive(&mut self, card: CardId, packet: &[u8], now: Instant, output: &mut dyn Output) {
        let Some(parsed) = packet::parse(packet) else {
            self.count(card, |counts| &mut counts.malformed);
            return;
        };
        let Some(settings) = self.card(card) else {
            return;
        };
        let key = |transport| FlowKey {
            card,
            transport,
            guest: parsed.guest,
            remote: parsed.remote,
        };
        let incoming = Incoming {
            card: settings,
            packet,
            parsed,
        };
        match parsed.content {
            Content::Tcp { opens, resets } => {
                let key = key(Transport::Tcp);
                let found = self.flows.find(&key);
                // A card keeps the order of packets: the guest has forgotten a connection that is open, as
                // after a restart.
                let forgotten = found.filter(|id| opens && self.is_established(*id));
                if let Some(id) = forgotten {
                    self.end(id, Fate::Reset);
                }
                match found.filter(|_| forgotten.is_none()) {
                    Some(id) => self.receive_segment(id, packet, resets, now, output),
                    None if opens => self.open_connection(key, &incoming, now, output),
                    None => self.reset(card, packet, now, output),
                }
            }
            Content::Udp(payload) => {
                self.receive_datagram(key(Transport::Udp), &incoming, payload, now, output)
            }
            Content::Echo(message) => {
                self.receive_datagram(key(Transport::Echo), &incoming, message, now, output)
            }
        }
    }

    fn is_established(&mut self, id: FlowId) -> bool {
        match self.flows.get_mut(id) {
            Some((_, Flow::Connection(connection))) => connection.is_established(),
            _ => false,
        }
    }

    fn receive_segment(
        &mut self,
        id: FlowId,
        packet: &[u8],
        resets: bool,
        now: Instant,
        output: &mut dyn Output,
    ) {
        match self.flows.get_mut(id) {
            Some((key, Flow::Connection(connection))) => {
                connection.receive(packet, &mut self.stack, &mut Link::new(key.card, output), now);
                self.enqueue(id);
            }
            Some((_, Flow::Opening { .. })) if resets => self.end(id, Fate::Reset),
            // The request is repeated while the host opens the connection.
            _ => {}
        }
    }

    /// Replies to a packet without a connection: by a reset, unless it is one.
    pub(super) fn reset(&mut self, card: CardId, packet: &[u8], now: Instant, output: &mut dyn Output) {
        let mut link = Link::new(card, output);
        // Without sockets, a failure ends nothing.
        let _ = self
            .stack
            .receive(packet, &mut SocketSet::new(Vec::new()), &mut link, now);
    }

    fn open_connection(
        &mut self,
        key: FlowKey,
        incoming: &Incoming<'_>,
        now: Instant,
        output: &mut dyn Output,
    ) {
        if incoming.packet.len() > SYN_BYTES_MAX {
            self.count(key.card, |counts| &mut counts.malformed);
            return;
        }
        if self.is_to_dns(&key) {
            self.open_dns(key, incoming.packet, now, output);
            return;
        }
        let Some(target) = self.target_or_report(key.card, incoming, now, output) else {
            return;
        };
        let (used, all) = self.flows.used(key.card);
        let admission = self.limits.admit_connection(&used, &all, self.cards.len());
        if admission != Admission::Admitted {
            self.count(key.card, |counts| &mut counts.limited);
            if admission == Admission::Refused {
                self.reset(key.card, incoming.packet, now, output);
            }
            return;
        }
        let id = self.flows.next_id();
        let opened = socket::connect_tcp(target);
        let opened = opened.and_then(|host| self.watch(&host, STREAM_EVENTS, id).map(|()| host));
        let host = match opened {
            Ok(host) => host,
            Err(error) => {
                self.report_failure(key.card, incoming.packet, error, now, output);
                return;
            }
        };
        let used = Use {
            flows: 1,
            connecting: 1,
            ..Use::default()
        };
        let flow = Flow::Opening {
            host,
            syn: incoming.packet.into(),
        };
        self.flows.insert(id, key, used, flow, now);
        self.flows.set_timer(id, now + CONNECT_LIMIT);
    }

    /// Reports to a guest that the host could not open the connection that `packet` requests.
    pub(super) fn report_failure(
        &mut self,
        card: CardId,
        packet: &[u8],
        error: Errno,
        now: Instant,
        output: &mut dyn Output,
    ) {
        match error {
            Errno::ECONNREFUSED | Errno::ECONNRESET => self.reset(card, packet, now, output),
            error if socket::is_lack(&error.into()) => {
                self.count(card, |counts| &mut counts.limited);
                self.reset(card, packet, now, output);
            }
            _ => {
                self.count(card, |counts| &mut counts.unreachable);
                self.report(card, packet, Unreachable::Host, output);
            }
        }
    }

    /// Watches the socket of a connection that a forwarded port has accepted.
    pub(super) fn watch_stream(&self, stream: &std::os::fd::OwnedFd, id: FlowId) -> nix::Result<()> {
        self.watch(stream, STREAM_EVENTS, id)
    }

    fn target_or_report(
        &mut self,
        id: CardId,
        incoming: &Incoming<'_>,
        now: Instant,
        output: &mut dyn Output,
    ) -> Option<SocketAddr> {
        let target = self.target(&incoming.card, incoming.parsed.remote, now);
        if target.is_none() {
            self.count(id, |counts| &mut counts.barred);
            self.report(id, incoming.packet, Unreachable::Prohibited, output);
        }
        target
    }

    fn receive_datagram(
        &mut self,
        key: FlowKey,
        incoming: &Incoming<'_>,
        payload: &[u8],
        now: Instant,
        output: &mut dyn Output,
    ) {
        let found = self.flows.find(&key);
        let Some(id) = found.or_else(|| self.open_exchange(key, incoming, now, output)) else {
            return;
        };
        self.flows.touch(id, now);
        let Some((_, Flow::Exchange(exchange))) = self.flows.get_mut(id) else {
            return;
        };
        let sent = match &exchange.path {
            Path::Own(socket) => exchange::send(socket, payload),
            Path::Forwarded { listener, peer } => match self.listeners.get(listener).map(|it| &it.socket) {
                Some(ListeningSocket::Udp(socket)) => exchange::send_to(socket, payload, peer),
                _ => Sent::Dropped,
            },
        };
        self.note_sent(key, incoming.packet, sent, output);
    }

    /// Counts, and reports to the guest, the result of sending its packet.
    pub(super) fn note_sent(&mut self, key: FlowKey, packet: &[u8], sent: Sent, output: &mut dyn Output) {
        match sent {
            Sent::Done => {}
            Sent::Dropped => self.count(key.card, |counts| &mut counts.full),
            Sent::Refused => self.report(key.card, packet, Unreachable::Port, output),
            Sent::Unreachable => {
                self.count(key.card, |counts| &mut counts.unreachable);
                self.report(key.card, packet, Unreachable::Host, output);
            }
        }
    }

    fn open_exchange(
        &mut self,
        key: FlowKey,
        incoming: &Incoming<'_>,
        now: Instant,
        output: &mut dyn Output,
    ) -> Option<FlowId> {
        let target = self.target_or_report(key.card, incoming, now, output)?;
        if !self.admit_exchange(key.card) {
            return None;
        }
        let is_echo = key.transport == Transport::Echo;
        let opened = match is_echo {
            true => socket::connect_echo(target.ip()),
            false => socket::connect_udp(target),
        };
        let id = self.flows.next_id();
        let opened = opened.and_then(|socket| self.watch(&socket, EpollFlags::EPOLLIN, id).map(|()| socket));
        let socket = match opened {
            Ok(socket) => socket,
            Err(Errno::EACCES | Errno::EPERM) if is_echo => {
                self.count(key.card, |counts| &mut counts.unsent_echoes);
                return None;
            }
            Err(error) if socket::is_lack(&error.into()) => {
                self.count(key.card, |counts| &mut counts.limited);
                return None;
            }
            Err(_) => {
                self.note_sent(key, incoming.packet, Sent::Unreachable, output);
                return None;
            }
        };
        let exchange = match is_echo {
            true => Exchange::echo(socket),
            false => Exchange::udp(Path::Own(socket), key.remote.port()),
        };
        self.add_exchange(id, key, exchange, now);
        Some(id)
    }
}

/// A packet of a guest with its card's settings.
struct Incoming<'a> {
    card: Card,
    packet: &'a [u8],
    parsed: Parsed<'a>,
}
