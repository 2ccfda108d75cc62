//! A TCP connection: the guest's end in the stack, and the host's socket.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use smoltcp::iface::{SocketHandle, SocketSet};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::wire::{IpEndpoint, IpListenEndpoint};

use super::stack::{Link, SEGMENTS_MAX, Stack};
use crate::host_socket::{self as socket, Moved};

/// Longest time without bytes in either direction (RFC 5382 asks for 124 minutes at least).
const IDLE_LIMIT: Duration = Duration::from_secs(124 * 60);
/// Longest time in which a guest completes the opening of a connection.
const OPENING_LIMIT: Duration = Duration::from_secs(30);
/// Longest time in which a guest acknowledges the end of both directions.
const CLOSING_LIMIT: Duration = Duration::from_secs(60);

/// Whether a connection goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes on.
    Open,
    /// Both directions have ended.
    Ended,
    /// One side has reset it, or it has failed.
    Reset,
}

/// A connection.
pub(super) struct Connection {
    /// Whether it is in the queue of the next turn.
    pub(super) is_queued: bool,
    /// Whether it is in its card's list of connections that wait for room.
    pub(super) is_waiting: bool,
    host: OwnedFd,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    /// Whether the host's socket may have bytes.
    is_readable: bool,
    /// Whether the host's socket may have room.
    is_writable: bool,
    /// Whether the host's peer has ended its direction.
    host_ended: bool,
    /// Whether the guest has ended its direction.
    guest_ended: bool,
    /// Whether the end of the guest's direction was passed to the host.
    end_passed: bool,
    /// Whether the last acknowledgement of a closed connection was sent.
    is_acknowledged: bool,
    has_failed: bool,
    /// Time of the last bytes, or of a change of state.
    active: Instant,
}

impl Connection {
    /// Creates the connection that a guest's SYN to `remote` requests. The SYN is its first packet.
    pub(super) fn accept(host: OwnedFd, remote: SocketAddr, bytes: usize, now: Instant) -> Self {
        let mut socket = new_socket(bytes);
        let remote = IpListenEndpoint::from(remote);
        // The socket is closed, and the port is not 0: the packet's parser refuses that. Without the listener
        // the guest gets a reset.
        let _ = socket.listen(remote);
        Self::new(host, socket, now)
    }

    /// Creates a connection to a guest's port for a client at a forwarded port.
    pub(super) fn connect(
        host: OwnedFd,
        guest: SocketAddr,
        gateway: SocketAddr,
        bytes: usize,
        stack: &mut Stack,
        now: Instant,
    ) -> Self {
        let mut socket = new_socket(bytes);
        let (guest, gateway) = (IpEndpoint::from(guest), IpEndpoint::from(gateway));
        // It fails for a port or address of zero only. The connection ends as reset then.
        let _ = socket.connect(stack.interface().context(), guest, gateway);
        Self::new(host, socket, now)
    }

    fn new(host: OwnedFd, socket: Socket<'static>, now: Instant) -> Self {
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        Self {
            is_queued: false,
            is_waiting: false,
            host,
            sockets,
            handle,
            is_readable: true,
            is_writable: true,
            host_ended: false,
            guest_ended: false,
            end_passed: false,
            is_acknowledged: false,
            has_failed: false,
            active: now,
        }
    }

    /// Records an event of the host's socket.
    pub(super) fn note_event(&mut self, is_readable: bool, is_writable: bool) {
        self.is_readable |= is_readable;
        self.is_writable |= is_writable;
    }

    /// Takes a packet of the guest.
    pub(super) fn receive(&mut self, packet: &[u8], stack: &mut Stack, link: &mut Link<'_>, now: Instant) {
        self.has_failed |= stack.receive(packet, &mut self.sockets, link, now).is_err();
        self.active = now;
        self.note_state();
    }

    fn note_state(&mut self) {
        let state = self.sockets.get::<Socket>(self.handle).state();
        self.guest_ended |= matches!(
            state,
            State::CloseWait | State::LastAck | State::Closing | State::TimeWait
        );
    }

    /// Returns whether the guest has answered.
    pub(super) fn is_established(&self) -> bool {
        let state = self.sockets.get::<Socket>(self.handle).state();
        !matches!(state, State::Listen | State::SynSent | State::SynReceived)
    }

    /// Moves bytes in both directions as far as there is room.
    pub(super) fn turn(&mut self, stack: &mut Stack, link: &mut Link<'_>, now: Instant) -> Fate {
        if self.has_failed {
            return Fate::Reset;
        }
        self.move_to_host(now);
        self.move_to_guest(now);
        let is_over_time = self.is_over_time(now);
        if is_over_time {
            self.sockets.get_mut::<Socket>(self.handle).abort();
        }
        // The stack forgets received bytes when the time to wait after the end is over. The host may not have
        // them yet.
        if !self.is_acknowledged {
            // One acknowledgement tells of all bytes. The stack's timer that probes a window of zero may be
            // left from before, and the stack then sends without end.
            let segments_max = if self.is_all_acknowledged() {
                1
            } else {
                SEGMENTS_MAX
            };
            let sent = stack.send(&mut self.sockets, link, segments_max, now);
            self.has_failed |= sent.is_err();
        }
        self.note_state();
        match is_over_time {
            true => Fate::Reset,
            false => self.fate(link.is_full),
        }
    }

    /// Returns whether the guest has acknowledged all bytes and the end of the host's direction.
    fn is_all_acknowledged(&self) -> bool {
        let state = self.sockets.get::<Socket>(self.handle).state();
        matches!(state, State::FinWait2 | State::TimeWait)
    }

    fn fate(&mut self, is_full: bool) -> Fate {
        if self.has_failed {
            return Fate::Reset;
        }
        let socket = self.sockets.get::<Socket>(self.handle);
        let has_ended = self.host_ended && self.guest_ended;
        match socket.state() {
            State::TimeWait if !is_full => self.is_acknowledged = true,
            State::Closed if has_ended => {}
            State::Closed | State::Listen => return Fate::Reset,
            _ => return Fate::Open,
        }
        match self.end_passed {
            true => Fate::Ended,
            false => Fate::Open,
        }
    }

    fn move_to_host(&mut self, now: Instant) {
        let socket = self.sockets.get_mut::<Socket>(self.handle);
        while self.is_writable && socket.can_recv() {
            let moved = socket.recv(|bytes| {
                let moved = socket::write(&self.host, bytes);
                let count = if let Moved::Bytes(count) = moved { count } else { 0 };
                (count, moved)
            });
            match moved {
                Ok(Moved::Bytes(_)) => self.active = now,
                Ok(Moved::NotReady) => self.is_writable = false,
                Ok(Moved::End | Moved::Failed) | Err(_) => {
                    self.is_writable = false;
                    socket.abort();
                }
            }
        }
        if self.guest_ended && !socket.can_recv() && !self.end_passed {
            self.end_passed = true;
            socket::end(&self.host);
        }
    }

    fn move_to_guest(&mut self, now: Instant) {
        let socket = self.sockets.get_mut::<Socket>(self.handle);
        while self.is_readable && socket.can_send() {
            let moved = socket.send(|room| {
                let moved = socket::read(&self.host, room);
                let count = if let Moved::Bytes(count) = moved { count } else { 0 };
                (count, moved)
            });
            match moved {
                Ok(Moved::Bytes(_)) => self.active = now,
                Ok(Moved::NotReady) => self.is_readable = false,
                Ok(Moved::End) => {
                    self.is_readable = false;
                    self.host_ended = true;
                    socket.close();
                }
                Ok(Moved::Failed) | Err(_) => {
                    self.is_readable = false;
                    socket.abort();
                }
            }
        }
    }

    /// Returns how long the connection may stay as it is without bytes.
    fn limit(&self) -> Duration {
        let socket = self.sockets.get::<Socket>(self.handle);
        match socket.state() {
            State::SynSent | State::SynReceived => OPENING_LIMIT,
            State::LastAck | State::Closing if !socket.can_recv() => CLOSING_LIMIT,
            _ => IDLE_LIMIT,
        }
    }

    fn is_over_time(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.active) >= self.limit()
    }

    /// Returns when [`Connection::turn`] must be called without other events. One that waits for room
    /// (`is_full`) does not wait for the stack's timers.
    pub(super) fn deadline(&self, stack: &mut Stack, is_full: bool, now: Instant) -> Instant {
        let limit = self.active + self.limit();
        // Nothing is sent again to a guest that has acknowledged all.
        if is_full || self.is_acknowledged || self.is_all_acknowledged() {
            return limit;
        }
        match stack.deadline(&self.sockets, now) {
            // A timer that has expired while the connection was served fires in a moment.
            Some(at) => at.max(now + Duration::from_millis(1)).min(limit),
            None => limit,
        }
    }

    /// Closes the host's socket, by a reset unless both directions have ended.
    pub(super) fn close(self, fate: Fate) {
        if fate != Fate::Ended {
            socket::reset(self.host);
        }
    }
}

fn new_socket(bytes: usize) -> Socket<'static> {
    // The kernel gives zeroed memory when it is first written.
    let buffer = || SocketBuffer::new(vec![0; bytes / 2]);
    let mut socket = Socket::new(buffer(), buffer());
    socket.set_nagle_enabled(false);
    // All packets of a turn are acknowledged together, at its end.
    socket.set_ack_delay(None);
    socket
}
