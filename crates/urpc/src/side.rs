//! What one side of a channel or a pipe says of itself to the other: that it sleeps, or is gone.
//!
//! Who finds nothing says that it sleeps, and then looks once more; the other side publishes first, and then looks whether somebody
//! sleeps. A full fence stands between the two on both sides, so one of them sees the other.

use crate::sync::{AtomicU32, Ordering, fence};

/// What one side says of itself, for the other. Read by the other side after each message, written rarely, so the line
/// stays in both caches.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Side {
    /// [`AWAKE`] or [`ASLEEP`]. The futex of a blocked side.
    asleep: AtomicU32,
    closed: AtomicU32,
}

const AWAKE: u32 = 0;
/// The value of a blocked side's word, for `futex`.
pub const ASLEEP: u32 = 1;

impl Side {
    /// Says that this side is about to block. It must look once more now whether there is something, and [`Side::stay`] or block.
    pub(crate) fn prepare(&self) {
        self.asleep.store(ASLEEP, Ordering::Relaxed);
        // Before the look at what the other side publishes.
        fence(Ordering::SeqCst);
    }

    /// Takes that back.
    pub(crate) fn stay(&self) {
        self.asleep.store(AWAKE, Ordering::Relaxed);
    }

    /// Called after something was published for this side: whether it is blocked, and the caller is the one to wake it.
    pub(crate) fn must_wake(&self) -> bool {
        // After what was published.
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::Relaxed) == ASLEEP && self.asleep.swap(AWAKE, Ordering::AcqRel) == ASLEEP
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }

    pub(crate) fn close(&self) {
        self.closed.store(1, Ordering::Release);
    }

    /// The word to wait on while it is [`ASLEEP`].
    pub fn word(&self) -> &AtomicU32 {
        &self.asleep
    }
}
