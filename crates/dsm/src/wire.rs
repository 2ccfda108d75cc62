//! One of the two streams of a link: a socket and, where the two hosts share memory, a pipe each way in it.
//!
//! With pipes the bytes go by them. The socket then carries bells alone, of one byte, for a side that sleeps, and tells of the other
//! side's end: what that wrote before is read first. What a pipe has no room for is kept here, as the kernel keeps what a socket's
//! reader has not taken, so that two lanes that send at the same time don't wait for each other.

mod shm_transport;

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use urpc::host::SharedPipe;

use self::shm_transport::ShmTransport;

/// Asked of the kernel for each socket, and what is kept for a pipe: pages for as many threads as a large host has.
const BUFFER_BYTES: usize = 4 << 20;
/// How long the other side may take nothing, milliseconds.
const SEND_TIMEOUT_MS: u16 = 10_000;

/// Memory of the caller's that is sent from, or received to; with pipes a whole number of words.
pub type Segment = libc::iovec;

/// A part of nothing.
pub const EMPTY_SEGMENT: Segment = Segment {
    iov_base: ptr::null_mut(),
    iov_len: 0,
};

/// So many bytes there.
pub fn segment(at: *const u8, bytes: usize) -> Segment {
    Segment {
        iov_base: at.cast_mut().cast(),
        iov_len: bytes,
    }
}

/// The pipes beside a socket, both empty, or written to by the other side already.
#[derive(Debug)]
pub struct Pipes {
    /// To the other side.
    pub outgoing: SharedPipe,
    /// From it.
    pub incoming: SharedPipe,
}

/// A stream.
#[derive(Debug)]
pub struct Wire {
    socket: OwnedFd,
    /// The kernel may have more than was read.
    filled: bool,
    shm: Option<Box<ShmTransport>>,
}

impl Wire {
    /// Over a connected socket, with pipes beside it or without.
    pub fn new(socket: OwnedFd, pipes: Option<Pipes>) -> Self {
        // More than an unprivileged process may have is cut by the kernel, which is enough for tens of pages.
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

    /// What to wait on.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The kernel has something, or may have: a socket that this is not said of is not read, once it was found empty.
    pub fn fill(&mut self) {
        self.filled = true;
    }

    /// Something may have come, as far as a look tells that takes no call of the kernel's where there are pipes: the end of the other
    /// side is seen by [`Wire::fill`] alone.
    pub fn poll_streams(&mut self) {
        self.filled |= self.shm.is_none();
    }

    /// Before waiting on the socket: whether nothing has come, and the other side rings from now on for what does. Then
    /// [`Wire::awake`] is called.
    pub fn prepare_to_sleep(&mut self) -> bool {
        match &mut self.shm {
            // What went wrong shows as soon as it is read from.
            Some(shm) => shm.prepare_to_sleep(&self.socket).unwrap_or(false),
            None => true,
        }
    }

    /// After waiting, for whatever reason it ended.
    pub fn awake(&self) {
        if let Some(shm) = &self.shm {
            shm.awake();
        }
    }

    /// Sends all of the parts.
    ///
    /// # Safety
    /// The parts can be read, and nobody writes to them meanwhile.
    ///
    /// # Errors
    /// If the other side is gone, or takes nothing for long.
    pub unsafe fn send(&mut self, mut segments: [Segment; 2]) -> io::Result<()> {
        match &mut self.shm {
            // SAFETY: as the caller promises.
            Some(shm) => unsafe { shm.send(&self.socket, &mut segments) },
            None => send(&self.socket, &mut segments),
        }
    }

    /// How many bytes came; none when there are none yet.
    ///
    /// # Safety
    /// The parts can be written, and nobody uses them meanwhile.
    ///
    /// # Errors
    /// `UnexpectedEof` if the other side is gone.
    pub unsafe fn receive(&mut self, mut segments: [Segment; 2]) -> io::Result<Option<usize>> {
        match &mut self.shm {
            // SAFETY: as the caller promises.
            Some(shm) => unsafe { shm.receive(&self.socket, &mut self.filled, segments) },
            None => receive(&self.socket, &mut self.filled, &mut segments),
        }
    }
}

/// So many bytes of the parts are done.
fn advance(segments: &mut [Segment; 2], mut count: usize) {
    for segment in segments {
        let done = count.min(segment.iov_len);
        segment.iov_base = segment.iov_base.wrapping_byte_add(done);
        segment.iov_len -= done;
        count -= done;
    }
}

fn message(segments: &mut [Segment]) -> libc::msghdr {
    // SAFETY: a message header of zeroes is one without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = segments.as_mut_ptr();
    message.msg_iovlen = segments.len();
    message
}

/// Sends all of the parts by a socket.
fn send(stream: &OwnedFd, segments: &mut [Segment; 2]) -> io::Result<()> {
    while segments.iter().any(|segment| segment.iov_len > 0) {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the parts are memory of the caller's, which outlives the call.
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

/// How many bytes came by a socket; none when there are none yet. `filled` is whether to ask, and then whether there may be more: less
/// than there is room for is all.
fn receive(stream: &OwnedFd, filled: &mut bool, segments: &mut [Segment; 2]) -> io::Result<Option<usize>> {
    if !*filled {
        return Ok(None);
    }
    let room: usize = segments.iter().map(|segment| segment.iov_len).sum();
    // SAFETY: the parts are memory of the caller's that may be written, and outlives the call.
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
