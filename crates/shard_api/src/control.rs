//! The control socket between a monitor and a shard: orders one way, reports the other, each as JSON.
//!
//! It is a pair of `SOCK_SEQPACKET` sockets: a packet is whole or absent. A message is one packet, or several
//! where it is longer than a packet may be: [`Assembly`] joins them. A launch may be longer (a VM with many
//! disks or NUMA nodes), and so may the status of a VM with many vCPUs or devices; an order never is. Files
//! go with a message's first packet.
//!
//! Several readers may use one socket after each other. One that died in the middle of a message has taken
//! its first packets; the next reader leaves the rest out, and begins with the next message.

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

use crate::message::{FILES_MAX, Files, ReceiveError};

/// Bytes of a packet at most, its header included. Linux refuses one that is longer than the sender's buffer,
/// which has 208 KiB where nothing else is configured, and finds memory for this much in pieces.
pub const PACKET_BYTES_MAX: usize = 64 << 10;
/// Bytes of a message at most.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Bytes of an order at most, as a packet.
pub const ORDER_BYTES_MAX: usize = 4096;
/// The length of the message, then the place of the packet's bytes in it, 32 bits each, little-endian.
/// The same in all versions, so that each can tell another its own.
const HEADER_BYTES: usize = 8;

/// Joins the packets of messages.
#[derive(Debug, Default)]
pub struct Assembly {
    /// The length of the message whose first packets have come.
    total: usize,
    bytes: Vec<u8>,
}

impl Assembly {
    /// Takes a packet, and gives the message that it completes.
    ///
    /// # Errors
    /// [`ReceiveError::Packet`] if the packet is none of a message, or does not follow the one before.
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
            // The sender may have died in the middle of the message before.
            self.bytes.clear();
            self.total = total;
        } else if self.bytes.is_empty() {
            // The rest of a message whose first packets another reader took.
            return Ok(None);
        } else if (offset, total) != (self.bytes.len(), self.total) {
            return Err(ReceiveError::Packet);
        }
        self.bytes.extend_from_slice(bytes);
        Ok((self.bytes.len() == total).then(|| std::mem::take(&mut self.bytes)))
    }
}

/// The bytes of a packet, and the files that came with it.
type Packet = (Vec<u8>, Vec<File>);

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
    /// Makes both ends.
    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (near, far) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        Ok((Self(near), Self(far)))
    }

    /// The same end once more.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Ends the connection for both ends, whoever has copies of them. What was sent before can still be
    /// received.
    pub fn shut_down(&self) {
        // One that the other end has closed has nothing more to end.
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }

    /// Sends a message with files, whose indices the message uses. Waits for room.
    ///
    /// # Errors
    /// [`ReceiveError::TooLong`] and [`ReceiveError::TooManyFiles`] before anything is sent.
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

    /// Sends a message that fits in one packet of [`ORDER_BYTES_MAX`], and never waits.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room, `InvalidInput` if the message is too long.
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

    /// Receives the next packet, of `max` bytes at most; none at the end. Files that come with it are closed.
    ///
    /// # Errors
    /// [`ReceiveError::Packet`] if it is longer, or brings files.
    pub fn receive_packet(&self, max: usize) -> Result<Option<Vec<u8>>, ReceiveError> {
        // Without room for them the kernel closes files that come along, and says so.
        Ok(self.receive_into(max, None)?.map(|(packet, _)| packet))
    }

    /// Receives a message and its files: the first, which comes from a monitor.
    pub fn receive_with_files(&self) -> Result<(Vec<u8>, Files), ReceiveError> {
        let mut rights = nix::cmsg_space!([RawFd; FILES_MAX]);
        let first = self.receive_into(PACKET_BYTES_MAX, Some(&mut rights))?;
        let (mut packet, files) = first.ok_or(ReceiveError::Incomplete)?;
        let mut assembly = Assembly::default();
        loop {
            if let Some(message) = assembly.take(&packet)? {
                return Ok((message, Files::of(files)));
            }
            let next = self.receive_packet(PACKET_BYTES_MAX)?;
            packet = next.ok_or(ReceiveError::Incomplete)?;
        }
    }

    /// Waits until a packet can be received, or the end. False if none came before `deadline`.
    pub fn wait_until(&self, deadline: Instant) -> io::Result<bool> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            // Rounded up, so that it does not spin through the last millisecond.
            let limit = left + Duration::from_micros(999);
            let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.as_fd(), PollFlags::POLLIN)], limit) {
                Ok(0) | Err(nix::Error::EINTR) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether the other end is closed, or one end was shut down.
    fn has_hung_up(&self) -> io::Result<bool> {
        let mut file = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: reads and writes one structure of ours, and does not wait.
        retry(|| nix::errno::Errno::result(unsafe { libc::poll(&raw mut file, 1, 0) }))?;
        Ok(file.revents & (libc::POLLRDHUP | libc::POLLHUP) != 0)
    }

    /// The next packet with its files, for which `rights` has room; none at the end.
    fn receive_into(
        &self,
        max: usize,
        mut rights: Option<&mut [u8]>,
    ) -> Result<Option<Packet>, ReceiveError> {
        // Its length, so that no packet takes more memory than it has bytes.
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
                // A packet without a byte.
                false => Err(ReceiveError::Packet),
            };
        }
        if length > max {
            return Err(ReceiveError::Packet);
        }
        let mut packet = vec![0; length];
        // A packet is there, so this does not wait.
        let (bytes, flags, files) = retry(|| {
            let mut parts = [IoSliceMut::new(&mut packet)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let message = recvmsg::<()>(self.0.as_raw_fd(), &mut parts, rights.as_deref_mut(), flags)?;
            let mut files = Vec::new();
            // Those that were cut show in the flags.
            for control in message.cmsgs().into_iter().flatten() {
                if let ControlMessageOwned::ScmRights(fds) = control {
                    // SAFETY: the kernel has just given us these descriptors; nobody else knows them.
                    files.extend(fds.into_iter().map(|fd| unsafe { File::from_raw_fd(fd) }));
                }
            }
            Ok((message.bytes, message.flags, files))
        })?;
        if bytes != length || flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
            return Err(ReceiveError::Packet);
        }
        Ok(Some((packet, files)))
    }
}

/// Calls again what a signal has interrupted, and what tells that the other end is gone: where packets in
/// that end had not been received, the kernel says so once, before it gives what that end has sent.
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

    /// All messages that come until the other end is closed.
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
        // With the next it fits the socket: nothing receives meanwhile.
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
        // Without any other the first is incomplete.
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
        // An end that was shut down, too, though another process has a copy of it.
        let (near, _far) = ControlSocket::pair().unwrap();
        near.shut_down();
        assert!(near.receive_packet(PACKET_BYTES_MAX).unwrap().is_none());
    }

    #[test]
    fn packets_that_make_no_sense_are_refused() {
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
    fn last_message_comes_though_its_sender_left_others_unread() {
        let (near, far) = ControlSocket::pair().unwrap();
        near.try_send(&"unread").unwrap();
        far.send(&"last", &[]).unwrap();
        drop(far);
        assert_eq!(received(&near), [b"\"last\""]);
        assert_eq!(near.try_send(&"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn files_come_with_the_first_packet_of_a_long_message_and_where_none_are_wanted_are_closed() {
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
        assert_eq!(received(&seen), Vec::<Vec<u8>>::new(), "no copy is left");
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
