//! The writing side of a pipe.

use core::ops::Deref;

use super::{Corrupt, Pipe, WORD_BYTES, words_of};
use crate::sync::Ordering;

/// Writes. There is one for a pipe.
#[derive(Debug)]
pub struct Writer<P: Deref<Target = Pipe>> {
    pipe: P,
    /// Words written.
    written: u64,
    /// How many of them the reader had taken when it was last asked.
    taken: u64,
}

impl<P: Deref<Target = Pipe>> Writer<P> {
    /// The writer of an empty pipe.
    ///
    /// # Panics
    /// If the number of words is no power of two, or out of bounds.
    pub fn new(pipe: P) -> Self {
        pipe.check();
        Self {
            pipe,
            written: 0,
            taken: 0,
        }
    }

    /// Writes one part after the other, as much as there is room for; how many bytes that was. A reader that
    /// polls finds them; one that sleeps has to be woken ([`Writer::must_wake`], once after any number of
    /// writes).
    ///
    /// # Safety
    /// The parts must be readable, and unchanged by others during the call.
    ///
    /// # Panics
    /// If a part is no whole number of words.
    ///
    /// # Errors
    /// [`Corrupt`].
    pub unsafe fn write(&mut self, parts: [*const [u8]; 2]) -> Result<usize, Corrupt> {
        let wanted = parts.map(|part| words_of(part.len()));
        if self.room() < wanted[0] + wanted[1] {
            self.look()?;
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

    /// Whether the reader sleeps, and the caller is to wake it.
    #[must_use]
    pub fn must_wake(&self) -> bool {
        self.pipe.reader.must_wake()
    }

    /// Before waiting for room: true if there is none, and the reader now knows that someone waits for it.
    /// False if there is no need to wait.
    ///
    /// # Errors
    /// [`Corrupt`].
    pub fn prepare_to_wait(&mut self) -> Result<bool, Corrupt> {
        self.pipe.writer.prepare();
        let looked = self.look();
        if looked.is_err() || self.room() > 0 {
            self.pipe.writer.stay();
            return looked.map(|()| false);
        }
        Ok(true)
    }

    /// After waiting, for whatever reason it ended.
    pub fn awake(&self) {
        self.pipe.writer.stay();
    }

    /// How many words there is room for without a look at what was taken.
    fn room(&self) -> usize {
        (self.pipe.len() - (self.written - self.taken)) as usize
    }

    /// Looks how many words the reader has taken.
    fn look(&mut self) -> Result<(), Corrupt> {
        let taken = self.pipe.tail.look();
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
