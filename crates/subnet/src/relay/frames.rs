//! A buffer that cuts a stream into messages, each a length and a frame, and sends on those that may pass.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

pub(super) const LENGTH_BYTES: usize = 4;
/// Bytes of the largest frame, as the card has it.
pub(super) const FRAME_BYTES_MAX: usize = 65_553;
const BUFFER_BYTES: usize = 2 * (LENGTH_BYTES + FRAME_BYTES_MAX);

/// The bytes of one direction: first those that are to be sent, then those that no decision was made about.
#[derive(Debug)]
pub(super) struct Frames {
    buffer: Vec<u8>,
    start: usize,
    /// End of the bytes to send.
    passed: usize,
    end: usize,
}

/// A length that no frame has: the stream's places are lost.
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

    /// Whether nothing waits to be sent.
    pub(super) fn is_sent(&self) -> bool {
        self.start == self.passed
    }

    /// The next whole frame without a decision, if it has arrived.
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

    /// Decides that the next `bytes`, a whole message, are to be sent.
    pub(super) fn pass(&mut self, bytes: usize) {
        self.passed += bytes;
    }

    /// Drops the next `bytes`, a whole message. All before them must have been sent.
    pub(super) fn skip(&mut self, bytes: usize) {
        self.passed += bytes;
        self.start = self.passed;
    }

    /// Sends what may pass, as far as `to` takes it. True when that was all.
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

    /// Reads what has arrived, once; all that may pass must have been sent. The end of the stream is an
    /// error.
    pub(super) fn receive(&mut self, from: &OwnedFd) -> io::Result<()> {
        // The remaining bytes are at most a message and a part of one, so that there is room.
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
