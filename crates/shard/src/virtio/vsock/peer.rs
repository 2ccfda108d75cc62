//! A program of the host that is connected to the guest, or is connecting: its socket and its connection.
//!
//! Bytes move from the connection to the socket, and from the socket into packets for the guest.
//! [`Connections`](super::connections::Connections) decides when, and waits for events between.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::epoll::EpollFlags;

use super::connection::{Connection, Violation};
use super::packet::{Header, Ports, op};
use super::socket;

/// Time limit for a client's first line, and for the guest's reply.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// Progress of a peer's connection.
pub enum Phase {
    /// A client of the host has yet to send the port that it requests.
    Handshake {
        /// Bytes of the line received so far.
        line: Vec<u8>,
    },
    /// The guest has a record of the connection.
    Connected {
        /// Ports of the connection.
        ports: Ports,
        /// State of the connection.
        connection: Connection,
    },
}

/// A socket of the host, and its connection to the guest.
pub struct Peer {
    /// Socket of the peer, which is nonblocking.
    pub stream: UnixStream,
    /// Progress of its connection.
    pub phase: Phase,
    /// Time by which the connection must be open; none once it is.
    pub deadline: Option<Instant>,
    /// Whether it waits for its turn to send to the guest.
    pub queued: bool,
    /// Whether the socket may have bytes for the guest.
    readable: bool,
    /// Whether the socket has reached its end of file.
    ended: bool,
    /// Whether the other end of the socket is closed in both directions.
    gone: bool,
    /// Whether the socket was shut down for writing, after the guest's last byte.
    write_shut: bool,
}

impl Peer {
    fn new(stream: UnixStream, phase: Phase) -> Self {
        Self {
            stream,
            phase,
            deadline: Some(Instant::now() + OPEN_TIMEOUT),
            queued: false,
            readable: false,
            ended: false,
            gone: false,
            write_shut: false,
        }
    }

    /// Creates the peer of a client that connected to the device's socket.
    pub fn client(stream: UnixStream) -> Self {
        Self::new(stream, Phase::Handshake { line: Vec::new() })
    }

    /// Creates the peer of a host's socket that the guest requested and is connected to.
    pub fn server(stream: UnixStream, ports: Ports, connection: Connection) -> Self {
        let mut peer = Self::new(stream, Phase::Connected { ports, connection });
        peer.deadline = None;
        peer
    }

    /// Returns the ports of the connection, once it has some.
    pub fn ports(&self) -> Option<Ports> {
        match self.phase {
            Phase::Handshake { .. } => None,
            Phase::Connected { ports, .. } => Some(ports),
        }
    }

    /// Records that the socket is ready for the registered events.
    pub fn ready(&mut self) {
        self.readable = matches!(self.phase, Phase::Connected { .. }) && !self.ended;
    }

    /// Processes a packet of the guest. Returns true if it opened the connection that a client requested.
    pub fn receive(&mut self, header: &Header, payload: &[u8]) -> Result<bool, Violation> {
        let Phase::Connected { connection, .. } = &mut self.phase else {
            return Ok(false);
        };
        connection.receive(header.op, header.flags, header.buf_alloc, header.fwd_cnt, payload)
    }

    /// Reports the open connection to a client; returns false if the client is gone.
    pub fn opened(&mut self) -> bool {
        self.deadline = None;
        let Some((host_port, _)) = self.ports() else {
            return false;
        };
        let line = format!("OK {host_port}\n");
        // The socket has sent nothing yet: a short line fits, or the client is gone.
        matches!(socket::send(&self.stream, line.as_bytes()), Ok(count) if count == line.len())
    }

    /// Writes the waiting bytes to the socket and checks which directions have ended. Returns true if the
    /// socket is full.
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
        if connection.guest_sent_all() && !self.write_shut {
            self.write_shut = true;
            // An error means that the other end is gone, which its hang-up reports.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        if self.ended && !self.gone && socket::is_gone(&self.stream) {
            self.gone = true;
            connection.host_ended(true);
        }
        blocked
    }

    /// Returns whether nothing remains to be done for the peer.
    pub fn is_over(&self) -> bool {
        matches!(&self.phase, Phase::Connected { connection, .. } if connection.is_over())
    }

    /// Returns whether the peer may have a packet for the guest.
    pub fn has_packet(&self) -> bool {
        let Phase::Connected { connection, .. } = &self.phase else {
            return false;
        };
        connection.has_control() || self.readable && !self.ended && connection.room() > 0
    }

    /// Returns the peer's next packet for the guest `cid`. The payload, if any, is written to the start of
    /// `payload`, which is not empty.
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

    /// Returns the events to register for the socket; `blocked` is the result of [`Peer::forward`]. None
    /// keeps the registered events.
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
        // After the end of file only the hang-up is awaited. Before it, a socket with unread bytes is not
        // registered.
        (!self.gone && (interest != EpollFlags::EPOLLONESHOT || self.ended)).then_some(interest)
    }
}
