//! The writing side of a ring.

use core::ops::Deref;

use super::{Ring, prefetch};
use crate::message::Message;
use crate::sync::Ordering;

/// Reason why a message was not sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[cfg_attr(feature = "host", derive(thiserror::Error))]
pub enum SendError {
    /// The receiver has not yet taken the messages in the ring. The send can be retried later.
    #[cfg_attr(feature = "host", error("the channel is full"))]
    Full,
    /// The receiver is gone.
    #[cfg_attr(feature = "host", error("the receiver is gone"))]
    Closed,
    /// The receiver claims to have taken messages that were never sent.
    #[cfg_attr(feature = "host", error("the receiver breaks the protocol"))]
    Corrupt,
}

/// The only sender of a ring.
#[derive(Debug)]
pub struct Sender<R: Deref<Target = Ring>> {
    ring: R,
    /// Number of messages sent.
    sent: u64,
    /// Number of messages that the receiver had taken at the last load of the credit.
    taken: u64,
    prefetch: bool,
}

impl<R: Deref<Target = Ring>> Sender<R> {
    /// Creates the sender of an empty ring.
    ///
    /// # Panics
    /// Panics if the number of lines is no power of two, or out of bounds.
    pub fn new(ring: R) -> Self {
        ring.check();
        Self {
            ring,
            sent: 0,
            taken: 0,
            prefetch: false,
        }
    }

    /// Prefetches the next line after each send: higher throughput, slightly higher latency.
    pub fn with_prefetch(mut self) -> Self {
        self.prefetch = true;
        self
    }

    /// Returns the memory of the channel.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Puts a message into the ring. A receiver that polls finds it; one that is blocked has to be woken
    /// ([`Sender::must_wake`], once after any number of messages).
    ///
    /// # Errors
    /// Fails if the ring is full, its receiver is gone, or the receiver breaks the protocol.
    pub fn post(&mut self, message: &Message) -> Result<(), SendError> {
        if self.ring.receiver.is_closed() {
            return Err(SendError::Closed);
        }
        if self.credits() == 0 {
            self.load_credit()?;
            if self.credits() == 0 {
                return Err(SendError::Full);
            }
        }
        let line = self.ring.line(self.sent);
        for (to, word) in line.words.iter().zip(message.words) {
            to.store(word, Ordering::Relaxed);
        }
        let control = u64::from(message.kind) << 32 | u64::from(Ring::sequence(self.sent));
        line.control.store(control, Ordering::Release);
        self.sent += 1;
        if self.prefetch {
            prefetch(self.ring.line(self.sent));
        }
        Ok(())
    }

    /// Returns whether the receiver is blocked and the caller has to wake it.
    #[must_use]
    pub fn must_wake(&self) -> bool {
        self.ring.receiver.must_wake()
    }

    /// Prepares to block until there is room. Returns true if the ring is full and the receiver will wake
    /// this side; false if there is no need to block.
    ///
    /// # Errors
    /// As [`Sender::post`].
    pub fn prepare_to_block(&mut self) -> Result<bool, SendError> {
        self.ring.sender.prepare();
        let loaded = self.load_credit();
        if loaded.is_err() || self.credits() > 0 || self.ring.receiver.is_closed() {
            self.ring.sender.stay();
            return loaded.map(|()| false);
        }
        Ok(true)
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn start_at(&mut self, number: u64) {
        (self.sent, self.taken) = (number, number);
    }

    /// Must be called after blocking, for any reason of the wake-up.
    pub fn unblocked(&self) {
        self.ring.sender.stay();
    }

    /// Returns the number of messages that can be sent without another load of the credit.
    fn credits(&self) -> u64 {
        self.ring.lines.len() as u64 - (self.sent - self.taken)
    }

    /// Loads the number of messages that the receiver has taken.
    fn load_credit(&mut self) -> Result<(), SendError> {
        let taken = self.ring.credit.0.load(Ordering::Acquire);
        if taken < self.taken || taken > self.sent {
            return Err(SendError::Corrupt);
        }
        self.taken = taken;
        Ok(())
    }
}

impl<R: Deref<Target = Ring>> Drop for Sender<R> {
    fn drop(&mut self) {
        self.ring.sender.close();
    }
}
