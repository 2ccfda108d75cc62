//! The two streams of one page server to one other node: *bulk* for requests and their replies, most with a
//! page, and *control* for the rest, so that an invalidation never waits behind a page. A page is sent from
//! the region after its message of 16 bytes, and received into the region.
//!
//! Requests go on the stream of their replies because TCP acknowledges one with the other: with the two on
//! different streams a fetch took 2 us more, of 10.
//!
//! Neither stream blocks: at most one page is in flight for each thread that waits, and buffers hold more.
//! Only if the receiver takes nothing for long does a send block, and then fail. [`Wire`] carries the bytes.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::PAGE_LEN;
use crate::frame::{FRAME_BYTES, Frame};
use crate::wire::{EMPTY_SEGMENT, Pipes, Wire, segment};

/// Bytes of a message with a page.
pub const PAGE_FRAME_BYTES: usize = FRAME_BYTES + PAGE_LEN;
/// Control messages received at once.
const INBOX_BYTES: usize = 64 * FRAME_BYTES;

/// Connection of one page server to one other node.
#[derive(Debug)]
pub struct Link {
    control: Wire,
    bulk: Wire,
    inbox: [u8; INBOX_BYTES],
    /// Range of `inbox` that was received and not taken.
    unread: std::ops::Range<usize>,
    partial: PartialFrame,
    /// Bytes of the bulk stream received after a message without a page.
    surplus: Vec<u8>,
}

/// A message that is being received, with its page.
#[derive(Debug)]
struct PartialFrame {
    frame: Frame,
    /// Bytes received so far, the frame's included.
    bytes: usize,
    /// Destination of the page's bytes, once the frame is complete; null if it has none.
    to: *mut u8,
}

// SAFETY: the pointer is into the page server's region, and only the link's owner uses it.
unsafe impl Send for Link {}

impl Link {
    /// Creates a link from two connected sockets, control and bulk, and the pipes beside them, if there are
    /// any.
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
            surplus: Vec::with_capacity(PAGE_LEN),
        }
    }

    /// Returns the descriptors to wait on.
    pub fn streams(&self) -> [BorrowedFd<'_>; 2] {
        [self.control.socket(), self.bulk.socket()]
    }

    /// Marks the streams that the kernel reports readable. A stream that was read empty is not read again
    /// before.
    pub fn fill(&mut self, [control, bulk]: [bool; 2]) {
        if control {
            self.control.fill();
        }
        if bulk {
            self.bulk.fill();
        }
    }

    /// Marks both streams as possibly readable, for a poller ([`Wire::poll_streams`]).
    pub fn poll_streams(&mut self) {
        self.control.poll_streams();
        self.bulk.poll_streams();
    }

    /// Prepares to wait on the streams. Returns whether nothing has arrived that they don't report.
    /// [`Link::unblocked`] must follow.
    pub fn prepare_to_sleep(&mut self) -> bool {
        self.control.prepare_to_sleep() && self.bulk.prepare_to_sleep()
    }

    /// Ends the wait.
    pub fn unblocked(&self) {
        self.control.unblocked();
        self.bulk.unblocked();
    }

    /// Returns whether bytes were received and not taken, of which the kernel will not report again.
    pub fn has_more(&self) -> bool {
        self.unread.len() >= FRAME_BYTES || !self.surplus.is_empty()
    }

    /// Sends messages, on the bulk stream if `with_answers`, else on the control stream.
    ///
    /// # Errors
    /// If the connection is closed, or takes nothing for long.
    pub fn send(&mut self, frames: &[u8], with_answers: bool) -> io::Result<()> {
        let stream = match with_answers {
            true => &mut self.bulk,
            false => &mut self.control,
        };
        // SAFETY: the frames are borrowed as long as the call.
        unsafe { stream.send([segment(frames.as_ptr(), frames.len()), EMPTY_SEGMENT]) }
    }

    /// Sends messages, the last one with a page whose bytes are read before this returns.
    ///
    /// # Safety
    /// The page can be read, and nothing writes it during the call.
    ///
    /// # Errors
    /// As [`Link::send`].
    pub unsafe fn send_page(&mut self, frames: &[u8], page: *const [u8; PAGE_LEN]) -> io::Result<()> {
        let frames = segment(frames.as_ptr(), frames.len());
        // SAFETY: the frames are borrowed as long as the call, and the caller promises the same of the page.
        unsafe { self.bulk.send([frames, segment(page.cast(), PAGE_LEN)]) }
    }

    /// Returns the next control message, if one is complete.
    ///
    /// # Errors
    /// `UnexpectedEof` if the connection is closed.
    pub fn next_control(&mut self) -> io::Result<Option<Frame>> {
        if self.unread.len() < FRAME_BYTES {
            self.inbox.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
            let room = &mut self.inbox[self.unread.end..];
            // SAFETY: the room is in this link's own buffer.
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

    /// Returns the next message of the bulk stream, if one is complete. If it has a page, `place` returns the
    /// destination of the bytes. They are first received at `guess`, which has room for a page and may be
    /// overwritten: nothing is copied if the guess is right.
    ///
    /// # Safety
    /// `guess`, and the result of `place`, have room for a page and are not used otherwise until the page is
    /// complete.
    ///
    /// # Errors
    /// `UnexpectedEof` if the connection is closed, or the error of `place`.
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
                    let segments = [segment(rest.as_mut_ptr(), rest.len()), segment(guess, PAGE_LEN)];
                    // SAFETY: the rest of this link's own frame, and the caller's promise.
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
                            // SAFETY: the caller's promise; `guess` holds that many bytes of the page.
                            unsafe { to.copy_from(guess, beyond) };
                        }
                    }
                    None => {
                        // The bytes belong to another message.
                        // SAFETY: that many bytes were received at `guess`.
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
                    // SAFETY: the caller's promise for the rest of the page.
                    let Some(count) =
                        unsafe { self.bulk.receive([segment(to, PAGE_LEN - done), EMPTY_SEGMENT]) }?
                    else {
                        return Ok(None);
                    };
                    count
                } else {
                    let count = self.surplus.len().min(PAGE_LEN - done);
                    // SAFETY: the caller's promise; there is room for the rest of the page.
                    unsafe { to.copy_from(self.surplus.as_ptr(), count) };
                    self.surplus.drain(..count);
                    count
                };
                partial.bytes += count;
            }
            if partial.bytes == PAGE_FRAME_BYTES || (partial.bytes == FRAME_BYTES && partial.to.is_null()) {
                partial.bytes = 0;
                return Ok(Some(partial.frame));
            }
        }
    }
}

#[cfg(test)]
mod tests;
