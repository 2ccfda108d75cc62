//! One stream of a link: a socket and, where the two hosts share memory, a pipe for each direction in it.
//!
//! With pipes the bytes use them. The socket then carries only doorbells of one byte for a receiver that
//! sleeps, and reports the end of the connection; bytes written before the end are read first. Bytes that a
//! pipe has no room for are kept here, as the kernel keeps those that a socket's reader has not taken. So two
//! page servers that send at the same time don't wait for each other.

mod shm_transport;

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use urpc::host::SharedPipe;

use self::shm_transport::ShmTransport;

/// Buffer requested of the kernel for each socket, and kept for a pipe, bytes: pages for as many threads as a
/// large host has.
const BUFFER_BYTES: usize = 4 << 20;
/// Time for which the receiver may take nothing, milliseconds.
const SEND_TIMEOUT_MS: u16 = 10_000;

/// Memory of the caller to send from or receive into; with pipes a whole number of words.
pub type Segment = libc::iovec;

/// A segment without bytes.
pub const EMPTY_SEGMENT: Segment = Segment {
    iov_base: ptr::null_mut(),
    iov_len: 0,
};

/// Returns a segment of that many bytes.
pub fn segment(at: *const u8, bytes: usize) -> Segment {
    Segment {
        iov_base: at.cast_mut().cast(),
        iov_len: bytes,
    }
}

/// Pipes beside a socket, empty or already written by the other end.
#[derive(Debug)]
pub struct Pipes {
    /// Pipe to the other end.
    pub outgoing: SharedPipe,
    /// Pipe from the other end.
    pub incoming: SharedPipe,
}

/// Byte stream to one node: a socket, and a pair of pipes where both share memory.
#[derive(Debug)]
pub struct Wire {
    socket: OwnedFd,
    /// Whether the kernel may have unread bytes.
    filled: bool,
    shm: Option<Box<ShmTransport>>,
}

impl Wire {
    /// Creates a stream over a connected socket, with or without pipes beside it.
    pub fn new(socket: OwnedFd, pipes: Option<Pipes>) -> Self {
        // The kernel reduces a size that an unprivileged process may not have, which is enough for tens of
        // pages.
        let _ = setsockopt(&socket, sockopt::SndBuf, &BUFFER_BYTES);
        let _ = setsockopt(&socket, sockopt::RcvBuf, &BUFFER_BYTES);
        let _ = setsockopt(&socket, sockopt::SndBufForce, &BUFFER_BYTES);
        let _ = setsockopt(&socket, sockopt::RcvBufForce, &BUFFER_BYTES);
        Self {
            socket,
            filled: true,
            shm: pipes.map(|pipes| Box::new(ShmTransport::new(pipes))),
        }
    }

    /// Returns the descriptor to wait on.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Marks the socket as readable. A socket that was read empty is not read again before.
    pub fn fill(&mut self) {
        self.filled = true;
    }

    /// Marks the stream as possibly readable for a poller, without a system call where there are pipes. Only
    /// [`Wire::fill`] detects the end of the connection then.
    pub fn poll_streams(&mut self) {
        self.filled |= self.shm.is_none();
    }

    /// Prepares to wait on the socket. Returns whether nothing has arrived; the sender then rings the
    /// doorbell. [`Wire::unblocked`] must follow.
    pub fn prepare_to_sleep(&mut self) -> bool {
        match &mut self.shm {
            // A read reports the error.
            Some(shm) => shm.prepare_to_sleep(&self.socket).unwrap_or(false),
            None => true,
        }
    }

    /// Ends the wait.
    pub fn unblocked(&self) {
        if let Some(shm) = &self.shm {
            shm.unblocked();
        }
    }

    /// Sends all bytes of the segments.
    ///
    /// # Safety
    /// The segments can be read, and nothing writes them during the call.
    ///
    /// # Errors
    /// If the connection is closed, or takes nothing for long.
    pub unsafe fn send(&mut self, mut segments: [Segment; 2]) -> io::Result<()> {
        match &mut self.shm {
            // SAFETY: the caller's promise.
            Some(shm) => unsafe { shm.send(&self.socket, &mut segments) },
            None => send(&self.socket, &mut segments),
        }
    }

    /// Receives bytes. Returns their number, or `None` if there are none yet.
    ///
    /// # Safety
    /// The segments can be written, and nothing uses them during the call.
    ///
    /// # Errors
    /// `UnexpectedEof` if the connection is closed.
    pub unsafe fn receive(&mut self, mut segments: [Segment; 2]) -> io::Result<Option<usize>> {
        match &mut self.shm {
            // SAFETY: the caller's promise.
            Some(shm) => unsafe { shm.receive(&self.socket, &mut self.filled, segments) },
            None => receive(&self.socket, &mut self.filled, &mut segments),
        }
    }
}

/// Advances the segments by `count` bytes.
fn advance(segments: &mut [Segment; 2], mut count: usize) {
    for segment in segments {
        let done = count.min(segment.iov_len);
        segment.iov_base = segment.iov_base.wrapping_byte_add(done);
        segment.iov_len -= done;
        count -= done;
    }
}

fn message(segments: &mut [Segment]) -> libc::msghdr {
    // SAFETY: a zeroed message header is an empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = segments.as_mut_ptr();
    message.msg_iovlen = segments.len();
    message
}

/// Sends all bytes of the segments by a socket.
fn send(stream: &OwnedFd, segments: &mut [Segment; 2]) -> io::Result<()> {
    while segments.iter().any(|segment| segment.iov_len > 0) {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the segments are the caller's memory, which outlives the call.
        let count = unsafe { libc::sendmsg(stream.as_raw_fd(), &message(segments), flags) };
        if count >= 0 {
            advance(segments, count as usize);
            continue;
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            ErrorKind::Interrupted => {}
            ErrorKind::WouldBlock => {
                let mut wait = [PollFd::new(stream.as_fd(), PollFlags::POLLOUT)];
                if poll(&mut wait, PollTimeout::from(SEND_TIMEOUT_MS)) == Ok(0) {
                    return Err(ErrorKind::TimedOut.into());
                }
            }
            _ => return Err(error),
        }
    }
    Ok(())
}

/// Receives bytes by a socket. Returns their number, or `None` if there are none yet. Does nothing if
/// `filled` is false. Sets `filled` to whether there may be more: a partial read took all.
fn receive(stream: &OwnedFd, filled: &mut bool, segments: &mut [Segment; 2]) -> io::Result<Option<usize>> {
    if !*filled {
        return Ok(None);
    }
    let room: usize = segments.iter().map(|segment| segment.iov_len).sum();
    // SAFETY: the segments are the caller's memory that may be written, and outlives the call.
    let count = unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message(segments), libc::MSG_DONTWAIT) };
    match count {
        0 => Err(ErrorKind::UnexpectedEof.into()),
        1.. => {
            *filled = count as usize == room;
            Ok(Some(count as usize))
        }
        _ => {
            let error = io::Error::last_os_error();
            match error.kind() {
                ErrorKind::WouldBlock => {
                    *filled = false;
                    Ok(None)
                }
                ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
