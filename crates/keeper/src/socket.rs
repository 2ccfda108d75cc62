//! The socket between a monitor and a keeper: packets of bytes and descriptors, sent and received without
//! waiting.

use std::fs::{self, File, Permissions};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use libc::{c_int, c_void};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, getsockopt, listen, socket,
    socketpair, sockopt,
};
use nix::unistd::geteuid;

use crate::message::{FILES_MAX, PACKET_BYTES_MAX};

/// Bytes of ancillary data that hold [`FILES_MAX`] descriptors and their header, in units of its alignment.
const CONTROL_WORDS: usize = (FILES_MAX * size_of::<c_int>()).div_ceil(8) + 4;

/// Connections that wait to be accepted at most.
const CONNECTIONS_MAX: i32 = 8;

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// The bytes; one more than a packet may have, where the packet was longer.
    pub bytes: Vec<u8>,
    /// The descriptors, closed at an exec.
    pub files: Vec<OwnedFd>,
    /// Whether descriptors were lost, since this process has too many.
    pub is_short_of_files: bool,
}

/// One end of a `SOCK_SEQPACKET` pair.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Two connected ends, which are closed at an exec.
    ///
    /// # Errors
    /// Those of `socketpair`.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let kind = SockType::SeqPacket;
        let (near, far) = socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC)?;
        Ok((Self(near), far))
    }

    /// Connects to a keeper's [`Listener`]. The keeper accepts the connection when its monitor is gone.
    ///
    /// # Errors
    /// If no keeper listens there, or too many wait.
    pub fn connect(path: &Path) -> io::Result<OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let end = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        connect(end.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(end)
    }

    /// A socket at `path` that only this user may connect to, and that does not listen yet.
    ///
    /// # Errors
    /// Those of `bind`: if the path exists or is too long.
    pub fn bind(path: &Path) -> io::Result<OwnedFd> {
        let end = socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        bind(end.as_raw_fd(), &UnixAddr::new(path)?)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok(end)
    }

    /// Adopts an end that another process created. Standard input is replaced by `/dev/null`.
    ///
    /// # Errors
    /// If the descriptor is none of a `SOCK_SEQPACKET` socket.
    pub fn take(end: OwnedFd) -> io::Result<Self> {
        if getsockopt(&end, sockopt::SockType)? != SockType::SeqPacket {
            return Err(io::Error::other("the descriptor is no packet socket"));
        }
        // SAFETY: duplicates an open descriptor.
        let copy = unsafe { libc::fcntl(end.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 3) };
        if copy < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, ours alone.
        let socket = Self(unsafe { OwnedFd::from_raw_fd(copy) });
        if end.as_raw_fd() == libc::STDIN_FILENO {
            let null = File::open("/dev/null")?;
            // The number stays in use.
            let end = ManuallyDrop::new(end);
            // SAFETY: replaces a descriptor that this function owns.
            if unsafe { libc::dup2(null.as_raw_fd(), end.as_raw_fd()) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(socket)
    }

    /// Process id of the process that made the pair.
    ///
    /// # Errors
    /// Those of `SO_PEERCRED`.
    pub fn maker(&self) -> io::Result<i32> {
        Ok(getsockopt(&self.0, sockopt::PeerCredentials)?.pid())
    }

    /// Sends a packet, and never waits.
    ///
    /// # Errors
    /// `WouldBlock` where the peer has left too many packets unread; others where it is gone.
    pub fn send(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        if files.len() > FILES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut control = [0_u64; CONTROL_WORDS];
        let mut io_vector = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        // SAFETY: a structure of integers and pointers, for which zero is valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &raw mut io_vector;
        header.msg_iovlen = 1;
        if !files.is_empty() {
            let payload_bytes = size_of_val(files) as u32;
            header.msg_control = control.as_mut_ptr().cast();
            // SAFETY: computes a length.
            header.msg_controllen = unsafe { libc::CMSG_SPACE(payload_bytes) } as usize;
            // SAFETY: the buffer has room for the header and FILES_MAX numbers, and is aligned as headers
            // are.
            unsafe {
                let first = libc::CMSG_FIRSTHDR(&raw const header);
                (*first).cmsg_level = libc::SOL_SOCKET;
                (*first).cmsg_type = libc::SCM_RIGHTS;
                (*first).cmsg_len = libc::CMSG_LEN(payload_bytes) as usize;
                let data = libc::CMSG_DATA(first).cast::<c_int>();
                for (index, file) in files.iter().enumerate() {
                    data.add(index).write_unaligned(file.as_raw_fd());
                }
            }
        }
        loop {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            // SAFETY: the header names memory that lives until the call returns.
            if unsafe { libc::sendmsg(self.0.as_raw_fd(), &raw const header, flags) } >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Receives a packet, and never waits. None when the peer is gone, or has sent an empty packet.
    ///
    /// # Errors
    /// `WouldBlock` where there is no packet; others where the peer is gone.
    pub fn receive(&self) -> io::Result<Option<Packet>> {
        let mut buffer = [0_u8; PACKET_BYTES_MAX + 1];
        let mut control = [0_u64; CONTROL_WORDS];
        let mut io_vector = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        // SAFETY: a structure of integers and pointers, for which zero is valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &raw mut io_vector;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast::<c_void>();
        header.msg_controllen = size_of_val(&control);
        let length = loop {
            let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
            // SAFETY: the header names buffers of ours with their lengths.
            let length = unsafe { libc::recvmsg(self.0.as_raw_fd(), &raw mut header, flags) };
            if length >= 0 {
                break length as usize;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        };
        let files = received_files(&header);
        if length == 0 {
            return Ok(None);
        }
        Ok(Some(Packet {
            bytes: buffer.get(..length).unwrap_or_default().to_vec(),
            files,
            is_short_of_files: header.msg_flags & libc::MSG_CTRUNC != 0,
        }))
    }

    /// Waits until there is a packet or the peer is gone, or, with `for_room`, until there is room for a
    /// packet. Returns whether that happened before the deadline.
    ///
    /// # Errors
    /// Those of `poll`.
    pub fn wait_until(&self, deadline: Instant, for_room: bool) -> io::Result<bool> {
        let wanted = if for_room {
            PollFlags::POLLOUT
        } else {
            PollFlags::POLLIN
        };
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up, so that the last wait is none of zero milliseconds many times.
            let left = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            let mut polled = [PollFd::new(self.0.as_fd(), wanted)];
            match poll(&mut polled, left) {
                Ok(0) if Instant::now() >= deadline => return Ok(false),
                Ok(0) | Err(nix::Error::EINTR) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A socket that cells connect to.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens on a bound socket. From now on this process is the peer of each connecting process.
    ///
    /// # Errors
    /// If the descriptor is none of a bound `SOCK_SEQPACKET` socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        if getsockopt(&socket, sockopt::SockType)? != SockType::SeqPacket {
            return Err(io::Error::other("the descriptor is no packet socket"));
        }
        // A peer that is gone before it is accepted must not hold this process up.
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL)?);
        fcntl(&socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        listen(&socket, Backlog::new(CONNECTIONS_MAX)?)?;
        Ok(Self(socket))
    }

    /// Accepts a connection of this user or of root, if there is one. Closes others'.
    pub fn accept(&self) -> Option<Socket> {
        loop {
            // SAFETY: accepts a connection, without a place for the peer's address.
            let accepted = unsafe {
                libc::accept4(
                    self.0.as_raw_fd(),
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    libc::SOCK_CLOEXEC,
                )
            };
            if accepted < 0 {
                if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                return None;
            }
            // SAFETY: just made, ours alone.
            let socket = Socket(unsafe { OwnedFd::from_raw_fd(accepted) });
            let peer = getsockopt(&socket.0, sockopt::PeerCredentials).ok()?.uid();
            if peer == 0 || peer == geteuid().as_raw() {
                return Some(socket);
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Takes the descriptors out of a received header, also where some were lost.
fn received_files(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut files = Vec::new();
    // SAFETY: the kernel filled the header, and its buffer lives. Each number is a descriptor that this call
    // made.
    unsafe {
        let mut one = libc::CMSG_FIRSTHDR(header);
        while !one.is_null() {
            if (*one).cmsg_level == libc::SOL_SOCKET && (*one).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*one).cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(one).cast::<c_int>();
                for index in 0..bytes / size_of::<c_int>() {
                    files.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
                }
            }
            one = libc::CMSG_NXTHDR(header, one);
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_carries_as_many_descriptors_as_the_kernel_allows() {
        let (near, far) = Socket::pair().unwrap();
        let far = Socket::take(far).unwrap();
        let null = File::open("/dev/null").unwrap();
        near.send(b"x", &vec![null.as_fd(); FILES_MAX]).unwrap();
        let packet = far.receive().unwrap().unwrap();
        assert_eq!(
            (packet.bytes.as_slice(), packet.files.len()),
            (&b"x"[..], FILES_MAX)
        );
        assert!(!packet.is_short_of_files);
        assert!(near.send(b"x", &vec![null.as_fd(); FILES_MAX + 1]).is_err());
        near.send(&[7; 2 * PACKET_BYTES_MAX], &[]).unwrap();
        assert_eq!(far.receive().unwrap().unwrap().bytes.len(), PACKET_BYTES_MAX + 1);
        assert_eq!(far.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let soon = Instant::now() + Duration::from_millis(20);
        assert!(!far.wait_until(soon, false).unwrap());
        drop(near);
        assert!(
            far.wait_until(Instant::now() + Duration::from_secs(100), false)
                .unwrap()
        );
        assert!(far.receive().unwrap().is_none());
    }

    #[test]
    fn descriptor_that_is_no_packet_socket_is_refused() {
        assert!(Socket::take(File::open("/dev/null").unwrap().into()).is_err());
        let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Socket::take(stream.into()).is_err());
    }
}
