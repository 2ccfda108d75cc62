//! Synchronization of threads of all nodes, in the memory itself.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::time::Duration;

use dsm::{Node, PAGE_LEN};

/// Words of 8 bytes in a page.
pub const PAGE_WORDS: usize = PAGE_LEN / 8;
/// Reads of a word before the thread yields its CPU.
const SPINS: u32 = 1000;
/// Reads of a word before the thread sleeps between them.
const SPINS_YIELDING: u32 = SPINS + 100;
/// Length of such a sleep.
const SLEEP: Duration = Duration::from_micros(50);

/// The memory as words.
#[derive(Clone, Copy, Debug)]
pub struct SharedWords<'a>(&'a [AtomicU64]);

impl<'a> SharedWords<'a> {
    /// Returns the words of a node's view.
    pub fn of(node: &'a Node) -> Self {
        // SAFETY: the view is that long and lives as long as the node; any bytes are words; atomics permit
        // that others write at the same time.
        Self(unsafe { std::slice::from_raw_parts(node.view().cast(), node.bytes() / 8) })
    }

    /// Returns words of local memory, from its first page on.
    pub fn at(words: &'a [AtomicU64]) -> Self {
        Self(words)
    }

    /// Returns the words of a range of pages.
    pub fn pages(self, pages: Range<u32>) -> &'a [AtomicU64] {
        &self.0[pages.start as usize * PAGE_WORDS..pages.end as usize * PAGE_WORDS]
    }
}

/// Reads a floating-point number.
pub fn get(word: &AtomicU64) -> f64 {
    f64::from_bits(word.load(Relaxed))
}

/// Writes a floating-point number.
pub fn set(word: &AtomicU64, value: f64) {
    word.store(value.to_bits(), Relaxed);
}

/// A barrier of `count` threads that can be used repeatedly. It lies in one page.
#[derive(Debug)]
pub struct Barrier<'a> {
    come: &'a AtomicU64,
    round: &'a AtomicU64,
    count: u64,
}

impl<'a> Barrier<'a> {
    /// Creates a barrier in a page of zeroes: the number of arrivals and, in another cache line, the round
    /// that threads read.
    pub fn new(words: SharedWords<'a>, page: u32, count: u64) -> Self {
        let words = words.pages(page..page + 1);
        Self {
            come: &words[0],
            round: &words[64],
            count,
        }
    }

    /// Waits until all threads have arrived.
    pub fn wait(&self) {
        let round = self.round.load(SeqCst);
        if self.come.fetch_add(1, SeqCst) + 1 == self.count {
            self.come.store(0, SeqCst);
            self.round.store(round + 1, SeqCst);
            return;
        }
        let mut spins = 0;
        while self.round.load(SeqCst) == round {
            backoff(&mut spins);
        }
    }
}

/// Runs `work` while holding the lock in this word.
pub fn locked<T>(lock: &AtomicU64, work: impl FnOnce() -> T) -> T {
    let mut spins = 0;
    while lock.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
        while lock.load(Relaxed) != 0 {
            backoff(&mut spins);
        }
    }
    let result = work();
    lock.store(0, Release);
    result
}

/// Spins at first; on a busy host the thread that is waited for needs the CPU.
fn backoff(spins: &mut u32) {
    *spins += 1;
    match *spins {
        ..SPINS => std::hint::spin_loop(),
        SPINS..SPINS_YIELDING => std::thread::yield_now(),
        _ => std::thread::sleep(SLEEP),
    }
}
