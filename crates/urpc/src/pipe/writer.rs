//! The writing side of a pipe.

use core::ops::Deref;

use super::{Corrupt, Pipe, WORD_BYTES, words_of};
use crate::sync::Ordering;

/// The only writer of a pipe.
#[derive(Debug)]
pub struct Writer<P: Deref<Target = Pipe>> {
    pipe: P,
    /// Number of words written.
    written: u64,
    /// Number of them that the reader had taken at the last load of the tail.
    taken: u64,
}

impl<P: Deref<Target = Pipe>> Writer<P> {
    /// Creates the writer of an empty pipe.
    ///
    /// # Panics
    /// Panics if the number of words is no power of two, or out of bounds.
    pub fn new(pipe: P) -> Self {
        pipe.check();
        Self {
            pipe,
            written: 0,
            taken: 0,
        }
    }

    /// Writes one part after the other, as far as there is room; returns the number of bytes. A reader that
    /// polls finds them; one that sleeps has to be woken ([`Writer::must_wake`], once after any number of
    /// writes).
    ///
    /// # Safety
    /// The parts must be readable, and unchanged by others during the call.
    ///
    /// # Panics
    /// Panics if the length of a part is no multiple of a word.
    ///
    /// # Errors
    /// Fails with [`Corrupt`].
    pub unsafe fn write(&mut self, parts: [*const [u8]; 2]) -> Result<usize, Corrupt> {
        let wanted = parts.map(|part| words_of(part.len()));
        if self.room() < wanted[0] + wanted[1] {
            self.load_tail()?;
        }
        let mut room = self.room();
        let before = self.written;
        for (part, wanted) in parts.into_iter().zip(wanted) {
            let count = wanted.min(room);
            let mut from = part.cast::<u64>();
            for words in self.pipe.run(self.written, count) {
                for word in words {
                    // SAFETY: within the part, as `run` gives `count` words at most; the caller promises the
                    // rest.
                    word.store(unsafe { from.read_unaligned() }, Ordering::Relaxed);
                    from = from.wrapping_add(1);
                }
            }
            self.written += count as u64;
            room -= count;
        }
        let count = self.written - before;
        if count > 0 {
            self.pipe.head.publish(self.written);
        }
        Ok(count as usize * WORD_BYTES)
    }

    /// Returns whether the reader sleeps and the caller has to wake it.
    #[must_use]
    pub fn must_wake(&self) -> bool {
        self.pipe.reader.must_wake()
    }

    /// Prepares to wait for room. Returns true if the pipe is full and the reader will wake this side; false
    /// if there is no need to wait.
    ///
    /// # Errors
    /// Fails with [`Corrupt`].
    pub fn prepare_to_wait(&mut self) -> Result<bool, Corrupt> {
        self.pipe.writer.prepare();
        let loaded = self.load_tail();
        if loaded.is_err() || self.room() > 0 {
            self.pipe.writer.stay();
            return loaded.map(|()| false);
        }
        Ok(true)
    }

    /// Must be called after waiting, for any reason of the wake-up.
    pub fn unblocked(&self) {
        self.pipe.writer.stay();
    }

    /// Returns the number of words that can be written without another load of the tail.
    fn room(&self) -> usize {
        (self.pipe.len() - (self.written - self.taken)) as usize
    }

    /// Loads the number of words that the reader has taken.
    fn load_tail(&mut self) -> Result<(), Corrupt> {
        let taken = self.pipe.tail.position();
        if taken < self.taken || taken > self.written {
            return Err(Corrupt);
        }
        self.taken = taken;
        Ok(())
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn pipe(&self) -> &Pipe {
        &self.pipe
    }
}
