//! One connection without the host's network, for `fuzz/`: a run depends on its input only.
//!
//! It is compiled under `cfg(fuzzing)` only, which `scripts/fuzz.sh` sets. Checksums count as right then.

use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{IpProtocol, IpRepr, TcpPacket, TcpSeqNumber};

use super::connection::{Connection, Fate};
use super::packet::{self, Unreachable};
use super::stack::{Link, Stack};
use super::{CardId, Output};
use crate::frame;

const MTU: usize = 65_520;
/// Bytes of both buffers of the connection.
const BUFFER_BYTES: usize = 32 << 10;
const TCP_BYTES: usize = 20;

/// A segment of the guest. Its numbers are relative to those of a well-behaved guest.
#[derive(Clone, Debug)]
pub struct Segment<'a> {
    /// Flags: FIN, SYN, RST, PSH, ACK, from bit 0.
    pub flags: u8,
    /// Distance of the sequence number from the next one.
    pub sequence: i32,
    /// Distance of the acknowledged number from the last one that was sent.
    pub acknowledged: i32,
    /// The guest's window.
    pub window: u16,
    /// Options, of which up to 40 bytes are used.
    pub options: &'a [u8],
    /// Bytes of the payload.
    pub payload: u16,
}

/// A connection between a guest and a host that the input plays.
pub struct Conversation {
    stack: Stack,
    connection: Option<Connection>,
    host: UnixStream,
    output: Room,
    guest: SocketAddr,
    remote: SocketAddr,
    now: Instant,
    /// The guest's next sequence number.
    next: i32,
    /// Bytes that the guest and the host have sent, and that the host has received.
    guest_sent: usize,
    host_sent: usize,
    host_received: usize,
}

/// Segments without bytes or flags that one turn may have: an acknowledgement, a window, a probe.
const EMPTY_MAX: usize = 3;

/// The guest's queue.
struct Room {
    has_room: bool,
    /// Segments of this turn without bytes or flags.
    empty: usize,
    /// The number after the last byte that was sent to the guest.
    acknowledgeable: i32,
}

impl Output for Room {
    fn has_room(&mut self, _: CardId) -> bool {
        self.has_room
    }

    fn send(&mut self, _: CardId, packet: &[u8]) {
        assert!(packet.len() <= MTU, "{} bytes", packet.len());
        let datagram = frame::parse_ip(packet).expect("a packet that can be judged");
        let header = packet::ip_bytes(datagram.source);
        let segment = TcpPacket::new_checked(&packet[header..]).expect("a segment");
        if !segment.rst() {
            let end = segment.seq_number() + segment.segment_len();
            self.acknowledgeable = end.0;
            self.empty += usize::from(segment.segment_len() == 0);
        }
    }
}

impl Conversation {
    /// Creates a connection that the guest requests, or one to the guest (`is_forwarded`).
    pub fn new(is_ipv6: bool, is_forwarded: bool, syn: &Segment<'_>) -> Self {
        let address = |v4: [u8; 4], v6: u16| match is_ipv6 {
            true => IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, v6]),
            false => IpAddr::from(v4),
        };
        let guest = SocketAddr::new(address([10, 77, 0, 5], 5), 5000);
        let remote = SocketAddr::new(address([192, 0, 2, 1], 1), 80);
        let (ours, host) = UnixStream::pair().expect("a pair of sockets");
        for socket in [&ours, &host] {
            socket
                .set_nonblocking(true)
                .expect("a socket that does not block");
        }
        let now = Instant::now();
        let mut stack = Stack::new(MTU, now, 1);
        let connection = match is_forwarded {
            true => Connection::connect(ours.into(), guest, remote, BUFFER_BYTES, &mut stack, now),
            false => Connection::accept(ours.into(), remote, BUFFER_BYTES, now),
        };
        let output = Room {
            has_room: true,
            empty: 0,
            acknowledgeable: 0,
        };
        let mut conversation = Self {
            stack,
            connection: Some(connection),
            host,
            output,
            guest,
            remote,
            now,
            next: 1,
            guest_sent: 0,
            host_sent: 0,
            host_received: 0,
        };
        if !is_forwarded {
            conversation.send(syn);
        }
        conversation.turn();
        conversation
    }

    /// Sends a segment of the guest.
    pub fn send(&mut self, segment: &Segment<'_>) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        let options = &segment.options[..segment.options.len().min(40) / 4 * 4];
        let payload = usize::from(segment.payload).min(MTU - 120);
        let body = TCP_BYTES + options.len() + payload;
        let (source, destination) = (self.guest.ip().into(), self.remote.ip().into());
        let ip = IpRepr::new(source, destination, IpProtocol::Tcp, body, 64);
        let mut packet = vec![0; ip.buffer_len()];
        ip.emit(&mut packet[..], &ChecksumCapabilities::default());
        let mut tcp = TcpPacket::new_unchecked(&mut packet[ip.header_len()..]);
        tcp.set_src_port(self.guest.port());
        tcp.set_dst_port(self.remote.port());
        tcp.set_header_len((TCP_BYTES + options.len()) as u8);
        tcp.clear_flags();
        tcp.set_fin(segment.flags & 1 != 0);
        tcp.set_syn(segment.flags & 2 != 0);
        tcp.set_rst(segment.flags & 4 != 0);
        tcp.set_psh(segment.flags & 8 != 0);
        tcp.set_ack(segment.flags & 16 != 0);
        tcp.set_seq_number(TcpSeqNumber(self.next.wrapping_add(segment.sequence)));
        let acknowledged = self.output.acknowledgeable.wrapping_add(segment.acknowledged);
        tcp.set_ack_number(TcpSeqNumber(acknowledged));
        tcp.set_window_len(segment.window);
        tcp.options_mut()[..options.len()].copy_from_slice(options);
        let mut link = Link::new(CardId(1), &mut self.output);
        connection.receive(&packet, &mut self.stack, &mut link, self.now);
        self.guest_sent += payload;
        if segment.sequence == 0 {
            let control = i32::from(segment.flags & 1) + i32::from(segment.flags >> 1 & 1);
            self.next = self.next.wrapping_add(payload as i32 + control);
        }
    }

    /// Sends bytes of the host.
    pub fn write(&mut self, bytes: u16) {
        self.host_sent += self.host.write(&vec![7; usize::from(bytes)]).unwrap_or(0);
    }

    /// Receives bytes at the host.
    pub fn read(&mut self, bytes: u16) {
        let count = self.host.read(&mut vec![0; usize::from(bytes)]).unwrap_or(0);
        self.host_received += count;
        assert!(self.host_received <= self.guest_sent, "bytes that nobody sent");
    }

    /// Ends the host's direction.
    pub fn end(&self) {
        let _ = self.host.shutdown(Shutdown::Write);
    }

    /// Advances the clock.
    pub fn wait(&mut self, time: Duration) {
        self.now += time;
    }

    /// Gives the guest's queue room, or takes it.
    pub fn set_room(&mut self, has_room: bool) {
        self.output.has_room = has_room;
    }

    /// Moves bytes, and closes a connection that has ended.
    pub fn turn(&mut self) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        connection.note_event(true, true);
        self.output.empty = 0;
        let mut link = Link::new(CardId(1), &mut self.output);
        let fate = connection.turn(&mut self.stack, &mut link, self.now);
        let is_full = link.is_full;
        assert!(self.output.empty <= EMPTY_MAX, "segments without an end");
        assert_eq!(self.stack.failures(), 0, "the stack failed");
        if fate == Fate::Open {
            let deadline = connection.deadline(&mut self.stack, is_full, self.now);
            // One that is over time ends in its turn.
            assert!(deadline > self.now, "a timer without an end");
        } else if let Some(connection) = self.connection.take() {
            connection.close(fate);
        }
    }
}

/// Judges bytes as a packet of a guest, and quotes it in a report.
pub fn judge(bytes: &[u8]) {
    let parsed = packet::parse(bytes);
    let gateway: IpAddr = match bytes.first().map(|byte| byte >> 4) {
        Some(4) => [10, 77, 0, 1].into(),
        _ => [0xfd77, 0, 0, 0, 0, 0, 0, 1].into(),
    };
    let mut buffer = [0; 1000];
    let written = packet::write_unreachable(&mut buffer, gateway, bytes, Unreachable::Port);
    assert!(parsed.is_none() || written.is_some(), "a packet without a report");
}
