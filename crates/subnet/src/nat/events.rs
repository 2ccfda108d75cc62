//! Events of the host's sockets, and timers.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags, EpollTimeout};

use super::exchange::{self, Exchange, Path, Sent};
use super::limits::{Admission, Use};
use super::listener::ListeningSocket;
use super::stack::Link;
use super::table::{FlowId, FlowKey, Transport};
use super::{CardId, Connection, Counts, Fate, Flow, Nat, Output, packet};
use crate::host_socket::{self as socket, Client};

/// Events in one turn. Others wait for the next one.
const EVENTS_MAX: usize = 256;
/// Datagrams of one socket, and connections of one listener, in one turn.
const DATAGRAMS_MAX: usize = 64;
const ACCEPTED_MAX: usize = 16;
/// Time for which a listener does not accept when descriptors are lacking.
const PAUSE: Duration = Duration::from_millis(200);
/// Events that mean a failure, or the end of both directions.
const GONE: EpollFlags = EpollFlags::EPOLLERR.union(EpollFlags::EPOLLHUP);
/// Bytes of the largest header of a datagram: IPv6 and UDP.
const HEADER_BYTES_MAX: usize = 48;

impl Nat {
    /// Handles events of sockets, timers, and connections that received packets.
    pub fn turn(&mut self, now: Instant, output: &mut dyn Output) {
        self.turned = now;
        self.resume_listeners(now);
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        // The wait does not block. A failure to wait is one to wait again.
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            self.handle_event(FlowId(event.data()), event.events(), now, output);
        }
        while let Some(id) = self.flows.expired(now) {
            self.handle_timer(id, now, output);
        }
        for id in std::mem::take(&mut self.queue) {
            self.serve(id, now, output);
        }
    }

    fn handle_event(&mut self, id: FlowId, events: EpollFlags, now: Instant, output: &mut dyn Output) {
        if let Some(listener) = self.listeners.get(&id) {
            match listener.socket {
                ListeningSocket::Tcp(_) => self.accept(id, now),
                ListeningSocket::Udp(_) => self.receive_forwarded(id, now, output),
            }
            return;
        }
        match self.flows.get_mut(id) {
            Some((_, Flow::Connection(connection))) => {
                let is_gone = events.intersects(GONE);
                let is_readable = events.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP);
                let is_writable = events.contains(EpollFlags::EPOLLOUT);
                connection.note_event(is_gone || is_readable, is_gone || is_writable);
                self.enqueue(id);
            }
            Some((_, Flow::Opening { host, .. })) => {
                if let Some(error) = socket::connect_error(host) {
                    self.fail_opening(id, error, now, output);
                } else if events.contains(EpollFlags::EPOLLOUT) {
                    self.complete_opening(id, now, output);
                }
            }
            Some((_, Flow::Exchange(_))) => self.receive_replies(id, now, output),
            None => {}
        }
    }

    fn handle_timer(&mut self, id: FlowId, now: Instant, output: &mut dyn Output) {
        let active = self.flows.active(id);
        match self.flows.get_mut(id) {
            Some((_, Flow::Connection(_))) => self.enqueue(id),
            Some((_, Flow::Opening { .. })) => self.fail_opening(id, Errno::ETIMEDOUT, now, output),
            Some((_, Flow::Exchange(exchange))) => {
                let end = active.unwrap_or(now) + exchange.limit();
                if end <= now {
                    self.end(id, Fate::Ended);
                } else {
                    self.flows.set_timer(id, end);
                }
            }
            None => {}
        }
    }

    /// Moves a connection's bytes.
    fn serve(&mut self, id: FlowId, now: Instant, output: &mut dyn Output) {
        let Some((key, Flow::Connection(connection))) = self.flows.get_mut(id) else {
            return;
        };
        connection.is_queued = false;
        let mut link = Link::new(key.card, output);
        let fate = connection.turn(&mut self.stack, &mut link, now);
        if fate != Fate::Open {
            self.end(id, fate);
            return;
        }
        let deadline = connection.deadline(&mut self.stack, link.is_full, now);
        if link.is_full
            && !connection.is_waiting
            && let Some(card) = self.cards.get_mut(&key.card)
        {
            connection.is_waiting = true;
            let list = match link.has_sent {
                true => &mut card.sent,
                false => &mut card.waiting,
            };
            list.push(id);
        }
        self.flows.set_timer(id, deadline);
    }

    /// Begins the guest's half of a connection that the host has opened.
    fn complete_opening(&mut self, id: FlowId, now: Instant, output: &mut dyn Output) {
        let Some((key, Flow::Opening { host, syn })) = self.flows.remove(id) else {
            return;
        };
        let (used, all) = self.flows.used(key.card);
        let Some(bytes) = self.limits.buffers(&used, &all, self.cards.len()) else {
            self.count(key.card, |counts| &mut counts.limited);
            socket::reset(host);
            self.reset(key.card, &syn, now, output);
            return;
        };
        let mut connection = Connection::accept(host, key.remote, bytes, now);
        connection.receive(&syn, &mut self.stack, &mut Link::new(key.card, output), now);
        self.add_connection(id, key, connection, bytes, now);
    }

    /// Adds a connection, which is served in this turn or the next.
    pub(super) fn add_connection(
        &mut self,
        id: FlowId,
        key: FlowKey,
        connection: Connection,
        memory: usize,
        now: Instant,
    ) {
        let used = Use {
            flows: 1,
            memory,
            ..Use::default()
        };
        let flow = Flow::Connection(Box::new(connection));
        self.flows.insert(id, key, used, flow, now);
        self.count(key.card, |counts| &mut counts.opened);
        self.enqueue(id);
    }

    fn fail_opening(&mut self, id: FlowId, error: Errno, now: Instant, output: &mut dyn Output) {
        if let Some((key, Flow::Opening { syn, .. })) = self.flows.remove(id) {
            self.report_failure(key.card, &syn, error, now, output);
        }
    }

    /// Passes datagrams of an exchange's own socket to the guest.
    fn receive_replies(&mut self, id: FlowId, now: Instant, output: &mut dyn Output) {
        for _ in 0..DATAGRAMS_MAX {
            let Some((key, Flow::Exchange(exchange))) = self.flows.get_mut(id) else {
                return;
            };
            let Path::Own(socket) = &exchange.path else {
                return;
            };
            let is_echo = key.transport == Transport::Echo;
            let header = match is_echo {
                true => packet::ip_bytes(key.guest.ip()),
                false => packet::udp_header_bytes(key.guest.ip()),
            };
            match socket.recv(&mut self.stack.buffer()[header..]) {
                Ok(bytes) => {
                    self.flows.touch(id, now);
                    self.pass_datagram(key, header + bytes, is_echo, output);
                }
                Err(error) if is_not_ready(&error) => return,
                Err(error) if is_echo => {
                    let _: Sent = exchange::failure(&error);
                    return;
                }
                Err(error) => {
                    let mut quote = [0; HEADER_BYTES_MAX];
                    let quote = &mut quote[..header];
                    packet::write_udp(quote, key.guest, key.remote);
                    self.note_sent(key, quote, exchange::failure(&error), output);
                    return;
                }
            }
        }
    }

    /// Completes the datagram in the stack's buffer, and passes it to the guest.
    fn pass_datagram(&mut self, key: FlowKey, bytes: usize, is_echo: bool, output: &mut dyn Output) {
        if bytes > self.mtu || !output.has_room(key.card) {
            self.count(key.card, |counts| &mut counts.full);
            return;
        }
        let packet = &mut self.stack.buffer()[..bytes];
        if is_echo {
            let message = &packet[packet::ip_bytes(key.guest.ip())..];
            if !packet::is_echo_reply(message, key.guest.ip()) {
                return;
            }
            packet::write_echo(packet, key.remote.ip(), key.guest);
        } else {
            packet::write_udp(packet, key.remote, key.guest);
        }
        output.send(key.card, packet);
    }

    /// Passes datagrams of a forwarded port to its guest.
    fn receive_forwarded(&mut self, id: FlowId, now: Instant, output: &mut dyn Output) {
        for _ in 0..DATAGRAMS_MAX {
            let Some(listener) = self.listeners.get(&id) else {
                return;
            };
            let (card, port) = (listener.card, listener.forward.guest);
            let ListeningSocket::Udp(socket) = &listener.socket else {
                return;
            };
            let Some(settings) = self.card(card) else {
                return;
            };
            let header = packet::udp_header_bytes(settings.address.into());
            // An error is one of an earlier datagram to some peer.
            let received = socket::receive_from(socket, &mut self.stack.buffer()[header..]);
            let Ok((bytes, peer)) = received else {
                return;
            };
            let known = listener.peers.get(&peer).copied();
            let Some(flow) = known.or_else(|| self.open_forwarded(id, card, port, peer, now)) else {
                continue;
            };
            self.flows.touch(flow, now);
            if let Some((key, _)) = self.flows.get_mut(flow) {
                self.pass_datagram(key, header + bytes, false, output);
            }
        }
    }

    fn open_forwarded(
        &mut self,
        listener: FlowId,
        card: CardId,
        port: u16,
        peer: Client,
        now: Instant,
    ) -> Option<FlowId> {
        if !self.admit_exchange(card) {
            return None;
        }
        let settings = self.card(card)?;
        let key = self.forwarded_key(card, &settings, Transport::Udp, port)?;
        let id = self.flows.next_id();
        let exchange = Exchange::udp(Path::Forwarded { listener, peer }, key.remote.port());
        self.add_exchange(id, key, exchange, now);
        self.listeners.get_mut(&listener)?.peers.insert(peer, id);
        Some(id)
    }

    /// Accepts connections at a forwarded port.
    fn accept(&mut self, id: FlowId, now: Instant) {
        for _ in 0..ACCEPTED_MAX {
            let Some(listener) = self.listeners.get(&id) else {
                return;
            };
            let ListeningSocket::Tcp(socket) = &listener.socket else {
                return;
            };
            let (card, port) = (listener.card, listener.forward.guest);
            match socket.accept() {
                Ok((stream, _)) => {
                    // Without the option small writes of the guest are late.
                    let _ = stream.set_nodelay(true);
                    self.connect_guest(card, port, stream.into(), now);
                }
                Err(error) if socket::is_lack(&error) => {
                    self.pause(id, now);
                    return;
                }
                Err(error) if is_not_ready(&error) => return,
                // The client has gone.
                Err(_) => {}
            }
        }
    }

    fn connect_guest(&mut self, id: CardId, port: u16, host: OwnedFd, now: Instant) {
        let Some(card) = self.card(id) else {
            return;
        };
        let (used, all) = self.flows.used(id);
        let cards = self.cards.len();
        let is_admitted = self.limits.admit_connection(&used, &all, cards) == Admission::Admitted;
        let bytes = self.limits.buffers(&used, &all, cards).filter(|_| is_admitted);
        let key = self.forwarded_key(id, &card, Transport::Tcp, port);
        let (Some(bytes), Some(key)) = (bytes, key) else {
            self.count(id, |counts: &mut Counts| &mut counts.limited);
            socket::reset(host);
            return;
        };
        let flow = self.flows.next_id();
        if self.watch_stream(&host, flow).is_err() {
            socket::reset(host);
            return;
        }
        let connection = Connection::connect(host, key.guest, key.remote, bytes, &mut self.stack, now);
        self.add_connection(flow, key, connection, bytes, now);
    }

    /// Stops a listener for a while: it would report its connections forever.
    fn pause(&mut self, id: FlowId, now: Instant) {
        if let Some(listener) = self.listeners.get(&id)
            && self.epoll.delete(listener).is_ok()
        {
            self.paused.push((now + PAUSE, id));
        }
    }

    fn resume_listeners(&mut self, now: Instant) {
        for (until, id) in std::mem::take(&mut self.paused) {
            let Some(listener) = self.listeners.get(&id) else {
                continue;
            };
            if until > now {
                self.paused.push((until, id));
            } else if self.watch(listener, EpollFlags::EPOLLIN, id).is_err() {
                self.paused.push((now + PAUSE, id));
            }
        }
    }
}

fn is_not_ready(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
