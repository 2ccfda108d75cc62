//! Latest value of one writer, which any number of readers read without a lock (seqlock).
//!
//! The writer makes the count odd, writes the words, and makes the count even. A reader that finds the same
//! even count before and after its reads has read one value. The fences are those of H. Boehm, "Can seqlocks
//! get along with programming language memory models?", MSPC 2012, section 4.

use crate::sync::{AtomicU64, Ordering, fence};

/// Attempts of a reader. A writer needs some nanoseconds, unless its thread is suspended in between.
const ATTEMPTS: usize = 8;

/// `N` words that one thread at a time writes. A later writer has received a message of the former one.
#[derive(Debug)]
pub struct Published<const N: usize> {
    /// Odd while the words change.
    count: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> Default for Published<N> {
    fn default() -> Self {
        Self::new([0; N])
    }
}

impl<const N: usize> Published<N> {
    /// Words with these values.
    pub fn new(words: [u64; N]) -> Self {
        Self {
            count: AtomicU64::new(0),
            words: words.map(AtomicU64::new),
        }
    }

    /// Publishes new values. Only one thread at a time may write; a second one would mix values, which is
    /// wrong, but no undefined behaviour.
    pub fn write(&self, words: [u64; N]) {
        let count = self.count.load(Ordering::Relaxed);
        self.count.store(count.wrapping_add(1), Ordering::Relaxed);
        // A reader that sees one of the stores below sees the odd count too.
        fence(Ordering::Release);
        for (shared, word) in self.words.iter().zip(words) {
            shared.store(word, Ordering::Relaxed);
        }
        self.count.store(count.wrapping_add(2), Ordering::Release);
    }

    /// The values of one write; `None` if writes come in between at each of several attempts.
    pub fn read(&self) -> Option<[u64; N]> {
        (0..ATTEMPTS).find_map(|_| self.try_read())
    }

    /// The values of one write if there is one, else of two writes.
    pub fn read_or_torn(&self) -> [u64; N] {
        self.read().unwrap_or_else(|| self.words())
    }

    fn try_read(&self) -> Option<[u64; N]> {
        let before = self.count.load(Ordering::Acquire);
        let words = self.words();
        fence(Ordering::Acquire);
        let after = self.count.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2)).then_some(words)
    }

    fn words(&self) -> [u64; N] {
        core::array::from_fn(|index| self.words[index].load(Ordering::Relaxed))
    }
}

#[cfg(all(test, loom))]
mod every_order {
    use std::sync::Arc;

    use loom::thread;

    use super::*;

    #[test]
    fn reader_gets_the_words_of_one_write_in_the_order_of_writes() {
        loom::model(|| {
            let shared = Arc::new(Published::new([0, 0]));
            let writer = {
                let shared = shared.clone();
                thread::spawn(move || shared.write([1; 2]))
            };
            let first = shared.try_read();
            let second = shared.try_read();
            for words in [first, second].into_iter().flatten() {
                assert_eq!(words[0], words[1], "torn");
            }
            if let (Some(first), Some(second)) = (first, second) {
                assert!(first[0] <= second[0]);
            }
            writer.join().expect("no panic");
            assert_eq!(shared.try_read(), Some([1, 1]));
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn words_of_two_writes_are_never_read_as_one_value() {
        const WRITES: u64 = 200_000;
        let shared = Arc::new(Published::<4>::default());
        let writer = {
            let shared = shared.clone();
            thread::spawn(move || (1..=WRITES).for_each(|word| shared.write([word; 4])))
        };
        let mut last = 0;
        while last < WRITES {
            let Some(words) = shared.read() else { continue };
            assert_eq!(words, [words[0]; 4]);
            assert!(words[0] >= last, "an older value");
            last = words[0];
        }
        writer.join().unwrap();
    }

    #[test]
    fn reader_of_a_suspended_writer_gets_the_torn_words_at_once() {
        let shared = Published::new([1, 1]);
        // A writer that is suspended after its first store.
        shared.count.store(1, Ordering::Relaxed);
        shared.words[0].store(2, Ordering::Relaxed);
        assert_eq!(shared.read(), None);
        assert_eq!(shared.read_or_torn(), [2, 1]);
    }
}
