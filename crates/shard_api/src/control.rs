//! The control socket between a monitor and a shard: orders one way, reports the other, each as JSON.
//!
//! It is a pair of `SOCK_SEQPACKET` sockets: a packet is whole or absent. A message is one packet, or several
//! if it is longer than a packet may be: [`Assembly`] joins them. A launch may be longer (a VM with many
//! disks or NUMA nodes), and so may the status of a VM with many vCPUs or devices; an order never is. Files
//! go with a message's first packet.
//!
//! Several readers may use one socket in succession. A reader that died in the middle of a message has
//! received its first packets. The next reader skips the rest and begins with the next message.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType, recv,
    recvmsg, sendmsg, shutdown, socketpair,
};
use serde::Serialize;

use crate::launch::STATISTICS_FILES_MAX;
use crate::message::{FILES_MAX, Files, ReceiveError};

/// Greatest size of a packet, bytes, header included. Linux refuses a packet that is longer than the sender's
/// buffer, which has 208 KiB by default, and can allocate this size in pieces.
pub const PACKET_BYTES_MAX: usize = 64 << 10;
/// Greatest size of a message, bytes.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Greatest size of an order's packet, bytes.
pub const ORDER_BYTES_MAX: usize = 4096;
/// Length of the header: the length of the message, then the offset of the packet's bytes in it, 32 bits
/// each, little-endian. It is the same in all versions, so that each can report its own.
const HEADER_BYTES: usize = 8;

/// Joins the packets of messages.
#[derive(Debug, Default)]
pub struct Assembly {
    /// Length of the message whose first packets have arrived.
    total: usize,
    bytes: Vec<u8>,
}

impl Assembly {
    /// Adds a packet, and returns the message that it completes.
    ///
    /// # Errors
    /// Fails with [`ReceiveError::Packet`] if the packet is not part of a message, or does not follow the
    /// last one.
    pub fn take(&mut self, packet: &[u8]) -> Result<Option<Vec<u8>>, ReceiveError> {
        let header = packet.split_first_chunk::<HEADER_BYTES>();
        let (&[a, b, c, d, e, f, g, h], bytes) = header.ok_or(ReceiveError::Packet)?;
        let total = u32::from_le_bytes([a, b, c, d]) as usize;
        let offset = u32::from_le_bytes([e, f, g, h]) as usize;
        if total > MESSAGE_BYTES_MAX {
            return Err(ReceiveError::TooLong(total));
        }
        if bytes.is_empty() || offset.saturating_add(bytes.len()) > total {
            return Err(ReceiveError::Packet);
        }
        if offset == 0 {
            // The sender may have died in the middle of the last message.
            self.bytes.clear();
            self.total = total;
        } else if self.bytes.is_empty() {
            // The rest of a message whose first packets another reader received.
            return Ok(None);
        } else if (offset, total) != (self.bytes.len(), self.total) {
            return Err(ReceiveError::Packet);
        }
        self.bytes.extend_from_slice(bytes);
        Ok((self.bytes.len() == total).then(|| std::mem::take(&mut self.bytes)))
    }
}

/// A packet that was received.
#[derive(Debug)]
pub struct Packet {
    /// Payload of the packet.
    pub bytes: Vec<u8>,
    /// Files that were attached, in their order.
    pub files: Vec<File>,
    /// Whether it had more files: there was no room for them, or this process has no descriptors left.
    pub is_cut: bool,
}

/// One end of a control socket.
#[derive(Debug)]
pub struct ControlSocket(OwnedFd);

impl From<OwnedFd> for ControlSocket {
    fn from(socket: OwnedFd) -> Self {
        Self(socket)
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ControlSocket {
    /// Creates both ends.
    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (near, far) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        Ok((Self(near), Self(far)))
    }

    /// Duplicates this end.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Ends the connection for both ends, including all their copies. Messages that were sent before can
    /// still be received.
    pub fn shut_down(&self) {
        // A connection that the other end has closed is ended already.
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }

    /// Sends a message with files, whose indices the message uses. Waits for room.
    ///
    /// # Errors
    /// Fails with [`ReceiveError::TooLong`] or [`ReceiveError::TooManyFiles`] before anything is sent.
    pub fn send(&self, message: &impl Serialize, files: &[BorrowedFd<'_>]) -> Result<(), ReceiveError> {
        if files.len() > FILES_MAX {
            return Err(ReceiveError::TooManyFiles(files.len()));
        }
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(ReceiveError::TooLong(bytes.len()));
        }
        let (mut offset, mut files) = (0, files);
        for piece in bytes.chunks(PACKET_BYTES_MAX - HEADER_BYTES) {
            self.send_packet(bytes.len(), offset, piece, files, MsgFlags::empty())?;
            offset += piece.len();
            files = &[];
        }
        Ok(())
    }

    /// Sends a message that fits in one packet of [`ORDER_BYTES_MAX`]; never blocks.
    ///
    /// # Errors
    /// Fails with `WouldBlock` if there is no room, and `InvalidInput` if the message is too long.
    pub fn try_send(&self, message: &impl Serialize) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > ORDER_BYTES_MAX - HEADER_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.send_packet(bytes.len(), 0, &bytes, &[], MsgFlags::MSG_DONTWAIT)
    }

    fn send_packet(
        &self,
        total: usize,
        offset: usize,
        bytes: &[u8],
        files: &[BorrowedFd<'_>],
        flags: MsgFlags,
    ) -> io::Result<()> {
        let mut header = [0; HEADER_BYTES];
        // Both are at most MESSAGE_BYTES_MAX.
        header[..4].copy_from_slice(&(total as u32).to_le_bytes());
        header[4..].copy_from_slice(&(offset as u32).to_le_bytes());
        let files: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&files)];
        let rights = if files.is_empty() { &[] } else { &rights[..] };
        let parts = [IoSlice::new(&header), IoSlice::new(bytes)];
        let flags = flags | MsgFlags::MSG_NOSIGNAL;
        retry(|| sendmsg::<()>(self.0.as_raw_fd(), &parts, rights, flags, None)).map(drop)
    }

    /// Receives the next packet, of at most `max` bytes; returns none at the end. Files of the packet are
    /// closed.
    ///
    /// # Errors
    /// Fails with [`ReceiveError::Packet`] if the packet is longer, or has files.
    pub fn receive_packet(&self, max: usize) -> Result<Option<Vec<u8>>, ReceiveError> {
        // Without room for them the kernel closes the files and reports it.
        match self.receive_into(max, None)? {
            Some(packet) if packet.is_cut => Err(ReceiveError::Packet),
            packet => Ok(packet.map(|packet| packet.bytes)),
        }
    }

    /// Receives the next packet as [`Self::receive_packet`] does, with up to [`STATISTICS_FILES_MAX`] files.
    ///
    /// # Errors
    /// Fails with [`ReceiveError::Packet`] if the packet is longer.
    pub fn receive_packet_with_files(&self, max: usize) -> Result<Option<Packet>, ReceiveError> {
        let mut rights = nix::cmsg_space!([RawFd; STATISTICS_FILES_MAX]);
        self.receive_into(max, Some(&mut rights))
    }

    /// Receives a message and its files: the first message, from a monitor.
    pub fn receive_with_files(&self) -> Result<(Vec<u8>, Files), ReceiveError> {
        let mut rights = nix::cmsg_space!([RawFd; FILES_MAX]);
        let first = self.receive_into(PACKET_BYTES_MAX, Some(&mut rights))?;
        let first = first.ok_or(ReceiveError::Incomplete)?;
        if first.is_cut {
            return Err(ReceiveError::Packet);
        }
        let (mut packet, files) = (first.bytes, first.files);
        let mut assembly = Assembly::default();
        loop {
            if let Some(message) = assembly.take(&packet)? {
                return Ok((message, Files::of(files)));
            }
            let next = self.receive_packet(PACKET_BYTES_MAX)?;
            packet = next.ok_or(ReceiveError::Incomplete)?;
        }
    }

    /// Waits for a packet or the end. Returns false if neither arrived before `deadline`.
    pub fn wait_until(&self, deadline: Instant) -> io::Result<bool> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            // Rounded up, so that the last millisecond is waited for instead of spinning.
            let limit = left + Duration::from_micros(999);
            let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.as_fd(), PollFlags::POLLIN)], limit) {
                Ok(0) | Err(nix::Error::EINTR) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns whether the other end is closed, or one end was shut down.
    fn has_hung_up(&self) -> io::Result<bool> {
        let mut file = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: reads and writes one local structure, and does not block.
        retry(|| nix::errno::Errno::result(unsafe { libc::poll(&raw mut file, 1, 0) }))?;
        Ok(file.revents & (libc::POLLRDHUP | libc::POLLHUP) != 0)
    }

    /// Returns the next packet with its files, for which `rights` has room; none at the end.
    fn receive_into(
        &self,
        max: usize,
        mut rights: Option<&mut [u8]>,
    ) -> Result<Option<Packet>, ReceiveError> {
        // The length, so that no packet takes more memory than its bytes.
        let length = retry(|| {
            recv(
                self.0.as_raw_fd(),
                &mut [],
                MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC,
            )
        })?;
        if length == 0 {
            return match self.has_hung_up()? {
                true => Ok(None),
                // An empty packet.
                false => Err(ReceiveError::Packet),
            };
        }
        if length > max {
            return Err(ReceiveError::Packet);
        }
        let mut packet = vec![0; length];
        // A packet is available, so this does not block.
        let (bytes, flags, files) = retry(|| {
            let mut parts = [IoSliceMut::new(&mut packet)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let message = recvmsg::<()>(self.0.as_raw_fd(), &mut parts, rights.as_deref_mut(), flags)?;
            let mut files = Vec::new();
            // The flags report files that were cut off.
            for control in message.cmsgs().into_iter().flatten() {
                if let ControlMessageOwned::ScmRights(fds) = control {
                    // SAFETY: the kernel has just returned these descriptors, which have no other owner.
                    files.extend(fds.into_iter().map(|fd| unsafe { File::from_raw_fd(fd) }));
                }
            }
            Ok((message.bytes, message.flags, files))
        })?;
        if bytes != length || flags.contains(MsgFlags::MSG_TRUNC) {
            return Err(ReceiveError::Packet);
        }
        Ok(Some(Packet {
            bytes: packet,
            files,
            is_cut: flags.contains(MsgFlags::MSG_CTRUNC),
        }))
    }
}

/// Repeats a call that a signal interrupted, or that reports that the other end is gone. If that end had
/// unread packets, the kernel reports this once, before it returns the packets that the end has sent.
fn retry<T>(mut call: impl FnMut() -> nix::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(nix::Error::EINTR | nix::Error::ECONNRESET) => {}
            other => return other.map_err(io::Error::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use serde_json::json;

    use super::*;

    fn packet(total: u32, offset: u32, bytes: &[u8]) -> Vec<u8> {
        [&total.to_le_bytes(), &offset.to_le_bytes(), bytes].concat()
    }

    /// Returns all messages until the other end is closed.
    fn received(socket: &ControlSocket) -> Vec<Vec<u8>> {
        let (mut assembly, mut messages) = (Assembly::default(), Vec::new());
        while let Some(packet) = socket.receive_packet(PACKET_BYTES_MAX).unwrap() {
            messages.extend(assembly.take(&packet).unwrap());
        }
        messages
    }

    #[test]
    fn messages_of_all_lengths_come_whole_and_in_order() {
        let piece = PACKET_BYTES_MAX - HEADER_BYTES;
        // As JSON a text has two bytes more.
        let lengths = [0, 1, piece - 2, piece - 1, 2 * piece - 2, MESSAGE_BYTES_MAX - 2];
        let texts = lengths.map(|length| "x".repeat(length));
        let (near, far) = ControlSocket::pair().unwrap();
        std::thread::scope(|scope| {
            let sent = texts.clone();
            scope.spawn(move || sent.iter().for_each(|text| far.send(text, &[]).unwrap()));
            let received = received(&near);
            let received: Vec<String> = received
                .iter()
                .map(|message| serde_json::from_slice(message).unwrap())
                .collect();
            assert!(received == texts);
        });
    }

    #[test]
    fn message_that_is_too_long_is_not_sent_at_all() {
        let (near, far) = ControlSocket::pair().unwrap();
        let refused = far.send(&"x".repeat(MESSAGE_BYTES_MAX - 1), &[]).unwrap_err();
        assert!(
            matches!(refused, ReceiveError::TooLong(bytes) if bytes == MESSAGE_BYTES_MAX + 1),
            "{refused}"
        );
        let refused = far.try_send(&"x".repeat(ORDER_BYTES_MAX)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        let files = vec![near.as_fd(); FILES_MAX + 1];
        let refused = far.send(&"x", &files).unwrap_err();
        assert!(matches!(refused, ReceiveError::TooManyFiles(254)), "{refused}");
        drop(far);
        assert_eq!(received(&near), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn reader_after_one_that_died_in_the_middle_begins_with_the_next_message() {
        let (near, far) = ControlSocket::pair().unwrap();
        // It fits into the socket with the next message: nothing is received meanwhile.
        far.send(&"x".repeat(2 * PACKET_BYTES_MAX), &[]).unwrap();
        far.send(&"next", &[]).unwrap();
        drop(far);
        let first = near.receive_packet(PACKET_BYTES_MAX).unwrap();
        assert_eq!(first.map(|packet| packet.len()), Some(PACKET_BYTES_MAX));
        assert_eq!(received(&near), [b"\"next\""]);
    }

    #[test]
    fn message_after_one_whose_sender_died_in_the_middle_comes_whole() {
        let mut assembly = Assembly::default();
        assert_eq!(assembly.take(&packet(10, 0, b"abc")).unwrap(), None);
        assert_eq!(assembly.take(&packet(2, 0, b"{}")).unwrap(), Some(b"{}".to_vec()));
        // Without a further message the first is incomplete.
        let (near, far) = ControlSocket::pair().unwrap();
        far.send_packet(10, 0, b"abc", &[], MsgFlags::empty()).unwrap();
        drop(far);
        let refused = near.receive_with_files().err().unwrap();
        assert!(matches!(refused, ReceiveError::Incomplete), "{refused}");
    }

    #[test]
    fn packet_without_a_byte_is_malformed_and_no_end() {
        let (near, far) = ControlSocket::pair().unwrap();
        nix::sys::socket::send(far.as_fd().as_raw_fd(), &[], MsgFlags::empty()).unwrap();
        let refused = near.receive_packet(PACKET_BYTES_MAX).unwrap_err();
        assert!(matches!(refused, ReceiveError::Packet), "{refused}");
        let (near, far) = ControlSocket::pair().unwrap();
        drop(far);
        assert!(near.receive_packet(PACKET_BYTES_MAX).unwrap().is_none());
        // Also an end that was shut down, although another process has a copy of it.
        let (near, _far) = ControlSocket::pair().unwrap();
        near.shut_down();
        assert!(near.receive_packet(PACKET_BYTES_MAX).unwrap().is_none());
    }

    #[test]
    fn invalid_packets_are_refused() {
        let too_long = MESSAGE_BYTES_MAX as u32 + 1;
        for wrong in [
            vec![],
            packet(3, 0, b"abc")[..HEADER_BYTES - 1].to_vec(),
            packet(0, 0, b""),
            packet(3, 0, b""),
            packet(3, 0, b"abcd"),
            packet(3, 3, b"a"),
            packet(3, u32::MAX, b"a"),
            packet(too_long, 0, b"abc"),
        ] {
            assert!(Assembly::default().take(&wrong).is_err(), "{wrong:?}");
        }
        for second in [packet(5, 2, b"c"), packet(5, 4, b"c"), packet(6, 3, b"c")] {
            let mut assembly = Assembly::default();
            assert_eq!(assembly.take(&packet(5, 0, b"abc")).unwrap(), None);
            assert!(assembly.take(&second).is_err(), "{second:?}");
        }
    }

    #[test]
    fn last_message_arrives_although_its_sender_left_others_unread() {
        let (near, far) = ControlSocket::pair().unwrap();
        near.try_send(&"unread").unwrap();
        far.send(&"last", &[]).unwrap();
        drop(far);
        assert_eq!(received(&near), [b"\"last\""]);
        assert_eq!(near.try_send(&"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn files_arrive_with_the_first_packet_and_are_closed_if_not_expected() {
        let (near, far) = ControlSocket::pair().unwrap();
        let text = "x".repeat(2 * PACKET_BYTES_MAX);
        let (seen, passed) = ControlSocket::pair().unwrap();
        far.send(&text, &[passed.as_fd()]).unwrap();
        let (message, mut files) = near.receive_with_files().unwrap();
        assert_eq!(serde_json::from_slice::<String>(&message).unwrap(), text);
        drop(passed);
        let file = ControlSocket::from(OwnedFd::from(files.take(crate::launch::Fd(0)).unwrap()));
        file.try_send(&json!(1)).unwrap();
        drop(file);
        assert_eq!(received(&seen), [b"1"]);
        assert!(files.take(crate::launch::Fd(1)).is_err());

        let (seen, passed) = ControlSocket::pair().unwrap();
        far.send(&"x", &vec![passed.as_fd(); FILES_MAX]).unwrap();
        drop(passed);
        let refused = near.receive_packet(PACKET_BYTES_MAX).unwrap_err();
        assert!(matches!(refused, ReceiveError::Packet), "{refused}");
        assert_eq!(
            received(&seen),
            Vec::<Vec<u8>>::new(),
            "a copy of the file is left"
        );
    }

    #[test]
    fn wait_for_a_packet_ends_at_its_deadline_or_with_the_other_end() {
        let (near, far) = ControlSocket::pair().unwrap();
        let start = Instant::now();
        assert!(!near.wait_until(start + Duration::from_millis(20)).unwrap());
        assert!(start.elapsed() >= Duration::from_millis(20));
        drop(far);
        assert!(near.wait_until(start + Duration::from_secs(100)).unwrap());
    }
}
