//! Access to the guest's memory, which the driver provides.

use crate::Page;

/// Words of 8 bytes with atomic access. Guest CPUs use them at the same time.
pub trait AtomicPageWords {
    /// Returns whether the guest has RAM at the page.
    fn is_ram(&self, page: Page) -> bool;

    /// Loads a word of a merged page, with at least acquire order.
    fn load(&self, page: Page, word: usize) -> u64;

    /// Returns whether a merged page has these words, as if each were loaded.
    fn has(&self, page: Page, words: &[u64]) -> bool {
        (0..)
            .zip(words)
            .all(|(word, known)| self.load(page, word) == *known)
    }

    /// Replaces a word of a merged page in one locked instruction, if it is `current`.
    ///
    /// # Errors
    /// The word's value if it is another one.
    fn compare_exchange(&mut self, page: Page, word: usize, current: u64, new: u64) -> Result<(), u64>;
}
