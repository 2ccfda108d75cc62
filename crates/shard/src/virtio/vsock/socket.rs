//! Unix sockets of the host, used without ever waiting; and the line that a client of the host opens with.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, SockFlag};

/// The longest `CONNECT <port>\n`.
const LINE_BYTES_MAX: usize = "CONNECT 4294967295\n".len();

/// What came of reading a client's first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hello {
    /// The guest's port.
    Port(u32),
    /// Not the whole line yet.
    Partial,
    /// Not the line that is spoken here, or the client left.
    Wrong,
}

/// Takes the client's first line from its socket, a byte at a time and nothing after it; `line` keeps what
/// has come.
pub fn hello(mut stream: &UnixStream, line: &mut Vec<u8>) -> Hello {
    let mut byte = [0];
    while line.len() < LINE_BYTES_MAX {
        match stream.read(&mut byte) {
            Ok(1) if byte[0] == b'\n' => return parse(line).map_or(Hello::Wrong, Hello::Port),
            Ok(1) => line.push(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Hello::Partial,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return Hello::Wrong,
        }
    }
    Hello::Wrong
}

fn parse(line: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(line).ok()?.strip_prefix("CONNECT ")?;
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        digits.parse().ok()
    } else {
        None
    }
}

/// Accepts a client, if one waits; non-blocking.
pub fn accept(listener: &impl AsFd) -> io::Result<UnixStream> {
    let fd = listener.as_fd().as_raw_fd();
    let client = socket::accept4(fd, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: `accept4` has just returned this descriptor; nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(client) }.into())
}

/// Writes without a signal when the other end is gone.
pub fn send(stream: &UnixStream, data: &[u8]) -> io::Result<usize> {
    let flags = socket::MsgFlags::MSG_NOSIGNAL | socket::MsgFlags::MSG_DONTWAIT;
    Ok(socket::send(stream.as_raw_fd(), data, flags)?)
}

/// Whether the other end is closed both ways.
pub fn is_gone(stream: &UnixStream) -> bool {
    let mut files = [PollFd::new(stream.as_fd(), PollFlags::empty())];
    let ready = poll(&mut files, PollTimeout::ZERO).unwrap_or(0);
    ready > 0
        && files[0]
            .revents()
            .is_some_and(|events| events.intersects(PollFlags::POLLHUP | PollFlags::POLLERR))
}
