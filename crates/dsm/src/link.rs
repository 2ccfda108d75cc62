//! The two streams between two nodes that belong to one lane: *bulk* for requests and their answers, most with a page, and *control*
//! for the rest, so that an invalidation never waits behind a page. A page is sent straight from the region, after its message
//! of 16 bytes, and received straight into it.
//!
//! Requests go on the stream of their answers because TCP acknowledges one with the other: with the two on different streams a
//! fetch took 2 us more, of 10.
//!
//! Neither blocks: there is at most one page under way for each thread that waits, and buffers are made for more. Only if the
//! other side does not take anything for long does sending wait, and then fail.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};

use crate::PAGE_BYTES;

/// A message's bytes.
pub const FRAME_BYTES: usize = coherence::MESSAGE_BYTES;
/// What a page takes on the bulk stream.
pub const PAGE_FRAME_BYTES: usize = FRAME_BYTES + PAGE_BYTES;
/// Asked of the kernel for each stream: pages for as many threads as a large host has.
const BUFFER_BYTES: usize = 4 << 20;
/// Control messages read at once.
const INBOX_BYTES: usize = 64 * FRAME_BYTES;
/// How long the other side may take nothing, milliseconds.
const PATIENCE_MS: u16 = 10_000;

/// A message as it travels.
pub type Frame = [u8; FRAME_BYTES];

/// One lane's way to one other node.
#[derive(Debug)]
pub struct Link {
    control: OwnedFd,
    bulk: OwnedFd,
    inbox: [u8; INBOX_BYTES],
    /// The kernel may have more for control, and for bulk, than was read.
    filled: [bool; 2],
    /// What of `inbox` has come and not been taken.
    unread: std::ops::Range<usize>,
    arriving: Arriving,
    /// What came on the bulk stream after a message without a page.
    early: Vec<u8>,
}

/// A page that has come in part.
#[derive(Debug)]
struct Arriving {
    frame: Frame,
    /// Bytes so far, the frame's included.
    bytes: usize,
    /// Where the page's bytes go, once the frame is known; null if it has none.
    to: *mut u8,
}

// SAFETY: the pointer is into the region that the lane has, and used only by who has the link.
unsafe impl Send for Link {}

impl Link {
    /// From two connected sockets.
    ///
    /// # Errors
    /// If they are none.
    pub fn new(control: OwnedFd, bulk: OwnedFd) -> io::Result<Self> {
        for stream in [&control, &bulk] {
            // More than an unprivileged process may have is cut by the kernel, which is enough for tens of pages.
            let _ = setsockopt(stream, sockopt::SndBuf, &BUFFER_BYTES);
            let _ = setsockopt(stream, sockopt::RcvBuf, &BUFFER_BYTES);
            let _ = setsockopt(stream, sockopt::SndBufForce, &BUFFER_BYTES);
            let _ = setsockopt(stream, sockopt::RcvBufForce, &BUFFER_BYTES);
        }
        Ok(Self {
            control,
            bulk,
            inbox: [0; INBOX_BYTES],
            filled: [true; 2],
            unread: 0..0,
            arriving: Arriving {
                frame: [0; FRAME_BYTES],
                bytes: 0,
                to: std::ptr::null_mut(),
            },
            early: Vec::with_capacity(PAGE_BYTES),
        })
    }

    /// What to wait on.
    pub fn streams(&self) -> [BorrowedFd<'_>; 2] {
        [self.control.as_fd(), self.bulk.as_fd()]
    }

    /// The kernel has something, or may have, for these streams: what it is not said of is not read, once it was found empty.
    pub fn fill(&mut self, [control, bulk]: [bool; 2]) {
        self.filled = [self.filled[0] || control, self.filled[1] || bulk];
    }

    /// Whether something has been received that was not taken: the kernel won't tell of it again.
    pub fn has_more(&self) -> bool {
        self.unread.len() >= FRAME_BYTES || !self.early.is_empty()
    }

    /// Sends one message or several: requests and answers, or others.
    ///
    /// # Errors
    /// If the other side is gone, or takes nothing for long.
    pub fn send(&self, frames: &[u8], with_answers: bool) -> io::Result<()> {
        let stream = if with_answers { &self.bulk } else { &self.control };
        send(stream, &mut [part(frames.as_ptr(), frames.len()), NO_PART])
    }

    /// Sends messages of which the last has a page, whose bytes are read before this returns.
    ///
    /// # Errors
    /// As [`Link::send`].
    pub fn send_page(&self, frames: &[u8], page: *const [u8; PAGE_BYTES]) -> io::Result<()> {
        send(
            &self.bulk,
            &mut [part(frames.as_ptr(), frames.len()), part(page.cast(), PAGE_BYTES)],
        )
    }

    /// The next control message, if one has come whole.
    ///
    /// # Errors
    /// `UnexpectedEof` if the other side is gone.
    pub fn next_control(&mut self) -> io::Result<Option<Frame>> {
        if self.unread.len() < FRAME_BYTES {
            self.inbox.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
            let room = &mut self.inbox[self.unread.end..];
            let mut parts = [part(room.as_ptr(), room.len()), NO_PART];
            match receive(&self.control, &mut self.filled[0], &mut parts)? {
                Some(count) => self.unread.end += count,
                None => return Ok(None),
            }
            if self.unread.len() < FRAME_BYTES {
                return Ok(None);
            }
        }
        let mut frame = [0; FRAME_BYTES];
        frame.copy_from_slice(&self.inbox[self.unread.start..][..FRAME_BYTES]);
        self.unread.start += FRAME_BYTES;
        Ok(Some(frame))
    }

    /// The next message of the bulk stream, if it has come whole. If it has a page, `place` says where that goes. Its bytes are
    /// first received to `guess`, which may be overwritten and must have a page's room: if it is the right place, nothing is
    /// copied.
    ///
    /// # Safety
    /// `guess`, and what `place` gives, are a page's room that nobody else uses until the page has come whole.
    ///
    /// # Errors
    /// `UnexpectedEof` if the other side is gone, or as `place` says.
    pub unsafe fn next_bulk(
        &mut self,
        guess: *mut u8,
        mut place: impl FnMut(&Frame) -> io::Result<Option<*mut u8>>,
    ) -> io::Result<Option<Frame>> {
        loop {
            let arriving = &mut self.arriving;
            let had = arriving.bytes;
            if had < FRAME_BYTES {
                let rest = &mut arriving.frame[had..];
                let (count, mut beyond) = if self.early.is_empty() {
                    let mut parts = [part(rest.as_ptr(), rest.len()), part(guess, PAGE_BYTES)];
                    let Some(count) = receive(&self.bulk, &mut self.filled[1], &mut parts)? else {
                        return Ok(None);
                    };
                    (count.min(rest.len()), count.saturating_sub(rest.len()))
                } else {
                    let count = rest.len().min(self.early.len());
                    rest[..count].copy_from_slice(&self.early[..count]);
                    self.early.drain(..count);
                    (count, 0)
                };
                arriving.bytes += count;
                if arriving.bytes < FRAME_BYTES {
                    continue;
                }
                match place(&arriving.frame)? {
                    Some(to) => {
                        arriving.to = to;
                        if to != guess && beyond > 0 {
                            // SAFETY: as the caller promises; `guess` now holds so many bytes of the page.
                            unsafe { to.copy_from(guess, beyond) };
                        }
                    }
                    None => {
                        // What follows is another message's.
                        // SAFETY: so many bytes have come to `guess`.
                        self.early
                            .extend(unsafe { std::slice::from_raw_parts(guess, beyond) });
                        beyond = 0;
                        arriving.to = std::ptr::null_mut();
                    }
                }
                arriving.bytes += beyond;
            } else {
                let done = had - FRAME_BYTES;
                let to = arriving.to.wrapping_add(done);
                let count = if self.early.is_empty() {
                    let mut parts = [part(to, PAGE_BYTES - done), NO_PART];
                    let Some(count) = receive(&self.bulk, &mut self.filled[1], &mut parts)? else {
                        return Ok(None);
                    };
                    count
                } else {
                    let count = self.early.len().min(PAGE_BYTES - done);
                    // SAFETY: as the caller promises, with room for the rest of the page.
                    unsafe { to.copy_from(self.early.as_ptr(), count) };
                    self.early.drain(..count);
                    count
                };
                arriving.bytes += count;
            }
            if arriving.bytes == PAGE_FRAME_BYTES || (arriving.bytes == FRAME_BYTES && arriving.to.is_null())
            {
                arriving.bytes = 0;
                return Ok(Some(arriving.frame));
            }
        }
    }
}

const NO_PART: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

fn part(at: *const u8, bytes: usize) -> libc::iovec {
    libc::iovec {
        iov_base: at.cast_mut().cast(),
        iov_len: bytes,
    }
}

fn message(parts: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: a message header of zeroes is one without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    message
}

/// Sends all of the parts.
fn send(stream: &OwnedFd, parts: &mut [libc::iovec; 2]) -> io::Result<()> {
    while parts.iter().any(|part| part.iov_len > 0) {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the parts are memory of the caller's, which outlives the call.
        let count = unsafe { libc::sendmsg(stream.as_raw_fd(), &message(parts), flags) };
        if count >= 0 {
            let mut count = count as usize;
            for part in &mut *parts {
                let sent = count.min(part.iov_len);
                part.iov_base = part.iov_base.wrapping_byte_add(sent);
                part.iov_len -= sent;
                count -= sent;
            }
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

/// How many bytes came; none when there are none yet. `filled` is whether to ask, and then whether there may be more: less than
/// there is room for is all.
fn receive(stream: &OwnedFd, filled: &mut bool, parts: &mut [libc::iovec; 2]) -> io::Result<Option<usize>> {
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
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (Link, Link) {
        let (control, far_control) = UnixStream::pair().unwrap();
        let (bulk, far_bulk) = UnixStream::pair().unwrap();
        (
            Link::new(control.into(), bulk.into()).unwrap(),
            Link::new(far_control.into(), far_bulk.into()).unwrap(),
        )
    }

    #[test]
    fn messages_come_in_order_and_whole() {
        let (near, mut far) = pair();
        assert_eq!(far.next_control().unwrap(), None);
        for number in 0..200_u8 {
            near.send(&[number; FRAME_BYTES], false).unwrap();
        }
        far.fill([true, false]);
        for number in 0..200_u8 {
            assert_eq!(far.next_control().unwrap(), Some([number; FRAME_BYTES]));
        }
        assert_eq!(far.next_control().unwrap(), None);
    }

    #[test]
    fn a_page_in_pieces_lands_where_its_message_says_whatever_was_guessed() {
        for guess_is_right in [true, false] {
            let (control, _far_control) = UnixStream::pair().unwrap();
            let (bulk, mut far) = UnixStream::pair().unwrap();
            let mut link = Link::new(control.into(), bulk.into()).unwrap();
            let mut pages = [[0_u8; PAGE_BYTES]; 2];
            let sent: Vec<u8> = (0..PAGE_FRAME_BYTES).map(|at| (at % 251) as u8).collect();
            let [right, wrong] = pages.each_mut().map(|page| page.as_mut_ptr());
            let guess = if guess_is_right { right } else { wrong };
            let mut frame = None;
            for piece in [&sent[..5], &sent[5..300], &sent[300..4000], &sent[4000..]] {
                assert_eq!(frame, None);
                far.write_all(piece).unwrap();
                link.fill([false, true]);
                // SAFETY: pages of this test's, which outlive the link.
                frame = unsafe { link.next_bulk(guess, |_| Ok(Some(right))) }.unwrap();
            }
            assert_eq!(frame.unwrap(), sent[..FRAME_BYTES]);
            assert_eq!(pages[0], sent[FRAME_BYTES..]);
        }
    }

    #[test]
    fn two_pages_do_not_run_into_each_other() {
        let (near, mut far) = pair();
        near.send_page(&[1; FRAME_BYTES], &[11; PAGE_BYTES]).unwrap();
        near.send_page(&[2; FRAME_BYTES], &[22; PAGE_BYTES]).unwrap();
        let mut page = [0_u8; PAGE_BYTES];
        let at = page.as_mut_ptr();
        for number in [1, 2] {
            // SAFETY: a page of this test's.
            let frame = unsafe { far.next_bulk(at, |_| Ok(Some(at))) }.unwrap();
            assert_eq!(frame, Some([number; FRAME_BYTES]));
            assert_eq!(page, [number * 11; PAGE_BYTES]);
        }
    }

    fn next_page(link: &mut Link) -> Option<Frame> {
        let mut page = [0_u8; PAGE_BYTES];
        let at = page.as_mut_ptr();
        // SAFETY: a page of this test's, and all that is sent whole comes whole.
        unsafe { link.next_bulk(at, |_| Ok(Some(at))) }.unwrap()
    }

    /// Otherwise the lane looks again instead of sleeping, and keeps its CPU from the thread that waited for the page.
    #[test]
    fn who_has_received_a_page_whole_may_sleep_as_the_kernel_tells_of_the_next() {
        let (near, mut far) = pair();
        near.send_page(&[1; FRAME_BYTES], &[11; PAGE_BYTES]).unwrap();
        far.fill([true; 2]);
        assert_eq!(next_page(&mut far), Some([1; FRAME_BYTES]));
        assert!(!far.has_more());
        near.send_page(&[2; FRAME_BYTES], &[22; PAGE_BYTES]).unwrap();
        assert!(!far.has_more());
        let mut told = [PollFd::new(far.bulk.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut told, PollTimeout::ZERO), Ok(1));
        assert_eq!(next_page(&mut far), Some([2; FRAME_BYTES]));
        assert!(!far.has_more());
    }

    #[test]
    fn who_has_received_messages_that_were_not_taken_does_not_sleep() {
        let (near, mut far) = pair();
        for with_answers in [true, false] {
            near.send(&[1; 2 * FRAME_BYTES], with_answers).unwrap();
            far.fill([true; 2]);
            let next = |far: &mut Link| {
                let mut guess = [0_u8; PAGE_BYTES];
                // SAFETY: a page of this test's, for messages without one.
                let bulk = unsafe { far.next_bulk(guess.as_mut_ptr(), |_| Ok(None)) }.unwrap();
                bulk.or_else(|| far.next_control().unwrap())
            };
            assert_eq!(next(&mut far), Some([1; FRAME_BYTES]));
            assert!(far.has_more(), "with answers: {with_answers}");
            assert_eq!(next(&mut far), Some([1; FRAME_BYTES]));
            assert!(!far.has_more(), "with answers: {with_answers}");
        }
    }

    #[test]
    fn requests_and_pages_mixed_and_cut_anywhere_come_apart() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..50 {
            let (control, _far_control) = UnixStream::pair().unwrap();
            let (bulk, mut far) = UnixStream::pair().unwrap();
            let mut link = Link::new(control.into(), bulk.into()).unwrap();
            // An even number has a page of it.
            let numbers: Vec<u8> = (0..20).map(|_| random.u8(..)).collect();
            let mut sent = Vec::new();
            for number in &numbers {
                sent.extend([*number; FRAME_BYTES]);
                if number % 2 == 0 {
                    sent.extend([*number; PAGE_BYTES]);
                }
            }
            let (mut guess, mut right) = ([0_u8; PAGE_BYTES], [0_u8; PAGE_BYTES]);
            let mut came = Vec::new();
            while !sent.is_empty() {
                let piece = random.usize(1..9000).min(sent.len());
                far.write_all(&sent[..piece]).unwrap();
                sent.drain(..piece);
                link.fill([false, true]);
                let right_at = right.as_mut_ptr();
                let place = |frame: &Frame| Ok(frame[0].is_multiple_of(2).then_some(right_at));
                // SAFETY: pages of this test's.
                while let Some(frame) = unsafe { link.next_bulk(guess.as_mut_ptr(), place) }.unwrap() {
                    assert_eq!(frame, [frame[0]; FRAME_BYTES]);
                    // SAFETY: written through the pointer above, which is not used now.
                    let page = unsafe { right_at.cast::<[u8; PAGE_BYTES]>().read() };
                    assert!(frame[0] % 2 == 1 || page == [frame[0]; PAGE_BYTES]);
                    came.push(frame[0]);
                }
            }
            assert_eq!(came, numbers);
        }
    }

    #[test]
    fn the_end_of_the_other_side_is_told() {
        let (near, mut far) = pair();
        drop(near);
        assert_eq!(far.next_control().unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let mut page = [0_u8; PAGE_BYTES];
        let at = page.as_mut_ptr();
        // SAFETY: a page of this test's.
        let error = unsafe { far.next_bulk(at, |_| Ok(Some(at))) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        assert!(far.send(&[0; FRAME_BYTES], false).is_err());
    }
}
