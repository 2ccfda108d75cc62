//! The reading side of a pipe.

use core::ops::Deref;

use super::{Corrupt, Pipe, WORD_BYTES, words_of};
use crate::sync::Ordering;

/// Reads. There is one for a pipe.
#[derive(Debug)]
pub struct Reader<P: Deref<Target = Pipe>> {
    pipe: P,
    /// Words taken.
    taken: u64,
    /// The part of them that was published to the writer.
    told: u64,
    /// Whether room was published since the last check for a blocked writer.
    owes_look: bool,
}

impl<P: Deref<Target = Pipe>> Reader<P> {
    /// The reader of an empty pipe, or of one that was written to already.
    ///
    /// # Panics
    /// If the number of words is no power of two, or out of bounds.
    pub fn new(pipe: P) -> Self {
        pipe.check();
        Self {
            pipe,
            taken: 0,
            told: 0,
            owes_look: false,
        }
    }

    /// Fills the parts in order with the received bytes. Returns the number of bytes.
    ///
    /// # Safety
    /// The parts must be writable, and unused by others during the call.
    ///
    /// # Panics
    /// If a part is no whole number of words.
    ///
    /// # Errors
    /// [`Corrupt`].
    pub unsafe fn read(&mut self, parts: [*mut [u8]; 2]) -> Result<usize, Corrupt> {
        let mut there = self.there()?;
        let before = self.taken;
        for part in parts {
            let count = words_of(part.len()).min(there);
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
            there -= count;
        }
        if self.taken - self.told >= self.pipe.len() / 2 {
            self.tell();
        }
        Ok((self.taken - before) as usize * WORD_BYTES)
    }

    /// Whether the writer waits for room, and the caller is to wake it. To be asked after each read, and
    /// after [`Reader::prepare_to_sleep`]; it costs something once in half a pipe.
    #[must_use]
    pub fn must_wake(&mut self) -> bool {
        core::mem::take(&mut self.owes_look) && self.pipe.writer.must_wake()
    }

    /// Before sleeping: true if nothing has come, and the writer now knows that someone waits for it. False
    /// if there is something to read.
    ///
    /// # Errors
    /// [`Corrupt`].
    pub fn prepare_to_sleep(&mut self) -> Result<bool, Corrupt> {
        if self.told != self.taken {
            self.tell();
        }
        self.pipe.reader.prepare();
        let there = self.there();
        if there != Ok(0) {
            self.pipe.reader.stay();
        }
        Ok(there? == 0)
    }

    /// After sleeping, for whatever reason it ended.
    pub fn awake(&self) {
        self.pipe.reader.stay();
    }

    /// How many words have come and were not taken.
    fn there(&self) -> Result<usize, Corrupt> {
        let there = self.pipe.head.look().wrapping_sub(self.taken);
        match there <= self.pipe.len() {
            true => Ok(there as usize),
            false => Err(Corrupt),
        }
    }

    /// Lets the writer write over what was taken.
    fn tell(&mut self) {
        self.pipe.tail.publish(self.taken);
        self.told = self.taken;
        self.owes_look = true;
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn pipe(&self) -> &Pipe {
        &self.pipe
    }
}
