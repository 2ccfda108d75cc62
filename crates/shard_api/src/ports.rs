//! Sockets of the host that a guest may connect to: the shard requests one by its port, and the monitor
//! connects to it.
//!
//! A shard may neither create nor connect a socket. The monitor owns the directory of ports. It connects to
//! the socket there whose name is the port's number, and sends the connected file. Each boot has a pair of
//! sockets that keep messages apart:
//!
//! ```text
//!   shard ── port (4 bytes) ──────────────────────► monitor
//!   shard ◄─ port (4 bytes), and a file if it is open ── monitor
//! ```
//! Answers have the order of the requests. The monitor never waits for a shard: it ends the service of a
//! shard that leaves answers unread until the socket is full.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use nix::sys::socket::{
    self, AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType,
    UnixAddr,
};

/// Greatest number of pending requests of a shard; it refuses further ones of its guest.
pub const PENDING_MAX: usize = 64;
/// Stack size of the service, bytes: it makes a few system calls only.
const STACK_BYTES: usize = 64 << 10;
const MESSAGE_BYTES: usize = size_of::<u32>();

/// Returns the monitor's end and the shard's.
///
/// # Errors
/// Fails if the host has no descriptors left.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socket::socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?)
}

/// The shard's end, which never blocks.
#[derive(Debug)]
pub struct Ports(OwnedFd);

/// The monitor's answer.
#[derive(Debug)]
pub struct Answer {
    /// The requested port.
    pub port: u32,
    /// A nonblocking socket that is connected to it, if a server listens there.
    pub stream: Option<UnixStream>,
}

impl Ports {
    /// Sends requests over `socket`, the shard's end of [`pair`].
    pub fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Requests a connection to `port`.
    ///
    /// # Errors
    /// Fails if the monitor is gone or has too many unread requests.
    pub fn request(&self, port: u32) -> io::Result<()> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        socket::send(self.0.as_raw_fd(), &port.to_le_bytes(), flags)?;
        Ok(())
    }

    /// Returns the next answer; none if no answer has arrived.
    ///
    /// # Errors
    /// Fails if the monitor ended the service.
    pub fn answer(&self) -> io::Result<Option<Answer>> {
        let mut bytes = [0; MESSAGE_BYTES];
        let mut rights = nix::cmsg_space!([RawFd; 1]);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
        let message = match socket::recvmsg::<()>(self.0.as_raw_fd(), &mut parts, Some(&mut rights), flags) {
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => return Ok(None),
            other => other?,
        };
        let mut stream = None;
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(fds) = control {
                for fd in fds {
                    // SAFETY: the kernel has just given us this descriptor; nothing else owns it.
                    stream = Some(UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) }));
                }
            }
        }
        if message.bytes != MESSAGE_BYTES {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let port = u32::from_le_bytes(bytes);
        Ok(Some(Answer { port, stream }))
    }
}

impl AsFd for Ports {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Serves the next request of a shard; waits for it if `socket` is blocking.
///
/// # Errors
/// Fails if the shard is gone, sends an invalid request, or reads no answers.
pub fn serve_one(socket: BorrowedFd<'_>, directory: BorrowedFd<'_>) -> io::Result<()> {
    // One byte more reveals a message that is too long.
    let mut bytes = [0; MESSAGE_BYTES + 1];
    let count = loop {
        match socket::recv(socket.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
            Err(nix::Error::EINTR) => {}
            other => break other?,
        }
    };
    let question = bytes[..count]
        .try_into()
        .map_err(|_| io::ErrorKind::InvalidData)?;
    let stream = connect(directory, u32::from_le_bytes(question)).ok();
    let files: Vec<RawFd> = stream.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&files)];
    socket::sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(&question)],
        if files.is_empty() { &[] } else { &rights },
        MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(())
}

/// Connects to the socket that `port` names in `directory`, without waiting for its server.
fn connect(directory: BorrowedFd<'_>, port: u32) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let fd = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    // The directory's own name may be too long for the address of a socket.
    let path = format!("/proc/self/fd/{}/{port}", directory.as_raw_fd());
    socket::connect(fd.as_raw_fd(), &UnixAddr::new(path.as_str())?)?;
    Ok(fd)
}

/// Connects ports for one boot of a shard, on its own thread. Ends with the shard, or when this is dropped.
#[derive(Debug)]
pub struct Service {
    socket: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Serves `socket`, the monitor's end of [`pair`], by the sockets in `directory`.
    ///
    /// # Errors
    /// Fails if the host has no descriptors or threads left.
    pub fn start(socket: OwnedFd, directory: File) -> io::Result<Self> {
        let own = socket.try_clone()?;
        let thread = std::thread::Builder::new()
            .name("ports".into())
            .stack_size(STACK_BYTES)
            .spawn(move || while serve_one(own.as_fd(), directory.as_fd()).is_ok() {})?;
        Ok(Self {
            socket,
            thread: Some(thread),
        })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Wakes the thread; a socket whose other end is gone has woken it already.
        let _ = socket::shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::time::{Duration, Instant};

    use super::*;

    fn served(directory: &std::path::Path) -> (Ports, Service) {
        let (monitor, shard) = pair().unwrap();
        let service = Service::start(monitor, File::open(directory).unwrap()).unwrap();
        (Ports::new(shard), service)
    }

    fn answer(ports: &Ports) -> io::Result<Answer> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(answer) = ports.answer()? {
                return Ok(answer);
            }
            assert!(Instant::now() < deadline, "no answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_port_becomes_a_connected_socket_that_does_not_block() {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("4294967295")).unwrap();
        let (ports, _service) = served(directory.path());
        ports.request(u32::MAX).unwrap();
        let answer = answer(&ports).unwrap();
        assert_eq!(answer.port, u32::MAX);
        let mut stream = answer.stream.unwrap();
        let (mut server, _) = listener.accept().unwrap();
        assert_eq!(
            stream.read(&mut [0]).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        stream.write_all(b"a").unwrap();
        server.read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn a_port_without_a_server_is_refused_and_the_next_is_answered() {
        let directory = tempfile::tempdir().unwrap();
        let _listener = UnixListener::bind(directory.path().join("2")).unwrap();
        std::fs::write(directory.path().join("3"), b"").unwrap();
        let (ports, _service) = served(directory.path());
        for port in [1, 3, 2] {
            ports.request(port).unwrap();
        }
        let opened = [1, 3, 2].map(|port| {
            let answer = answer(&ports).unwrap();
            assert_eq!(answer.port, port);
            answer.stream.is_some()
        });
        assert_eq!(opened, [false, false, true]);
    }

    /// A server that accepts nothing has a backlog that fills.
    #[test]
    fn server_that_does_not_accept_blocks_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("1")).unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
        let (ports, _service) = served(directory.path());
        let mut streams = Vec::new();
        loop {
            ports.request(1).unwrap();
            match answer(&ports).unwrap().stream {
                Some(stream) => streams.push(stream),
                None => break,
            }
            assert!(streams.len() < 10, "the backlog has no limit");
        }
        assert!(!streams.is_empty());
    }

    #[test]
    fn a_shard_that_reads_no_answers_loses_the_service_and_blocks_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (ports, service) = served(directory.path());
        // More than both sockets hold.
        let deadline = Instant::now() + Duration::from_secs(30);
        let ended = loop {
            match ports.request(1) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => break true,
                _ if Instant::now() > deadline => break false,
                _ => {}
            }
            if service.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                break true;
            }
        };
        assert!(ended, "the service waits for its shard");
        drop(service);
    }

    #[test]
    fn socket_has_room_for_the_answers_to_all_pending_requests() {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("7")).unwrap();
        let accepts = std::thread::spawn(move || {
            let taken: Vec<_> = (0..PENDING_MAX).map(|_| listener.accept().unwrap()).collect();
            taken.len()
        });
        let (ports, _service) = served(directory.path());
        for _ in 0..PENDING_MAX {
            ports.request(7).unwrap();
        }
        std::thread::sleep(Duration::from_millis(200));
        let opened = (0..PENDING_MAX).filter(|_| answer(&ports).unwrap().stream.is_some());
        assert_eq!(opened.count(), PENDING_MAX);
        assert_eq!(accepts.join().unwrap(), PENDING_MAX);
    }

    #[test]
    fn a_message_that_is_no_port_ends_the_service() {
        let directory = tempfile::tempdir().unwrap();
        let (ports, _service) = served(directory.path());
        socket::send(ports.0.as_raw_fd(), b"longer", MsgFlags::empty()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while ports.request(1).is_ok() {
            assert!(Instant::now() < deadline, "the service did not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
