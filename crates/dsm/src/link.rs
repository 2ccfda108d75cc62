//! The two streams between two nodes that belong to one lane: *bulk* for requests and their answers, most with a page, and *control*
//! for the rest, so that an invalidation never waits behind a page. A page is sent straight from the region, after its message
//! of 16 bytes, and received straight into it.
//!
//! Requests go on the stream of their answers because TCP acknowledges one with the other: with the two on different streams a
//! fetch took 2 us more, of 10.
//!
//! Neither blocks: there is at most one page under way for each thread that waits, and buffers are made for more. Only if the
//! other side does not take anything for long does sending wait, and then fail. What carries the bytes is [`Wire`]'s business.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::PAGE_BYTES;
use crate::frame::{FRAME_BYTES, Frame};
use crate::wire::{EMPTY_SEGMENT, Pipes, Wire, segment};

/// What a page takes on the bulk stream.
pub const PAGE_FRAME_BYTES: usize = FRAME_BYTES + PAGE_BYTES;
/// Control messages read at once.
const INBOX_BYTES: usize = 64 * FRAME_BYTES;

/// One lane's way to one other node.
#[derive(Debug)]
pub struct Link {
    control: Wire,
    bulk: Wire,
    inbox: [u8; INBOX_BYTES],
    /// What of `inbox` has come and not been taken.
    unread: std::ops::Range<usize>,
    partial: PartialFrame,
    /// What came on the bulk stream after a message without a page.
    surplus: Vec<u8>,
}

/// A page that has come in part.
#[derive(Debug)]
struct PartialFrame {
    frame: Frame,
    /// Bytes so far, the frame's included.
    bytes: usize,
    /// Where the page's bytes go, once the frame is known; null if it has none.
    to: *mut u8,
}

// SAFETY: the pointer is into the region that the lane has, and used only by who has the link.
unsafe impl Send for Link {}

impl Link {
    /// From two connected sockets, and the pipes beside each where there are any: control and bulk.
    pub fn new([control, bulk]: [OwnedFd; 2], pipes: Option<[Pipes; 2]>) -> Self {
        let [control_pipes, bulk_pipes] = pipes.map_or([None, None], |pipes| pipes.map(Some));
        Self {
            control: Wire::new(control, control_pipes),
            bulk: Wire::new(bulk, bulk_pipes),
            inbox: [0; INBOX_BYTES],
            unread: 0..0,
            partial: PartialFrame {
                frame: [0; FRAME_BYTES],
                bytes: 0,
                to: std::ptr::null_mut(),
            },
            surplus: Vec::with_capacity(PAGE_BYTES),
        }
    }

    /// What to wait on.
    pub fn streams(&self) -> [BorrowedFd<'_>; 2] {
        [self.control.socket(), self.bulk.socket()]
    }

    /// The kernel has something, or may have, for these streams: what it is not said of is not read, once it was found empty.
    pub fn fill(&mut self, [control, bulk]: [bool; 2]) {
        if control {
            self.control.fill();
        }
        if bulk {
            self.bulk.fill();
        }
    }

    /// Who polls may find something ([`Wire::poll_streams`]).
    pub fn poll_streams(&mut self) {
        self.control.poll_streams();
        self.bulk.poll_streams();
    }

    /// Before waiting on the streams: whether nothing has come that they don't tell of. Then [`Link::awake`] is called.
    pub fn prepare_to_sleep(&mut self) -> bool {
        self.control.prepare_to_sleep() && self.bulk.prepare_to_sleep()
    }

    /// After waiting.
    pub fn awake(&self) {
        self.control.awake();
        self.bulk.awake();
    }

    /// Whether something has been received that was not taken: the kernel won't tell of it again.
    pub fn has_more(&self) -> bool {
        self.unread.len() >= FRAME_BYTES || !self.surplus.is_empty()
    }

    /// Sends one message or several: requests and answers, or others.
    ///
    /// # Errors
    /// If the other side is gone, or takes nothing for long.
    pub fn send(&mut self, frames: &[u8], with_answers: bool) -> io::Result<()> {
        let stream = match with_answers {
            true => &mut self.bulk,
            false => &mut self.control,
        };
        // SAFETY: borrowed as long as the call.
        unsafe { stream.send([segment(frames.as_ptr(), frames.len()), EMPTY_SEGMENT]) }
    }

    /// Sends messages of which the last has a page, whose bytes are read before this returns.
    ///
    /// # Safety
    /// The page can be read, and nobody may write to it meanwhile.
    ///
    /// # Errors
    /// As [`Link::send`].
    pub unsafe fn send_page(&mut self, frames: &[u8], page: *const [u8; PAGE_BYTES]) -> io::Result<()> {
        let frames = segment(frames.as_ptr(), frames.len());
        // SAFETY: the messages are borrowed as long as the call, and the caller promises the same of the page.
        unsafe { self.bulk.send([frames, segment(page.cast(), PAGE_BYTES)]) }
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
            // SAFETY: room of ours.
            match unsafe {
                self.control
                    .receive([segment(room.as_mut_ptr(), room.len()), EMPTY_SEGMENT])
            }? {
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
            let partial = &mut self.partial;
            let had = partial.bytes;
            if had < FRAME_BYTES {
                let rest = &mut partial.frame[had..];
                let (count, mut beyond) = if self.surplus.is_empty() {
                    let segments = [segment(rest.as_mut_ptr(), rest.len()), segment(guess, PAGE_BYTES)];
                    // SAFETY: the rest of a message of ours, and what the caller promises.
                    let Some(count) = unsafe { self.bulk.receive(segments) }? else {
                        return Ok(None);
                    };
                    (count.min(rest.len()), count.saturating_sub(rest.len()))
                } else {
                    let count = rest.len().min(self.surplus.len());
                    rest[..count].copy_from_slice(&self.surplus[..count]);
                    self.surplus.drain(..count);
                    (count, 0)
                };
                partial.bytes += count;
                if partial.bytes < FRAME_BYTES {
                    continue;
                }
                match place(&partial.frame)? {
                    Some(to) => {
                        partial.to = to;
                        if to != guess && beyond > 0 {
                            // SAFETY: as the caller promises; `guess` now holds so many bytes of the page.
                            unsafe { to.copy_from(guess, beyond) };
                        }
                    }
                    None => {
                        // What follows is another message's.
                        // SAFETY: so many bytes have come to `guess`.
                        self.surplus
                            .extend(unsafe { std::slice::from_raw_parts(guess, beyond) });
                        beyond = 0;
                        partial.to = std::ptr::null_mut();
                    }
                }
                partial.bytes += beyond;
            } else {
                let done = had - FRAME_BYTES;
                let to = partial.to.wrapping_add(done);
                let count = if self.surplus.is_empty() {
                    // SAFETY: as the caller promises, the rest of the page.
                    let Some(count) = unsafe { self.bulk.receive([segment(to, PAGE_BYTES - done), EMPTY_SEGMENT]) }?
                    else {
                        return Ok(None);
                    };
                    count
                } else {
                    let count = self.surplus.len().min(PAGE_BYTES - done);
                    // SAFETY: as the caller promises, with room for the rest of the page.
                    unsafe { to.copy_from(self.surplus.as_ptr(), count) };
                    self.surplus.drain(..count);
                    count
                };
                partial.bytes += count;
            }
            if partial.bytes == PAGE_FRAME_BYTES || (partial.bytes == FRAME_BYTES && partial.to.is_null())
            {
                partial.bytes = 0;
                return Ok(Some(partial.frame));
            }
        }
    }
}

#[cfg(test)]
mod tests;
