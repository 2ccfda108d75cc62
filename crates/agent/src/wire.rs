//! A connected socket that carries frames, used by both sides.
//!
//! It uses the socket's file descriptor with `send` and `recv`, so that one side can poll it with other
//! descriptors, and a broken connection is an error instead of a `SIGPIPE`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};

use crate::protocol::{Decoder, Frame, HEADER_BYTES, Kind, frame};

/// A socket with the bytes that were received but not used yet.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: OwnedFd,
    decoder: Decoder,
    buffer: Vec<u8>,
}

/// Result of one nonblocking receive.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// Bytes were received; frames may be complete.
    Some,
    /// No bytes are available.
    Nothing,
    /// The other side has closed.
    Closed,
}

impl Wire {
    /// Duplicates the descriptor of `stream`'s socket.
    pub fn new(stream: &impl AsFd) -> io::Result<Self> {
        let socket = stream.as_fd().try_clone_to_owned()?;
        Ok(Self {
            socket,
            decoder: Decoder::default(),
            buffer: vec![0; 32 << 10],
        })
    }

    /// Returns the next frame that was received already.
    pub fn next_frame(&mut self) -> io::Result<Option<Frame>> {
        self.decoder
            .next_frame()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Receives available bytes without blocking. Must be called only after `next_frame` has returned none:
    /// the decoder then holds less than a frame.
    pub fn receive(&mut self) -> io::Result<Received> {
        match recv(self.socket.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Ok(Received::Closed),
            Ok(length) => {
                self.decoder.feed(&self.buffer[..length]);
                Ok(Received::Some)
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(Received::Nothing),
            Err(Errno::ECONNRESET | Errno::EPIPE | Errno::ENOTCONN) => Ok(Received::Closed),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for a frame; returns `None` if the other side has closed. Fails with `TimedOut` at the deadline.
    pub fn wait_frame(&mut self, deadline: Option<Instant>) -> io::Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.next_frame()? {
                return Ok(Some(frame));
            }
            self.wait(PollFlags::POLLIN, deadline)?;
            if self.receive()? == Received::Closed {
                return Ok(None);
            }
        }
    }

    /// Sends as many of `bytes` as possible without blocking.
    pub fn send_some(&self, bytes: &[u8]) -> io::Result<usize> {
        match send(
            self.socket.as_raw_fd(),
            bytes,
            MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL,
        ) {
            Ok(sent) => Ok(sent),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends all of `bytes`, and waits for room. Fails with `TimedOut` if there is no room at all for
    /// `timeout`.
    pub fn send_all(&self, mut bytes: &[u8], timeout: Option<Duration>) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = self.send_some(bytes)?;
            bytes = &bytes[sent..];
            if sent == 0 {
                self.wait(
                    PollFlags::POLLOUT,
                    timeout.map(|timeout| Instant::now() + timeout),
                )?;
            }
        }
        Ok(())
    }

    /// Sends one frame.
    pub fn send_frame(&self, kind: Kind, payload: &[u8], timeout: Option<Duration>) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        frame::encode(kind, payload, &mut bytes);
        self.send_all(&bytes, timeout)
    }

    /// Sends one frame of JSON.
    pub fn send_json<T: serde::Serialize>(&self, kind: Kind, value: &T) -> io::Result<()> {
        let mut bytes = Vec::new();
        if !frame::encode_json(kind, value, &mut bytes) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the request is longer than 64 KiB",
            ));
        }
        self.send_all(&bytes, Some(PEER_TIMEOUT))
    }

    /// Waits for some bytes and discards them.
    pub fn discard(&mut self, deadline: Instant) -> io::Result<Received> {
        self.wait(PollFlags::POLLIN, Some(deadline))?;
        match recv(self.socket.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Ok(Received::Closed),
            Ok(_) => Ok(Received::Some),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(Received::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns whether bytes can be received at once.
    pub fn readable(&self) -> bool {
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(ready) if ready > 0)
    }

    /// Announces that no further bytes will be sent.
    pub fn finish(&self) {
        // The connection may be gone already; then there is no receiver.
        let _ = nix::sys::socket::shutdown(self.socket.as_raw_fd(), nix::sys::socket::Shutdown::Write);
    }

    fn wait(&self, what: PollFlags, deadline: Option<Instant>) -> io::Result<()> {
        loop {
            let timeout = match deadline {
                None => PollTimeout::NONE,
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    // Rounded up, so that the last millisecond is waited for instead of spinning.
                    PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
                }
            };
            let mut fds = [PollFd::new(self.socket.as_fd(), what)];
            match poll(&mut fds, timeout) {
                Ok(0) | Err(Errno::EINTR) => continue,
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Time limit for the other side to receive a frame of a handshake, or to reply to it.
pub(crate) const PEER_TIMEOUT: Duration = Duration::from_secs(30);
