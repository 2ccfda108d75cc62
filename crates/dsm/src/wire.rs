//! One of the two streams of a link: a socket and, where the two hosts share memory, a pipe each way in it.
//!
//! With pipes the bytes go by them. The socket then carries bells alone, of one byte, for a side that sleeps, and tells of the other
//! side's end: what that wrote before is read first. What a pipe has no room for is kept here, as the kernel keeps what a socket's
//! reader has not taken, so that two lanes that send at the same time don't wait for each other.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use urpc::host::SharedPipe;
use urpc::pipe::{Corrupt, Reader, WORD_BYTES, Writer};

/// Asked of the kernel for each socket, and what is kept for a pipe: pages for as many threads as a large host has.
const BUFFER_BYTES: usize = 4 << 20;
/// How long the other side may take nothing, milliseconds.
const PATIENCE_MS: u16 = 10_000;
const BELL: u8 = b'!';
/// Bells read at once. There are seldom two.
const BELLS: usize = 64;

/// Memory of the caller's that is sent from, or received to; with pipes a whole number of words.
pub type Part = libc::iovec;

/// A part of nothing.
pub const NO_PART: Part = Part {
    iov_base: ptr::null_mut(),
    iov_len: 0,
};

/// So many bytes there.
pub fn part(at: *const u8, bytes: usize) -> Part {
    Part {
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
    beside: Option<Box<Beside>>,
}

/// What the bytes go by.
#[derive(Debug)]
struct Beside {
    writer: Writer<SharedPipe>,
    reader: Reader<SharedPipe>,
    /// What there was no room for, in words.
    backlog: VecDeque<u64>,
    /// How the socket ended.
    ended: Option<ErrorKind>,
}

impl Wire {
    /// Over a connected socket, with pipes beside it or without.
    pub fn new(socket: OwnedFd, pipes: Option<Pipes>) -> Self {
        // More than an unprivileged process may have is cut by the kernel, which is enough for tens of pages.
        let _ = setsockopt(&socket, sockopt::SndBuf, &BUFFER_BYTES);
        let _ = setsockopt(&socket, sockopt::RcvBuf, &BUFFER_BYTES);
        let _ = setsockopt(&socket, sockopt::SndBufForce, &BUFFER_BYTES);
        let _ = setsockopt(&socket, sockopt::RcvBufForce, &BUFFER_BYTES);
        let beside = |pipes: Pipes| {
            Box::new(Beside {
                writer: Writer::new(pipes.outgoing),
                reader: Reader::new(pipes.incoming),
                backlog: VecDeque::new(),
                ended: None,
            })
        };
        Self {
            socket,
            filled: true,
            beside: pipes.map(beside),
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
    pub fn look(&mut self) {
        self.filled |= self.beside.is_none();
    }

    /// Before waiting on the socket: whether nothing has come, and the other side rings from now on for what does. Then
    /// [`Wire::awake`] is called.
    pub fn prepare_to_sleep(&mut self) -> bool {
        match &mut self.beside {
            // What went wrong shows as soon as it is read from.
            Some(beside) => beside.prepare_to_sleep(&self.socket).unwrap_or(false),
            None => true,
        }
    }

    /// After waiting, for whatever reason it ended.
    pub fn awake(&self) {
        if let Some(beside) = &self.beside {
            beside.reader.awake();
            beside.writer.awake();
        }
    }

    /// Sends all of the parts.
    ///
    /// # Safety
    /// The parts can be read, and nobody writes to them meanwhile.
    ///
    /// # Errors
    /// If the other side is gone, or takes nothing for long.
    pub unsafe fn send(&mut self, mut parts: [Part; 2]) -> io::Result<()> {
        match &mut self.beside {
            // SAFETY: as the caller promises.
            Some(beside) => unsafe { beside.send(&self.socket, &mut parts) },
            None => send(&self.socket, &mut parts),
        }
    }

    /// How many bytes came; none when there are none yet.
    ///
    /// # Safety
    /// The parts can be written, and nobody uses them meanwhile.
    ///
    /// # Errors
    /// `UnexpectedEof` if the other side is gone.
    pub unsafe fn receive(&mut self, mut parts: [Part; 2]) -> io::Result<Option<usize>> {
        match &mut self.beside {
            // SAFETY: as the caller promises.
            Some(beside) => unsafe { beside.receive(&self.socket, &mut self.filled, parts) },
            None => receive(&self.socket, &mut self.filled, &mut parts),
        }
    }
}

impl Beside {
    /// # Safety
    /// As [`Wire::send`].
    unsafe fn send(&mut self, socket: &OwnedFd, parts: &mut [Part; 2]) -> io::Result<()> {
        if self.ended.is_some() {
            return Err(ErrorKind::BrokenPipe.into());
        }
        self.flush(socket)?;
        if self.backlog.is_empty() {
            // SAFETY: as the caller promises.
            let count = unsafe {
                self.writer
                    .write(parts.map(bytes_of).map(|part| part.cast_const()))
            };
            advance(parts, count.map_err(corrupt)?);
            if self.writer.must_wake() {
                ring(socket)?;
            }
        }
        for part in parts {
            for at in 0..part.iov_len / WORD_BYTES {
                // SAFETY: within the part; the rest is as the caller promises.
                let word = unsafe { part.iov_base.cast::<u64>().add(at).read_unaligned() };
                self.backlog.push_back(word);
            }
        }
        while self.backlog.len() * WORD_BYTES > BUFFER_BYTES {
            self.wait_for_room(socket)?;
        }
        Ok(())
    }

    /// Writes what is kept, as much as there is room for.
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
            let has_come = poll(&mut wait, PollTimeout::from(PATIENCE_MS));
            self.writer.awake();
            if has_come == Ok(0) {
                return Err(ErrorKind::TimedOut.into());
            }
            self.hear(socket);
            if self.ended.is_some() {
                return Err(ErrorKind::BrokenPipe.into());
            }
        }
        self.flush(socket)
    }

    /// # Safety
    /// As [`Wire::receive`].
    unsafe fn receive(
        &mut self,
        socket: &OwnedFd,
        rung: &mut bool,
        parts: [Part; 2],
    ) -> io::Result<Option<usize>> {
        if self.ended.is_none() {
            self.flush(socket)?;
        }
        // SAFETY: as the caller promises.
        let mut count = unsafe { self.reader.read(parts.map(bytes_of)) }.map_err(corrupt)?;
        if count == 0 && std::mem::take(rung) {
            self.hear(socket);
            // What the other side wrote before it rang, or ended, is there now.
            // SAFETY: as above.
            count = unsafe { self.reader.read(parts.map(bytes_of)) }.map_err(corrupt)?;
        }
        if self.reader.must_wake() {
            // Who is gone waits for no room.
            let _ = ring(socket);
        }
        match (count, self.ended) {
            (0, Some(kind)) => Err(kind.into()),
            (0, None) => Ok(None),
            _ => Ok(Some(count)),
        }
    }

    fn prepare_to_sleep(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        let mut has_nothing = self.reader.prepare_to_sleep().map_err(corrupt)?;
        if self.reader.must_wake() {
            let _ = ring(socket);
        }
        if !self.backlog.is_empty() && self.ended.is_none() {
            has_nothing &= self.writer.prepare_to_wait().map_err(corrupt)?;
        }
        Ok(has_nothing)
    }

    /// Takes the bells, and learns of the end.
    fn hear(&mut self, socket: &OwnedFd) {
        let mut bells = [0; BELLS];
        loop {
            let mut filled = true;
            match receive(
                socket,
                &mut filled,
                &mut [part(bells.as_mut_ptr(), BELLS), NO_PART],
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

/// Wakes the other side.
fn ring(socket: &OwnedFd) -> io::Result<()> {
    let bell = [BELL];
    let mut parts = [part(bell.as_ptr(), bell.len()), NO_PART];
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the bell outlives the call.
    let count = unsafe { libc::sendmsg(socket.as_raw_fd(), &message(&mut parts), flags) };
    match count {
        0.. => Ok(()),
        _ => match io::Error::last_os_error() {
            // Bells that were not heard are there in any number, and one would do.
            error if error.kind() == ErrorKind::WouldBlock => Ok(()),
            error => Err(error),
        },
    }
}

fn bytes_of(part: Part) -> *mut [u8] {
    ptr::slice_from_raw_parts_mut(part.iov_base.cast(), part.iov_len)
}

fn corrupt(error: Corrupt) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

/// So many bytes of the parts are done.
fn advance(parts: &mut [Part; 2], mut count: usize) {
    for part in parts {
        let done = count.min(part.iov_len);
        part.iov_base = part.iov_base.wrapping_byte_add(done);
        part.iov_len -= done;
        count -= done;
    }
}

fn message(parts: &mut [Part]) -> libc::msghdr {
    // SAFETY: a message header of zeroes is one without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    message
}

/// Sends all of the parts by a socket.
fn send(stream: &OwnedFd, parts: &mut [Part; 2]) -> io::Result<()> {
    while parts.iter().any(|part| part.iov_len > 0) {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the parts are memory of the caller's, which outlives the call.
        let count = unsafe { libc::sendmsg(stream.as_raw_fd(), &message(parts), flags) };
        if count >= 0 {
            advance(parts, count as usize);
            continue;
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            ErrorKind::Interrupted => {}
            ErrorKind::WouldBlock => {
                let mut wait = [PollFd::new(stream.as_fd(), PollFlags::POLLOUT)];
                if poll(&mut wait, PollTimeout::from(PATIENCE_MS)) == Ok(0) {
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
fn receive(stream: &OwnedFd, filled: &mut bool, parts: &mut [Part; 2]) -> io::Result<Option<usize>> {
    if !*filled {
        return Ok(None);
    }
    let room: usize = parts.iter().map(|part| part.iov_len).sum();
    // SAFETY: the parts are memory of the caller's that may be written, and outlives the call.
    let count = unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message(parts), libc::MSG_DONTWAIT) };
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
