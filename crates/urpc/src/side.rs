//! Published state of one side of a channel or a pipe: asleep, or closed.
//!
//! A side that finds nothing sets its sleep flag, and then polls again. The other side publishes first,
//! and then loads the flag. Both have a full fence between the two accesses, so one of them sees the other's
//! store: no wake-up is lost.

use crate::sync::{AtomicU32, Ordering, fence};

/// State of one side, for the other. The other side reads it after each message, and writes are rare, so the
/// line stays in both caches.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Side {
    /// [`AWAKE`] or [`ASLEEP`]; the futex of a blocked side.
    asleep: AtomicU32,
    closed: AtomicU32,
}

const AWAKE: u32 = 0;
/// Value of a blocked side's futex.
pub const ASLEEP: u32 = 1;

impl Side {
    /// Announces that this side is about to block. The caller must poll again, and then call
    /// [`Side::stay`] or block.
    pub(crate) fn prepare(&self) {
        self.asleep.store(ASLEEP, Ordering::Relaxed);
        // The fence precedes the load of the other side's position.
        fence(Ordering::SeqCst);
    }

    /// Withdraws the announcement.
    pub(crate) fn stay(&self) {
        self.asleep.store(AWAKE, Ordering::Relaxed);
    }

    /// Returns whether this side is blocked and the caller has to wake it. Called after a publication for
    /// this side.
    pub(crate) fn must_wake(&self) -> bool {
        // The fence follows the publication.
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::Relaxed) == ASLEEP && self.asleep.swap(AWAKE, Ordering::AcqRel) == ASLEEP
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }

    pub(crate) fn close(&self) {
        self.closed.store(1, Ordering::Release);
    }

    /// Returns the futex to wait on while it is [`ASLEEP`].
    pub fn word(&self) -> &AtomicU32 {
        &self.asleep
    }
}
