//! A channel in shared memory: a ring of lines, written by one side and read by the other.
//!
//! ```text
//! Ring   credit    number of messages that the receiver has taken    written by the receiver, per half ring
//!        receiver  whether it is blocked, whether it has closed      written by both, rarely
//!        sender    the same of the sender                            written by both, rarely
//!        line 0    7 words of payload, then kind and sequence        written by the sender
//!        line 1    ...
//! ```
//!
//! 1. The sender writes a line's seven words, then its last word with release ordering. The last word has the
//!    sequence number of the message, so the receiver, which polls that word, never sees a partial message
//!    (section 4.6).
//! 2. A message costs two transfers of one cache line: the sender's first store takes it from the receiver's
//!    cache, and the receiver's next poll fetches it back.
//! 3. A line is reused only after the receiver has taken its message, as the credit shows. The sender loads
//!    the credit only when it has none left, and the receiver writes it once per half ring.
//! 4. A side that finds nothing may block. It first sets its sleep flag, then polls again; the other side
//!    publishes first, then loads the flag. Both have a full fence between the two accesses, so no wake-up is
//!    lost.

mod receiver;
mod sender;
#[cfg(test)]
mod tests;

use crate::message::PAYLOAD_WORDS;
use crate::sync::AtomicU64;

pub use crate::side::{ASLEEP, Side};
pub use receiver::{Receiver, RecvError};
pub use sender::{SendError, Sender};

/// Least number of lines of a ring. Half of them are one credit.
pub const LINES_MIN: usize = 2;
/// Greatest number of lines of a ring: 4 MiB.
pub const LINES_MAX: usize = 1 << 16;

/// A message in memory.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Line {
    words: [AtomicU64; PAYLOAD_WORDS],
    /// The kind in the upper half, the sequence number in the lower one.
    control: AtomicU64,
}

/// Number of messages that the receiver has taken.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Credit(AtomicU64);

/// Memory of a channel. All zeroes are an empty ring.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Ring<L: ?Sized = [Line]> {
    credit: Credit,
    receiver: Side,
    sender: Side,
    lines: L,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Line>() == 64);
    assert!(size_of::<Ring<[Line; 2]>>() == (3 + 2) * 64);
};

impl Ring {
    /// Returns the number of bytes of a ring with that many lines.
    pub const fn bytes(lines: usize) -> usize {
        3 * 64 + lines * 64
    }

    /// Returns the state of the receiving side.
    pub fn receiver(&self) -> &Side {
        &self.receiver
    }

    /// Returns the state of the sending side.
    pub fn sender(&self) -> &Side {
        &self.sender
    }

    /// Closes both sides, on behalf of a side whose process is dead.
    pub fn close(&self) {
        self.receiver.close();
        self.sender.close();
    }

    fn line(&self, number: u64) -> &Line {
        // The number of lines is a power of two: new() of both sides checks it.
        &self.lines[number as usize & (self.lines.len() - 1)]
    }

    /// Sequence number in the control word of message `number`. It differs from that of the message one ring
    /// before. It is zero, as in a line never written, only for a message that follows another in its line.
    fn sequence(number: u64) -> u32 {
        (number as u32).wrapping_add(1)
    }

    /// Panics unless the number of lines is valid. Only this side's creator sets it, never the peer.
    fn check(&self) {
        let lines = self.lines.len();
        assert!(
            lines.is_power_of_two() && (LINES_MIN..=LINES_MAX).contains(&lines),
            "a ring of {lines} lines"
        );
    }
}

/// Prefetches the line into this CPU's cache.
fn prefetch(line: &Line) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: a hint; it reads and writes nothing that the program could see.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(
            core::ptr::from_ref(line).cast(),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = line;
}
