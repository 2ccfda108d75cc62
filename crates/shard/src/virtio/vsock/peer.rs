//! A program of the host that is connected to the guest, or about to be: its socket and its connection.
//!
//! Bytes go from the connection to the socket, and from the socket into packets for the guest. When, and what
//! is waited for in between, is [`Connections`](super::connections::Connections)'s.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::epoll::EpollFlags;

use super::connection::{Connection, Violation};
use super::packet::{Header, Ports, op};
use super::socket;

/// How long a client may take for its first line, and the guest for its answer.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// How far a peer is.
pub enum Phase {
    /// A client of the host has yet to say which port it wants.
    Hello {
        /// What it has said so far.
        line: Vec<u8>,
    },
    /// The guest knows of it.
    Connected {
        /// Between which ports.
        ports: Ports,
        /// The state of its connection.
        connection: Connection,
    },
}

/// A peer.
pub struct Peer {
    /// Its socket, which never blocks.
    pub stream: UnixStream,
    /// How far it is.
    pub phase: Phase,
    /// Until when it must be open; none once it is.
    pub deadline: Option<Instant>,
    /// It waits for its turn to send to the guest.
    pub queued: bool,
    /// The socket may have bytes for the guest.
    readable: bool,
    /// The socket has no more bytes.
    ended: bool,
    /// The other end of the socket is closed both ways.
    gone: bool,
    /// The other end was told that the guest sends no more.
    told_ended: bool,
}

impl Peer {
    fn new(stream: UnixStream, phase: Phase) -> Self {
        Self {
            stream,
            phase,
            deadline: Some(Instant::now() + OPEN_LIMIT),
            queued: false,
            readable: false,
            ended: false,
            gone: false,
            told_ended: false,
        }
    }

    /// A client that has come to the device's socket.
    pub fn client(stream: UnixStream) -> Self {
        Self::new(stream, Phase::Hello { line: Vec::new() })
    }

    /// A socket of the host that the guest has asked for, and is connected to.
    pub fn server(stream: UnixStream, ports: Ports, connection: Connection) -> Self {
        let mut peer = Self::new(stream, Phase::Connected { ports, connection });
        peer.deadline = None;
        peer
    }

    /// Its ports, once it has some.
    pub fn ports(&self) -> Option<Ports> {
        match self.phase {
            Phase::Hello { .. } => None,
            Phase::Connected { ports, .. } => Some(ports),
        }
    }

    /// The socket is ready for what was waited for.
    pub fn ready(&mut self) {
        self.readable = matches!(self.phase, Phase::Connected { .. }) && !self.ended;
    }

    /// Takes a packet of the guest. True when it opened the connection that a client asked for.
    pub fn receive(&mut self, header: &Header, payload: &[u8]) -> Result<bool, Violation> {
        let Phase::Connected { connection, .. } = &mut self.phase else {
            return Ok(false);
        };
        connection.receive(header.op, header.flags, header.buf_alloc, header.fwd_cnt, payload)
    }

    /// Tells a client that it is connected; false when it is gone.
    pub fn opened(&mut self) -> bool {
        self.deadline = None;
        let Some((host_port, _)) = self.ports() else {
            return false;
        };
        let line = format!("OK {host_port}\n");
        // The socket is fresh: a short line fits, or the client is gone.
        matches!(socket::send(&self.stream, line.as_bytes()), Ok(count) if count == line.len())
    }

    /// Gives the socket what waits for it, and sees what has ended. True when the socket takes no more for
    /// now.
    pub fn forward(&mut self) -> bool {
        let Phase::Connected { connection, .. } = &mut self.phase else {
            return false;
        };
        let mut blocked = false;
        while !connection.waiting().is_empty() {
            match socket::send(&self.stream, connection.waiting()) {
                Ok(count) => connection.forwarded(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    blocked = true;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    let lost = connection.waiting().len();
                    connection.forwarded(lost);
                    self.gone = true;
                    self.ended = true;
                    connection.host_ended(true);
                }
            }
        }
        if connection.guest_sent_all() && !self.told_ended {
            self.told_ended = true;
            // An error means that the other end is gone: its hang-up tells.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        if self.ended && !self.gone && socket::is_gone(&self.stream) {
            self.gone = true;
            connection.host_ended(true);
        }
        blocked
    }

    /// Whether nothing is left to do for it.
    pub fn is_over(&self) -> bool {
        matches!(&self.phase, Phase::Connected { connection, .. } if connection.is_over())
    }

    /// Whether it may have a packet for the guest.
    pub fn has_packet(&self) -> bool {
        let Phase::Connected { connection, .. } = &self.phase else {
            return false;
        };
        connection.has_control() || self.readable && !self.ended && connection.room() > 0
    }

    /// Its next packet for the guest `cid`; the payload, if any, is put at the start of `payload`, which is
    /// not empty.
    pub fn next_packet(&mut self, cid: u64, payload: &mut [u8]) -> Option<Header> {
        let Phase::Connected { ports, connection } = &mut self.phase else {
            return None;
        };
        let mut header = Header::to_guest(cid, *ports);
        if let Some((operation, flags)) = connection.next_control() {
            (header.op, header.flags) = (operation, flags);
        } else if self.readable && !self.ended && connection.room() > 0 {
            let most = connection.room().min(payload.len());
            match (&self.stream).read(&mut payload[..most]) {
                Ok(0) => {
                    self.ended = true;
                    self.gone = socket::is_gone(&self.stream);
                    connection.host_ended(self.gone);
                }
                Ok(count) => {
                    connection.sent(count);
                    header.op = op::RW;
                    // At most PAYLOAD_BYTES_MAX.
                    header.len = count as u32;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(_) => {
                    self.ended = true;
                    self.gone = true;
                    connection.host_ended(true);
                }
            }
        }
        if header.op == 0 {
            return None;
        }
        (header.buf_alloc, header.fwd_cnt) = connection.credit();
        Some(header)
    }

    /// What to wait for on the socket; `blocked` as [`Peer::forward`] said. None leaves it as it is.
    pub fn interest(&self, blocked: bool) -> Option<EpollFlags> {
        let mut interest = EpollFlags::EPOLLONESHOT;
        let Phase::Connected { connection, .. } = &self.phase else {
            return Some(interest | EpollFlags::EPOLLIN);
        };
        if blocked {
            interest |= EpollFlags::EPOLLOUT;
        }
        if !self.readable && !self.ended && connection.is_open() {
            interest |= EpollFlags::EPOLLIN;
        }
        // Once ended, only the hang-up is waited for; before that, a socket with unread bytes is left alone.
        (!self.gone && (interest != EpollFlags::EPOLLONESHOT || self.ended)).then_some(interest)
    }
}
