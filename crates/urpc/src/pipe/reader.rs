//! The reading side of a pipe.

use core::ops::Deref;

use super::{Corrupt, Pipe, WORD_BYTES, words_of};
use crate::sync::Ordering;

/// The only reader of a pipe.
#[derive(Debug)]
pub struct Reader<P: Deref<Target = Pipe>> {
    pipe: P,
    /// Number of words taken.
    taken: u64,
    /// Number of them that was published to the writer.
    published: u64,
    /// Whether room was published since the last check for a blocked writer.
    check_pending: bool,
}

impl<P: Deref<Target = Pipe>> Reader<P> {
    /// Creates the reader of an empty pipe, or of one that was written to already.
    ///
    /// # Panics
    /// Panics if the number of words is no power of two, or out of bounds.
    pub fn new(pipe: P) -> Self {
        pipe.check();
        Self {
            pipe,
            taken: 0,
            published: 0,
            check_pending: false,
        }
    }

    /// Fills the parts in order with the received bytes. Returns the number of bytes.
    ///
    /// # Safety
    /// The parts must be writable, and unused by others during the call.
    ///
    /// # Panics
    /// Panics if the length of a part is no multiple of a word.
    ///
    /// # Errors
    /// Fails with [`Corrupt`].
    pub unsafe fn read(&mut self, parts: [*mut [u8]; 2]) -> Result<usize, Corrupt> {
        let mut available = self.available()?;
        let before = self.taken;
        for part in parts {
            let count = words_of(part.len()).min(available);
            let mut to = part.cast::<u64>();
            for words in self.pipe.run(self.taken, count) {
                for word in words {
                    // SAFETY: within the part, as `run` gives `count` words at most; the caller promises the
                    // rest.
                    unsafe { to.write_unaligned(word.load(Ordering::Relaxed)) };
                    to = to.wrapping_add(1);
                }
            }
            self.taken += count as u64;
            available -= count;
        }
        if self.taken - self.published >= self.pipe.len() / 2 {
            self.publish_tail();
        }
        Ok((self.taken - before) as usize * WORD_BYTES)
    }

    /// Returns whether the writer waits for room and the caller has to wake it. Must be called after each
    /// read and after [`Reader::prepare_to_sleep`]; it costs a fence once per half pipe.
    #[must_use]
    pub fn must_wake(&mut self) -> bool {
        core::mem::take(&mut self.check_pending) && self.pipe.writer.must_wake()
    }

    /// Prepares to sleep. Returns true if no bytes are available and the writer will wake this side; false if
    /// there are bytes to read.
    ///
    /// # Errors
    /// Fails with [`Corrupt`].
    pub fn prepare_to_sleep(&mut self) -> Result<bool, Corrupt> {
        if self.published != self.taken {
            self.publish_tail();
        }
        self.pipe.reader.prepare();
        let available = self.available();
        if available != Ok(0) {
            self.pipe.reader.stay();
        }
        Ok(available? == 0)
    }

    /// Must be called after sleeping, for any reason of the wake-up.
    pub fn unblocked(&self) {
        self.pipe.reader.stay();
    }

    /// Returns the number of words that have arrived and were not taken.
    fn available(&self) -> Result<usize, Corrupt> {
        let available = self.pipe.head.position().wrapping_sub(self.taken);
        match available <= self.pipe.len() {
            true => Ok(available as usize),
            false => Err(Corrupt),
        }
    }

    /// Publishes the tail, so that the writer may overwrite the taken words.
    fn publish_tail(&mut self) {
        self.pipe.tail.publish(self.taken);
        self.published = self.taken;
        self.check_pending = true;
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn pipe(&self) -> &Pipe {
        &self.pipe
    }
}
