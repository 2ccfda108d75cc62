//! Buffer that divides a stream into messages, each a length and a frame, and forwards those that may pass.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

pub(super) const LENGTH_BYTES: usize = 4;
/// Greatest size of a frame, bytes, as the card has it.
pub(super) const FRAME_BYTES_MAX: usize = 65_553;
const BUFFER_BYTES: usize = 2 * (LENGTH_BYTES + FRAME_BYTES_MAX);

/// Bytes of one direction: first those to be sent, then those without a decision.
#[derive(Debug)]
pub(super) struct Frames {
    buffer: Vec<u8>,
    start: usize,
    /// End of the bytes to send.
    passed: usize,
    end: usize,
}

/// Error: an impossible length of a frame, after which the stream's framing is lost.
#[derive(Debug)]
pub(super) struct Broken;

impl Frames {
    pub(super) fn new() -> Self {
        Self {
            buffer: vec![0; BUFFER_BYTES],
            start: 0,
            passed: 0,
            end: 0,
        }
    }

    /// Returns whether all passed bytes are sent.
    pub(super) fn is_sent(&self) -> bool {
        self.start == self.passed
    }

    /// Returns the next whole frame without a decision, if it has arrived.
    pub(super) fn next_frame(&self) -> Result<Option<&[u8]>, Broken> {
        let rest = &self.buffer[self.passed..self.end];
        let Some(length) = rest.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*length) as usize;
        if !(1..=FRAME_BYTES_MAX).contains(&length) {
            return Err(Broken);
        }
        Ok(rest.get(LENGTH_BYTES..LENGTH_BYTES + length))
    }

    /// Decides that the next `bytes`, a whole message, are sent.
    pub(super) fn pass(&mut self, bytes: usize) {
        self.passed += bytes;
    }

    /// Drops the next `bytes`, a whole message. All bytes before them must have been sent.
    pub(super) fn skip(&mut self, bytes: usize) {
        self.passed += bytes;
        self.start = self.passed;
    }

    /// Sends the passed bytes as far as `to` has room. Returns true if all were sent.
    pub(super) fn send(&mut self, to: &OwnedFd) -> io::Result<bool> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while self.start < self.passed {
            match send(to.as_raw_fd(), &self.buffer[self.start..self.passed], flags) {
                Ok(count) => self.start += count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Reads the available bytes, once; all passed bytes must have been sent. The end of the stream is an
    /// error.
    pub(super) fn receive(&mut self, from: &OwnedFd) -> io::Result<()> {
        // The remaining bytes are at most a message and a part of one, so there is room.
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        (self.start, self.passed) = (0, 0);
        match recv(
            from.as_raw_fd(),
            &mut self.buffer[self.end..],
            MsgFlags::MSG_DONTWAIT,
        ) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.end += count;
                Ok(())
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
