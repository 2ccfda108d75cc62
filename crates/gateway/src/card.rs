//! The gateway's end of a card's packet socket.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::sockopt::SockType as SocketType;
use nix::sys::socket::{MsgFlags, SockType, getsockopt, recv, sendmsg};
use subnet::offload::{HEADER_BYTES, Header, WHOLE};

/// Bytes of the largest frame: an IP packet of 64 KiB, with an Ethernet header.
const FRAME_BYTES_MAX: usize = 65_535 + 14;
/// Bytes of the largest packet, with the header before its frame.
pub(crate) const PACKET_BYTES_MAX: usize = HEADER_BYTES + FRAME_BYTES_MAX;
/// Greatest number of frames, and of their bytes, that wait for a guest.
const QUEUED_FRAMES_MAX: usize = 1024;
const QUEUED_BYTES_MAX: usize = 1 << 20;

/// A card's socket.
#[derive(Debug)]
pub(crate) struct CardSocket {
    socket: OwnedFd,
    /// Whether each packet has a header before its frame.
    has_headers: bool,
    /// Packets that wait for room.
    queue: VecDeque<Box<[u8]>>,
    queued_bytes: usize,
    /// Bytes of packets of the outside that are not in the queue yet.
    pub(crate) reserved_bytes: usize,
    /// Whether the event loop waits for room in the socket.
    pub(crate) waits_for_room: bool,
    /// Whether the translator knows that the card has no room.
    pub(crate) has_held_up: bool,
}

/// Result of reading a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// A packet of this many bytes.
    Packet(usize),
    /// No packet waits.
    Empty,
    /// The shard's end is closed.
    Ended,
}

impl CardSocket {
    /// Takes the socket of a card. `has_headers` means that each packet has a header of virtio-net before its
    /// frame.
    ///
    /// # Errors
    /// If it is no packet socket.
    pub(crate) fn new(socket: OwnedFd, has_headers: bool) -> io::Result<Self> {
        if getsockopt(&socket, SocketType)? != SockType::SeqPacket {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self {
            socket,
            has_headers,
            queue: VecDeque::new(),
            queued_bytes: 0,
            reserved_bytes: 0,
            waits_for_room: false,
            has_held_up: false,
        })
    }

    /// Whether each packet has a header before its frame.
    pub(crate) fn has_headers(&self) -> bool {
        self.has_headers
    }

    /// Returns the header and the frame of a packet. A packet without a whole header has an empty frame,
    /// which is malformed.
    pub(crate) fn split<'a>(&self, packet: &'a [u8]) -> (Header, &'a [u8]) {
        if !self.has_headers {
            return (WHOLE, packet);
        }
        match packet.split_first_chunk() {
            Some((header, frame)) => (*header, frame),
            None => (WHOLE, &[]),
        }
    }

    /// Reads the next packet of the guest.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> Read {
        match recv(self.socket.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
            // An empty packet of a hostile shard looks the same; the event tells them apart.
            Ok(0) => Read::Ended,
            Ok(bytes) => Read::Packet(bytes),
            Err(Errno::EAGAIN | Errno::EINTR) => Read::Empty,
            Err(_) => Read::Ended,
        }
    }

    /// Whether a frame of the largest size has room.
    pub(crate) fn has_room(&self) -> bool {
        let bytes = self.queued_bytes + self.reserved_bytes + PACKET_BYTES_MAX;
        bytes <= QUEUED_BYTES_MAX && self.queue.len() < QUEUED_FRAMES_MAX
    }

    /// Sends a whole frame to the guest, now or when the socket has room. Returns false if it is lost.
    pub(crate) fn push(&mut self, frame: &[u8]) -> bool {
        self.push_with(&WHOLE, frame)
    }

    /// Sends a frame with the header that describes it. A socket without headers leaves the header out.
    pub(crate) fn push_with(&mut self, header: &Header, frame: &[u8]) -> bool {
        let header = if self.has_headers { &header[..] } else { &[] };
        let parts = [header, frame];
        if self.queue.is_empty() {
            match self.try_send(parts) {
                Sent::Done => return true,
                Sent::Lost => return false,
                Sent::NoRoom => {}
            }
        }
        let has_room = self.queue.len() < QUEUED_FRAMES_MAX
            && self.queued_bytes.saturating_add(header.len() + frame.len()) <= QUEUED_BYTES_MAX;
        if has_room {
            self.queued_bytes += header.len() + frame.len();
            self.queue.push_back(parts.concat().into());
        }
        has_room
    }

    /// Sends the frames that wait, as far as the socket has room. Returns whether none waits.
    pub(crate) fn flush(&mut self) -> bool {
        while let Some(packet) = self.queue.front() {
            if self.try_send([packet, &[]]) == Sent::NoRoom {
                return false;
            }
            if let Some(packet) = self.queue.pop_front() {
                self.queued_bytes -= packet.len();
            }
        }
        true
    }

    /// Whether frames wait for room.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Sends both parts as one packet.
    fn try_send(&self, parts: [&[u8]; 2]) -> Sent {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let parts = parts.map(IoSlice::new);
        match sendmsg::<()>(self.socket.as_raw_fd(), &parts, &[], flags, None) {
            Ok(_) => Sent::Done,
            Err(Errno::EAGAIN | Errno::EINTR) => Sent::NoRoom,
            // A frame that no buffer of the host holds, or a shard that is gone.
            Err(_) => Sent::Lost,
        }
    }
}

impl AsFd for CardSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sent {
    Done,
    NoRoom,
    Lost,
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{AddressFamily, SockFlag, send, socketpair};

    use super::*;

    fn pair(kind: SockType) -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).unwrap()
    }

    #[test]
    fn slow_receiver_gets_a_bounded_number_of_frames_in_order() {
        let (near, far) = pair(SockType::SeqPacket);
        let mut card = CardSocket::new(far, false).unwrap();
        let mut taken = 0_u32;
        while card.push(&taken.to_be_bytes()) {
            taken += 1;
            assert!(taken < 5000, "frames are lost at some time");
        }
        assert!(taken as usize >= QUEUED_FRAMES_MAX && card.is_waiting() && !card.has_room());
        let mut buffer = [0; 100];
        for number in 0..taken {
            let bytes = recv(near.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT).unwrap();
            assert_eq!(buffer[..bytes], number.to_be_bytes());
            card.flush();
        }
        assert!(card.flush() && card.has_room());
        assert_eq!(card.queued_bytes, 0);
    }

    #[test]
    fn bytes_that_wait_are_bounded() {
        let (_near, far) = pair(SockType::SeqPacket);
        let mut card = CardSocket::new(far, false).unwrap();
        let frame = vec![1; FRAME_BYTES_MAX];
        while card.push(&frame) {}
        assert!(card.queued_bytes <= QUEUED_BYTES_MAX && !card.has_room());
    }

    #[test]
    fn only_a_packet_socket_is_a_cards() {
        let (near, _far) = pair(SockType::Stream);
        CardSocket::new(near, false).unwrap_err();
    }

    #[test]
    fn end_of_the_shard_is_noticed() {
        let (near, far) = pair(SockType::SeqPacket);
        let card = CardSocket::new(far, false).unwrap();
        let mut buffer = [0; 10];
        assert_eq!(card.read(&mut buffer), Read::Empty);
        send(near.as_raw_fd(), &[1, 2], MsgFlags::empty()).unwrap();
        assert_eq!(card.read(&mut buffer), Read::Packet(2));
        drop(near);
        assert_eq!(card.read(&mut buffer), Read::Ended);
    }

    #[test]
    fn packets_with_headers_keep_them_while_they_wait() {
        let (near, far) = pair(SockType::SeqPacket);
        let mut card = CardSocket::new(far, true).unwrap();
        let header: Header = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0];
        let mut sent = 0_u8;
        while !card.is_waiting() {
            assert!(card.push_with(&header, &[sent; 20]));
            sent = sent.checked_add(1).unwrap_or(0);
        }
        assert!(card.push(&[sent; 20]));
        assert_eq!(card.queued_bytes, 2 * (HEADER_BYTES + 20));
        let mut buffer = [0; 100];
        let mut last = WHOLE;
        loop {
            card.flush();
            let Ok(bytes) = recv(near.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) else {
                break;
            };
            let (read, frame) = card.split(&buffer[..bytes]);
            assert_eq!(frame.len(), 20);
            if frame[0] != sent {
                assert_eq!(read, header);
            }
            last = read;
        }
        assert_eq!(last, WHOLE, "the whole frame is the last one");
        assert_eq!(card.split(&[1; 11]), (WHOLE, &[][..]), "a part of a header");
    }
}
