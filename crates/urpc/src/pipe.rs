//! A pipe in shared memory: bytes from one writer to one reader, in words of eight.
//!
//! ```text
//! Pipe   head    number of words written                         written by the writer
//!        tail    number of words taken                           written by the reader, once per half pipe
//!        reader  whether the reader sleeps                       written by both, rarely
//!        writer  whether the writer waits for room               written by both, rarely
//!        words   word n at n, modulo their number
//! ```
//!
//! 1. The writer copies words, then publishes them in `head` with release ordering. The reader loads `head`
//!    with acquire ordering, so it never sees a partial word.
//! 2. Words are overwritten only after the reader has taken them, as `tail` shows. The writer loads `tail`
//!    only when the pipe seems full. The reader publishes it once per half pipe, and before it blocks.
//! 3. The caller wakes a blocked side when [`Writer::must_wake`] or [`Reader::must_wake`] returns true. No
//!    wake-up is lost ([`crate::side`] has the argument).
//! 4. All accesses are atomic, so no write of another process makes a data race. An invalid position is an
//!    error; none leads outside, since the index is taken modulo the number of words.
//!
//! A pipe does not report the end of the other side: another connection of the two sides must.

mod reader;
#[cfg(test)]
mod tests;
mod writer;

use crate::side::Side;
use crate::sync::{AtomicU64, Ordering};

pub use reader::Reader;
pub use writer::Writer;

/// Bytes of a word. Lengths of reads and writes are multiples of it.
pub const WORD_BYTES: usize = 8;
/// Least number of words of a pipe.
pub const WORDS_MIN: usize = 2;
/// Greatest number of words of a pipe: 8 MiB.
pub const WORDS_MAX: usize = 1 << 20;

/// Error: the other side published an impossible position.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[cfg_attr(feature = "host", derive(thiserror::Error))]
#[cfg_attr(feature = "host", error("the other side of a pipe breaks the protocol"))]
pub struct Corrupt;

/// Number of words so far.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Position(AtomicU64);

/// Memory of a pipe. All zeroes are an empty pipe.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Pipe<W: ?Sized = [AtomicU64]> {
    head: Position,
    tail: Position,
    reader: Side,
    writer: Side,
    words: W,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Pipe<[AtomicU64; 8]>>() == Pipe::bytes(8));

impl Pipe {
    /// Returns the number of bytes of a pipe with that many words.
    pub const fn bytes(words: usize) -> usize {
        4 * 64 + words * WORD_BYTES
    }

    fn len(&self) -> u64 {
        self.words.len() as u64
    }

    /// Returns at most `count` words from position `from` on, those before the wrap and those after it.
    fn run(&self, from: u64, count: usize) -> [&[AtomicU64]; 2] {
        // The number of words is a power of two: new() of both sides checks it.
        let start = from as usize & (self.words.len() - 1);
        let (before, after) = (&self.words[..start], &self.words[start..]);
        let first = count.min(after.len());
        [&after[..first], &before[..(count - first).min(start)]]
    }

    /// Panics unless the number of words is valid. Only this side's creator sets it, never the peer.
    fn check(&self) {
        let words = self.words.len();
        assert!(
            words.is_power_of_two() && (WORDS_MIN..=WORDS_MAX).contains(&words),
            "a pipe of {words} words"
        );
    }
}

/// Returns the number of words of a part to copy.
fn words_of(bytes: usize) -> usize {
    assert!(bytes.is_multiple_of(WORD_BYTES), "{bytes} bytes are no words");
    bytes / WORD_BYTES
}

impl Position {
    fn publish(&self, position: u64) {
        self.0.store(position, Ordering::Release);
    }

    fn position(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}
