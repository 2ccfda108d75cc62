//! The socket backend: frames over a unix socket. On a stream socket each frame follows its length (four
//! bytes, big endian), which is passt's format. On a packet socket each frame is one packet: the process at
//! the other end can die between any two of its system calls, and the next one begins with a whole frame.
//! Packets may have the header of virtio-net before the frame, by which checksums and segmentation are left
//! to the receiver ([`Offload`]). Work that the guest does not accept is done here.
//!
//! Both buffers have the format of a stream socket. They outlive a reset of the device: the peer does not see
//! resets, and the framing must stay intact.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use subnet::offload::{Accepted, Offload, WHOLE};

use super::header::{ETHERNET_BYTES, FRAME_BYTES_MAX, HEADER_BYTES};

const LENGTH_BYTES: usize = 4;
/// Size of one read from the socket, bytes: room for two frames of the largest size, or for one that is cut
/// into segments.
const IN_BYTES: usize = 2 * (LENGTH_BYTES + HEADER_BYTES + FRAME_BYTES_MAX);
/// Number of bytes up to which frames are collected before they are sent.
const OUT_BYTES_GATHER: usize = 64 << 10;

/// Means by which a socket delimits frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// The length before each frame, on a stream socket.
    Length,
    /// A packet for each frame.
    Packet,
    /// A packet for each frame, with the header of virtio-net before it.
    HeaderPacket,
}

impl Framing {
    /// Returns the bytes of virtio-net's header that are not on the socket: the card adds them.
    pub fn absent_header_bytes(self) -> usize {
        match self {
            Self::Length | Self::Packet => HEADER_BYTES,
            Self::HeaderPacket => 0,
        }
    }

    /// Returns the sizes of frames, with the header that is on the socket.
    fn frame_bytes(self) -> RangeInclusive<usize> {
        let header = HEADER_BYTES - self.absent_header_bytes();
        header + ETHERNET_BYTES..=header + FRAME_BYTES_MAX
    }
}

/// A socket with the incomplete bytes of both directions.
pub struct Stream {
    socket: OwnedFd,
    framing: Framing,
    incoming: Vec<u8>,
    in_start: usize,
    in_end: usize,
    outgoing: Vec<u8>,
    out_start: usize,
    /// Unsent bytes of the frame at `out_start`; 0 between frames.
    out_frame: usize,
    /// Work that the guest does itself.
    accepted: Accepted,
    /// Whether the guest may leave work to receivers.
    leaves_work: bool,
    /// Frame on which work is done, and a frame that it becomes.
    work: [Vec<u8>; 2],
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
    pub fn new(socket: OwnedFd, framing: Framing) -> Self {
        // Memory that is never written costs nothing.
        let work_bytes = match framing {
            Framing::HeaderPacket => FRAME_BYTES_MAX,
            Framing::Length | Framing::Packet => 0,
        };
        Self {
            socket,
            framing,
            incoming: vec![0; IN_BYTES],
            in_start: 0,
            in_end: 0,
            outgoing: Vec::with_capacity(OUT_BYTES_GATHER + LENGTH_BYTES + FRAME_BYTES_MAX),
            out_start: 0,
            out_frame: 0,
            accepted: Accepted::default(),
            leaves_work: false,
            work: [(); 2].map(|()| Vec::with_capacity(work_bytes)),
            open: true,
        }
    }

    /// Returns the socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns the means by which the socket delimits frames.
    pub fn framing(&self) -> Framing {
        self.framing
    }

    /// Sets the work that the guest does itself, and whether it may leave work to others. Packets that wait
    /// for a guest with other drivers are dropped, as their frames may be none for this one.
    pub fn set_offloads(&mut self, accepted: Accepted, leaves_work: bool) {
        if self.framing == Framing::HeaderPacket && self.accepted != accepted {
            (self.in_start, self.in_end) = (0, 0);
        }
        (self.accepted, self.leaves_work) = (accepted, leaves_work);
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
        let frame = &mut self.outgoing[start..];
        copy(frame);
        if self.framing == Framing::HeaderPacket && !self.leaves_work {
            // Drivers without offloads need not write the header.
            frame[..HEADER_BYTES].fill(0);
        }
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
                if self.framing != Framing::Length {
                    self.out_start += LENGTH_BYTES;
                    self.out_frame -= LENGTH_BYTES;
                    continue;
                }
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
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error if error.kind() == io::ErrorKind::WouldBlock => return TransferResult::Blocked,
                    // The host's socket buffers are smaller than the frame, which is lost.
                    error
                        if self.framing != Framing::Length
                            && error.raw_os_error() == Some(libc::EMSGSIZE) =>
                    {
                        self.out_start += self.out_frame;
                        self.out_frame = 0;
                    }
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
        if !self.framing.frame_bytes().contains(&length) {
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

    /// Reads the available bytes, once; or the next packet. A packet of an impossible length is dropped.
    pub fn receive(&mut self) -> TransferResult {
        if !self.open {
            return TransferResult::Closed;
        }
        self.incoming.copy_within(self.in_start..self.in_end, 0);
        self.in_end -= self.in_start;
        self.in_start = 0;
        let (header, needed, flags) = match self.framing {
            Framing::Length => (0, 1, 0),
            // The kernel returns the whole length of a packet that is cut off.
            Framing::Packet | Framing::HeaderPacket => {
                let longest = LENGTH_BYTES + self.framing.frame_bytes().end();
                (LENGTH_BYTES, longest, libc::MSG_TRUNC)
            }
        };
        let room = &mut self.incoming[self.in_end..];
        if room.len() < needed {
            // A whole frame has arrived: the buffer has room for two.
            return TransferResult::All;
        }
        let (length_bytes, room) = room.split_at_mut(header);
        // SAFETY: `room` is a live, exclusive slice and the socket is open.
        let count = unsafe {
            libc::recv(
                self.socket.as_raw_fd(),
                room.as_mut_ptr().cast(),
                room.len(),
                libc::MSG_DONTWAIT | flags,
            )
        };
        match usize::try_from(count) {
            Ok(0) => self.open = false,
            Ok(count) if self.framing == Framing::Length => self.in_end += count,
            Ok(count) if self.framing.frame_bytes().contains(&count) => {
                // At most HEADER_BYTES and FRAME_BYTES_MAX.
                length_bytes.copy_from_slice(&(count as u32).to_be_bytes());
                self.in_end += header + count;
                if self.framing == Framing::HeaderPacket && !self.check_work(count) {
                    return TransferResult::Blocked;
                }
            }
            // A peer that sends many of them does not keep this thread.
            Ok(_) => return TransferResult::Blocked,
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
    /// Checks the header of the last packet, of `bytes` bytes, and does the work that the guest does not
    /// accept. Returns whether frames are there: a packet whose header contradicts its frame is dropped.
    fn check_work(&mut self, bytes: usize) -> bool {
        let start = self.in_end - bytes;
        let packet = &mut self.incoming[start..self.in_end];
        // The packet has a header and a frame.
        let Some((header, frame)) = packet.split_first_chunk_mut::<HEADER_BYTES>() else {
            return false;
        };
        let work = Offload::read(header, frame);
        *header = WHOLE;
        match work {
            Ok(None) => return true,
            Ok(Some(work)) if work.is_accepted(self.accepted) => {
                *header = work.header();
                return true;
            }
            _ => {}
        }
        self.in_end = start - LENGTH_BYTES;
        let Ok(Some(work)) = work else { return false };
        let [unfinished, finished] = &mut self.work;
        unfinished.clear();
        unfinished.extend_from_slice(frame);
        let (incoming, end) = (&mut self.incoming, &mut self.in_end);
        work.finish(unfinished, finished, |frame| {
            // Less than 64 KiB.
            let length = ((HEADER_BYTES + frame.len()) as u32).to_be_bytes();
            let rest = incoming.get_mut(*end..).unwrap_or_default();
            let parts = [&length[..], &WHOLE, frame];
            // All have room: frames that are cut have short headers.
            if parts.iter().map(|part| part.len()).sum::<usize>() <= rest.len() {
                let mut rest = rest;
                for part in parts {
                    let (room, behind) = rest.split_at_mut(part.len());
                    room.copy_from_slice(part);
                    (rest, *end) = (behind, *end + part.len());
                }
            }
        });
        true
    }
}
