//! The guest's memory as the driver lends it.

use crate::Page;

/// Words of 8 bytes, each read and written as one. Guest CPUs use them at the same time.
pub trait AtomicPageWords {
    /// The guest has RAM there.
    fn is_ram(&self, page: Page) -> bool;

    /// A word of a merged page. With at least acquire order.
    fn load(&self, page: Page, word: usize) -> u64;

    /// Whether a merged page has these words: as if each were loaded.
    fn has(&self, page: Page, words: &[u64]) -> bool {
        (0..)
            .zip(words)
            .all(|(word, known)| self.load(page, word) == *known)
    }

    /// Replaces a word of a merged page, in one locked instruction, if it is `current`.
    ///
    /// # Errors
    /// What the word is instead.
    fn compare_exchange(&mut self, page: Page, word: usize, current: u64, new: u64) -> Result<(), u64>;
}
