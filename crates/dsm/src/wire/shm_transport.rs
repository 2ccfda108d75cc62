//! Pipes in shared memory beside a stream's socket, and their backlog.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use urpc::host::SharedPipe;
use urpc::pipe::{Corrupt, Reader, WORD_BYTES, Writer};

use super::{
    BUFFER_BYTES, EMPTY_SEGMENT, Pipes, SEND_TIMEOUT_MS, Segment, advance, message, receive, segment,
};

const BELL: u8 = b'!';
/// Doorbells read at once. There are seldom two.
const BELLS: usize = 64;

/// Transport by pipes.
#[derive(Debug)]
pub struct ShmTransport {
    writer: Writer<SharedPipe>,
    reader: Reader<SharedPipe>,
    /// Words that the pipe had no room for.
    pub(super) backlog: VecDeque<u64>,
    /// Error by which the socket ended.
    ended: Option<ErrorKind>,
}

impl ShmTransport {
    /// Creates a transport without bytes in flight.
    pub fn new(pipes: Pipes) -> Self {
        Self {
            writer: Writer::new(pipes.outgoing),
            reader: Reader::new(pipes.incoming),
            backlog: VecDeque::new(),
            ended: None,
        }
    }

    /// # Safety
    /// As [`Wire::send`].
    pub unsafe fn send(&mut self, socket: &OwnedFd, segments: &mut [Segment; 2]) -> io::Result<()> {
        if self.ended.is_some() {
            return Err(ErrorKind::BrokenPipe.into());
        }
        self.flush(socket)?;
        if self.backlog.is_empty() {
            // SAFETY: the caller's promise.
            let count = unsafe {
                self.writer
                    .write(segments.map(bytes_of).map(|segment| segment.cast_const()))
            };
            advance(segments, count.map_err(corrupt)?);
            if self.writer.must_wake() {
                ring(socket)?;
            }
        }
        for segment in segments {
            for at in 0..segment.iov_len / WORD_BYTES {
                // SAFETY: within the segment; the rest is the caller's promise.
                let word = unsafe { segment.iov_base.cast::<u64>().add(at).read_unaligned() };
                self.backlog.push_back(word);
            }
        }
        while self.backlog.len() * WORD_BYTES > BUFFER_BYTES {
            self.wait_for_room(socket)?;
        }
        Ok(())
    }

    /// Writes as much of the backlog as the pipe has room for.
    fn flush(&mut self, socket: &OwnedFd) -> io::Result<()> {
        if self.backlog.is_empty() {
            return Ok(());
        }
        let (first, second) = self.backlog.as_slices();
        let bytes =
            |words: &[u64]| ptr::slice_from_raw_parts(words.as_ptr().cast::<u8>(), size_of_val(words));
        // SAFETY: both are borrowed as long as the call.
        let count = unsafe { self.writer.write([bytes(first), bytes(second)]) }.map_err(corrupt)?;
        self.backlog.drain(..count / WORD_BYTES);
        if count > 0 && self.writer.must_wake() {
            ring(socket)?;
        }
        Ok(())
    }

    fn wait_for_room(&mut self, socket: &OwnedFd) -> io::Result<()> {
        if self.writer.prepare_to_wait().map_err(corrupt)? {
            let mut wait = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
            let has_come = poll(&mut wait, PollTimeout::from(SEND_TIMEOUT_MS));
            self.writer.unblocked();
            if has_come == Ok(0) {
                return Err(ErrorKind::TimedOut.into());
            }
            self.read_bells(socket);
            if self.ended.is_some() {
                return Err(ErrorKind::BrokenPipe.into());
            }
        }
        self.flush(socket)
    }

    /// # Safety
    /// As [`Wire::receive`].
    pub unsafe fn receive(
        &mut self,
        socket: &OwnedFd,
        rung: &mut bool,
        segments: [Segment; 2],
    ) -> io::Result<Option<usize>> {
        if self.ended.is_none() {
            self.flush(socket)?;
        }
        // SAFETY: the caller's promise.
        let mut count = unsafe { self.reader.read(segments.map(bytes_of)) }.map_err(corrupt)?;
        if count == 0 && std::mem::take(rung) {
            self.read_bells(socket);
            // The pipe now has all bytes that were written before the doorbell or the end.
            // SAFETY: as above.
            count = unsafe { self.reader.read(segments.map(bytes_of)) }.map_err(corrupt)?;
        }
        if self.reader.must_wake() {
            // A connection that is closed needs no doorbell.
            let _ = ring(socket);
        }
        match (count, self.ended) {
            (0, Some(kind)) => Err(kind.into()),
            (0, None) => Ok(None),
            _ => Ok(Some(count)),
        }
    }

    pub fn prepare_to_sleep(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        let mut has_nothing = self.reader.prepare_to_sleep().map_err(corrupt)?;
        if self.reader.must_wake() {
            let _ = ring(socket);
        }
        if !self.backlog.is_empty() && self.ended.is_none() {
            has_nothing &= self.writer.prepare_to_wait().map_err(corrupt)?;
        }
        Ok(has_nothing)
    }

    pub fn unblocked(&self) {
        self.reader.unblocked();
        self.writer.unblocked();
    }

    /// Reads the doorbells, and detects the end of the connection.
    fn read_bells(&mut self, socket: &OwnedFd) {
        let mut bells = [0; BELLS];
        loop {
            let mut filled = true;
            match receive(
                socket,
                &mut filled,
                &mut [segment(bells.as_mut_ptr(), BELLS), EMPTY_SEGMENT],
            ) {
                Ok(_) if !filled => return,
                Ok(_) => {}
                Err(error) => {
                    self.ended = Some(error.kind());
                    return;
                }
            }
        }
    }
}

/// Rings the doorbell of the other end.
fn ring(socket: &OwnedFd) -> io::Result<()> {
    let bell = [BELL];
    let mut segments = [segment(bell.as_ptr(), bell.len()), EMPTY_SEGMENT];
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the byte outlives the call.
    let count = unsafe { libc::sendmsg(socket.as_raw_fd(), &message(&mut segments), flags) };
    match count {
        0.. => Ok(()),
        _ => match io::Error::last_os_error() {
            // Unread doorbells fill the socket; one is enough.
            error if error.kind() == ErrorKind::WouldBlock => Ok(()),
            error => Err(error),
        },
    }
}

fn bytes_of(segment: Segment) -> *mut [u8] {
    ptr::slice_from_raw_parts_mut(segment.iov_base.cast(), segment.iov_len)
}

fn corrupt(error: Corrupt) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}
