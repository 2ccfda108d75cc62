//! Nonblocking calls for unix sockets of the host, and the first line of a client of the host.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, SockFlag};

/// The longest `CONNECT <port>\n`.
const LINE_BYTES_MAX: usize = "CONNECT 4294967295\n".len();

/// Result of reading a client's first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstLine {
    /// The line requests this port of the guest.
    Connect(u32),
    /// The line is incomplete.
    Partial,
    /// The line is invalid, or the client left.
    Wrong,
}

/// Reads the client's first line from its socket, a byte at a time and nothing after it; `line` keeps the
/// bytes so far.
pub fn read_first_line(mut stream: &UnixStream, line: &mut Vec<u8>) -> FirstLine {
    let mut byte = [0];
    while line.len() < LINE_BYTES_MAX {
        match stream.read(&mut byte) {
            Ok(1) if byte[0] == b'\n' => return parse(line).map_or(FirstLine::Wrong, FirstLine::Connect),
            Ok(1) => line.push(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return FirstLine::Partial,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return FirstLine::Wrong,
        }
    }
    FirstLine::Wrong
}

fn parse(line: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(line).ok()?.strip_prefix("CONNECT ")?;
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        digits.parse().ok()
    } else {
        None
    }
}

/// Accepts a client, if one waits; nonblocking.
pub fn accept(listener: &impl AsFd) -> io::Result<UnixStream> {
    let fd = listener.as_fd().as_raw_fd();
    let client = socket::accept4(fd, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: accept4 has just returned the descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(client) }.into())
}

/// Writes without a signal if the other end is gone, and without blocking.
pub fn send(stream: &UnixStream, data: &[u8]) -> io::Result<usize> {
    let flags = socket::MsgFlags::MSG_NOSIGNAL | socket::MsgFlags::MSG_DONTWAIT;
    Ok(socket::send(stream.as_raw_fd(), data, flags)?)
}

/// Returns whether the other end is closed in both directions.
pub fn is_gone(stream: &UnixStream) -> bool {
    let mut files = [PollFd::new(stream.as_fd(), PollFlags::empty())];
    let ready = poll(&mut files, PollTimeout::ZERO).unwrap_or(0);
    ready > 0
        && files[0]
            .revents()
            .is_some_and(|events| events.intersects(PollFlags::POLLHUP | PollFlags::POLLERR))
}
