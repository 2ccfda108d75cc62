//! The stream backend: frames over a unix socket, each after its length (four bytes, big endian), which is
//! passt's format.
//!
//! Both buffers outlive a reset of the device: the peer does not see resets, and the framing must stay
//! intact.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::header::{ETHERNET_BYTES, FRAME_BYTES_MAX};

const LENGTH_BYTES: usize = 4;
/// Size of one read from the socket, bytes: room for two frames of the largest size.
const IN_BYTES: usize = 2 * (LENGTH_BYTES + FRAME_BYTES_MAX);
/// Number of bytes up to which frames are collected before they are sent.
const OUT_BYTES_GATHER: usize = 64 << 10;

/// A socket with the incomplete bytes of both directions.
pub struct Stream {
    socket: OwnedFd,
    incoming: Vec<u8>,
    in_start: usize,
    in_end: usize,
    outgoing: Vec<u8>,
    out_start: usize,
    /// Unsent bytes of the frame at `out_start`; 0 between frames.
    out_frame: usize,
    open: bool,
}

/// Result of an attempt to move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferResult {
    /// All available bytes were moved.
    All,
    /// The socket blocks: wait for it.
    Blocked,
    /// The peer is gone.
    Closed,
}

impl Stream {
    /// Creates a stream on a connected socket.
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            incoming: vec![0; IN_BYTES],
            in_start: 0,
            in_end: 0,
            outgoing: Vec::with_capacity(OUT_BYTES_GATHER + LENGTH_BYTES + FRAME_BYTES_MAX),
            out_start: 0,
            out_frame: 0,
            open: true,
        }
    }

    /// Returns the socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns whether the peer is connected.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Returns whether bytes wait to be sent.
    pub fn has_outgoing(&self) -> bool {
        self.out_start < self.outgoing.len()
    }

    /// Returns whether another frame should wait until [`Stream::flush`] has made room.
    pub fn is_full(&self) -> bool {
        self.outgoing.len() - self.out_start >= OUT_BYTES_GATHER
    }

    /// Appends a frame of `length` bytes, which `copy` writes.
    pub fn push(&mut self, length: usize, copy: impl FnOnce(&mut [u8])) {
        // `length` is at most FRAME_BYTES_MAX.
        self.outgoing.extend_from_slice(&(length as u32).to_be_bytes());
        let start = self.outgoing.len();
        self.outgoing.resize(start + length, 0);
        copy(&mut self.outgoing[start..]);
    }

    /// Sends the waiting bytes, one frame per call: passt loses its position if it receives a part of a
    /// frame, and the kernel takes a small message whole or not at all.
    pub fn flush(&mut self) -> TransferResult {
        while self.has_outgoing() && self.open {
            let rest = &self.outgoing[self.out_start..];
            if self.out_frame == 0 {
                // `push` writes a length before every frame.
                let length = rest
                    .first_chunk::<LENGTH_BYTES>()
                    .map_or(0, |bytes| u32::from_be_bytes(*bytes));
                self.out_frame = LENGTH_BYTES + length as usize;
            }
            let rest = &rest[..self.out_frame.min(rest.len())];
            // SAFETY: `rest` is a live slice and the socket is open.
            let sent = unsafe {
                let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
                libc::send(self.socket.as_raw_fd(), rest.as_ptr().cast(), rest.len(), flags)
            };
            match usize::try_from(sent) {
                Ok(sent) => {
                    self.out_start += sent;
                    self.out_frame -= sent;
                }
                Err(_) => match io::Error::last_os_error().kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return TransferResult::Blocked,
                    _ => self.open = false,
                },
            }
        }
        self.outgoing.clear();
        (self.out_start, self.out_frame) = (0, 0);
        if self.open {
            TransferResult::All
        } else {
            TransferResult::Closed
        }
    }

    /// Returns the next whole frame, if one has arrived. An impossible length means that the framing is lost.
    pub fn frame(&mut self) -> Option<&mut [u8]> {
        let bytes = &self.incoming[self.in_start..self.in_end];
        let length = u32::from_be_bytes(bytes.get(..LENGTH_BYTES)?.try_into().ok()?) as usize;
        if !(ETHERNET_BYTES..=FRAME_BYTES_MAX).contains(&length) {
            self.open = false;
            return None;
        }
        self.incoming[self.in_start..self.in_end].get_mut(LENGTH_BYTES..LENGTH_BYTES + length)
    }

    /// Removes the frame that [`Stream::frame`] returned.
    pub fn pop(&mut self) {
        let length = self.frame().map(|frame| frame.len());
        if let Some(length) = length {
            self.in_start += LENGTH_BYTES + length;
        }
    }

    /// Reads the available bytes, once.
    pub fn receive(&mut self) -> TransferResult {
        if !self.open {
            return TransferResult::Closed;
        }
        self.incoming.copy_within(self.in_start..self.in_end, 0);
        self.in_end -= self.in_start;
        self.in_start = 0;
        let room = &mut self.incoming[self.in_end..];
        if room.is_empty() {
            // A whole frame has arrived: the buffer has room for two.
            return TransferResult::All;
        }
        // SAFETY: `room` is a live, exclusive slice and the socket is open.
        let count = unsafe {
            libc::recv(
                self.socket.as_raw_fd(),
                room.as_mut_ptr().cast(),
                room.len(),
                libc::MSG_DONTWAIT,
            )
        };
        match usize::try_from(count) {
            Ok(0) => self.open = false,
            Ok(count) => self.in_end += count,
            Err(_) => match io::Error::last_os_error().kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return TransferResult::Blocked,
                _ => self.open = false,
            },
        }
        if self.open {
            TransferResult::All
        } else {
            TransferResult::Closed
        }
    }
}
