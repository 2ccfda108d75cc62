//! The reading side of a ring.

use core::ops::Deref;

use super::{Ring, prefetch};
use crate::message::Message;
use crate::sync::Ordering;

/// Reason why no message will arrive.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[cfg_attr(feature = "host", derive(thiserror::Error))]
pub enum RecvError {
    /// The sender is gone, and all it has sent was taken.
    #[cfg_attr(feature = "host", error("the sender is gone"))]
    Closed,
}

/// The only receiver of a ring.
#[derive(Debug)]
pub struct Receiver<R: Deref<Target = Ring>> {
    ring: R,
    /// Number of messages taken.
    taken: u64,
    /// Number of them that was published to the sender.
    published: u64,
    /// Whether room was published since the last check for a blocked sender.
    check_pending: bool,
    prefetch: bool,
}

impl<R: Deref<Target = Ring>> Receiver<R> {
    /// Creates the receiver of an empty ring, or of one that has messages already.
    ///
    /// # Panics
    /// Panics if the number of lines is no power of two, or out of bounds.
    pub fn new(ring: R) -> Self {
        ring.check();
        Self {
            ring,
            taken: 0,
            published: 0,
            check_pending: false,
            prefetch: false,
        }
    }

    /// Prefetches the next line while the caller handles a message.
    pub fn with_prefetch(mut self) -> Self {
        self.prefetch = true;
        self
    }

    /// Returns the memory of the channel.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Takes the next message, if there is one.
    ///
    /// # Errors
    /// [`RecvError::Closed`] if the sender is gone and all its messages were taken.
    pub fn take(&mut self) -> Result<Option<Message>, RecvError> {
        if let Some(message) = self.next() {
            return Ok(Some(message));
        }
        if !self.ring.sender.is_closed() {
            return Ok(None);
        }
        // The sender may have sent its last message between the poll and its end.
        self.next().map(Some).ok_or(RecvError::Closed)
    }

    fn next(&mut self) -> Option<Message> {
        let line = self.ring.line(self.taken);
        let control = line.control.load(Ordering::Acquire);
        if control as u32 != Ring::sequence(self.taken) {
            return None;
        }
        let mut message = Message {
            kind: (control >> 32) as u32,
            ..Message::default()
        };
        for (word, from) in message.words.iter_mut().zip(&line.words) {
            *word = from.load(Ordering::Relaxed);
        }
        self.taken += 1;
        if self.taken - self.published >= self.ring.lines.len() as u64 / 2 {
            self.publish_credit();
        }
        if self.prefetch {
            prefetch(self.ring.line(self.taken));
        }
        Some(message)
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn start_at(&mut self, number: u64) {
        self.taken = number;
        self.publish_credit();
    }

    /// Publishes the credit, so that the sender may overwrite the taken messages.
    fn publish_credit(&mut self) {
        self.ring.credit.0.store(self.taken, Ordering::Release);
        self.published = self.taken;
        self.check_pending = true;
    }

    /// Returns whether the sender is blocked on a full ring and the caller has to wake it. Must be called
    /// after each taken message and after [`Receiver::prepare_to_block`]; it costs a fence once per half
    /// ring.
    #[must_use]
    pub fn must_wake(&mut self) -> bool {
        core::mem::take(&mut self.check_pending) && self.ring.sender.must_wake()
    }

    /// Prepares to block. Returns true if there is no message and the sender will wake this side; false if
    /// there is a message, or the sender is gone.
    pub fn prepare_to_block(&mut self) -> bool {
        if self.published != self.taken {
            self.publish_credit();
        }
        self.ring.receiver.prepare();
        if self.has_message() || self.ring.sender.is_closed() {
            self.ring.receiver.stay();
            return false;
        }
        true
    }

    /// Must be called after blocking, for any reason of the wake-up.
    pub fn unblocked(&self) {
        self.ring.receiver.stay();
    }

    /// Returns whether [`Receiver::take`] would return a message.
    pub fn has_message(&self) -> bool {
        let control = self.ring.line(self.taken).control.load(Ordering::Acquire);
        control as u32 == Ring::sequence(self.taken)
    }
}

impl<R: Deref<Target = Ring>> Drop for Receiver<R> {
    fn drop(&mut self) {
        self.ring.receiver.close();
    }
}
