//! Litmus tests of x86's memory order between threads of different nodes (Sewell et al., "x86-TSO", CACM 2010).
//!
//! Each test is a few accesses by two or four threads, and an outcome that the order forbids. Threads go through many places,
//! one test in each, at about the same time; at the end of a batch thread 0 looks at what all have read. Places of a batch lie
//! in the same few pages, so that most accesses are plain ones and some are faults, at any point of a test.
//!
//! One more thread of each node, the *stirrer*, takes these pages at random moments, for reading or for writing, and changes nothing
//! there. Without it pages move only where the test's own accesses make them, and never while a thread of the same node uses
//! them: what a driver does in the wrong order would not show.
//!
//! No place is ever cleared: each test in it writes numbers larger than those before, and what is not larger is old.

mod program;
#[cfg(test)]
mod tests;

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use program::{Outcome, Test};

use super::Answer;
use crate::node::Node;
use crate::shared::{Barrier, PAGE_WORDS, Words};
use program::{Place, Seen};

/// Places of a batch.
const PLACES: usize = PAGE_WORDS / 2;
/// What a test writes is larger than this number's multiple, and less than the next.
const STEP: u64 = 4;
/// A stirrer sleeps less than this between pages, microseconds.
const STIR_US: u64 = 40;
/// Threads at most.
const THREADS_MAX: u32 = 4;

/// Pages that a run uses, from its first one.
pub const PAGES: u32 = 4 + 2 * THREADS_MAX;

/// Threads of a test, of which each node runs those whose number is its own modulo the nodes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Which.
    pub test: Test,
    /// For how long.
    pub millis: u64,
    /// The first of [`PAGES`] pages that nobody else uses.
    pub first: u32,
    /// A page elsewhere, for the second variable: managed by another node than the first one's.
    pub second: u32,
    /// Of all tests in these pages so far, counted in batches.
    pub batch: u64,
    /// How many nodes take part.
    pub nodes: u16,
}

/// How often each outcome was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// That any order of the accesses gives.
    pub ordinary: u64,
    /// That only x86's order allows, not one that all threads agree on; or that shows an access in two parts, where it may.
    pub relaxed: u64,
    /// That x86's order forbids.
    pub forbidden: u64,
    /// Batches, those before included.
    pub batches: u64,
}

/// The parts of a run in memory.
struct Ground<'a> {
    words: Words<'a>,
    run: &'a Run,
}

impl<'a> Ground<'a> {
    /// A place, with both variables in one page in every other batch.
    fn place(&self, batch: u64, index: usize) -> Place {
        let page = |page: u32| self.words.pages(page..page + 1);
        let y_page = if batch.is_multiple_of(2) {
            self.run.first
        } else {
            self.run.second
        };
        // The last word of one page and the first of the next, half of each.
        let last = &page(self.run.first + 1)[PAGE_WORDS - 1];
        Place {
            x: pointer(&page(self.run.first)[index]),
            y: pointer(&page(y_page)[PLACES + index]),
            across: pointer(last).wrapping_byte_add(4),
            base: (batch * PLACES as u64 + index as u64) * STEP,
        }
    }

    /// Where a thread leaves what it has read.
    fn results(&self, thread: u32) -> &'a [AtomicU64] {
        let first = self.run.first + 4 + 2 * thread;
        self.words.pages(first..first + 2)
    }

    /// A word that ends the run.
    fn stop(&self) -> &'a AtomicU64 {
        &self.words.pages(self.run.first + 3..self.run.first + 4)[128]
    }
}

fn pointer(word: &AtomicU64) -> *mut u64 {
    word.as_ptr()
}

/// Runs this node's threads.
pub(super) fn run(node: &Node, run: &Run) -> Answer {
    let mine: Vec<u32> = (0..run.test.threads())
        .filter(|thread| thread % u32::from(run.nodes.max(1)) == u32::from(node.me()))
        .collect();
    let is_over = AtomicBool::new(false);
    let tallies: Vec<Tally> = std::thread::scope(|scope| {
        let threads: Vec<_> = mine
            .iter()
            .map(|&thread| scope.spawn(move || part(node, run, thread)))
            .collect();
        scope.spawn(|| stir(node, run, &is_over));
        let tallies: Vec<_> = threads
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        is_over.store(true, Relaxed);
        tallies
            .into_iter()
            .map(|tally| tally.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    // Thread 0 has judged for all.
    let is_judge = mine.first() == Some(&0);
    match tallies.first() {
        Some(tally) if is_judge => Answer::Litmus(*tally),
        _ => Answer::Done,
    }
}

/// One thread.
fn part(node: &Node, run: &Run, thread: u32) -> Tally {
    let ground = Ground {
        words: Words::of(node),
        run,
    };
    let threads = run.test.threads();
    let barrier = Barrier::new(ground.words, run.first + 3, u64::from(threads));
    let end = Instant::now() + Duration::from_millis(run.millis);
    let mut random = fastrand::Rng::with_seed(u64::from(thread) + run.batch);
    let mut tally = Tally {
        batches: run.batch,
        ..Tally::default()
    };
    let results = ground.results(thread);
    let mut seen = [Seen::default(); PLACES];
    loop {
        barrier.wait();
        if ground.stop().load(SeqCst) == 1 {
            break;
        }
        // Not all at exactly the same time, so that every order is met.
        delay(random.u32(0..2000));
        // Fast, all is over before a page may go; slowly, pages go at any access.
        let is_slow = random.u8(..4) == 0;
        for (index, seen) in seen.iter_mut().enumerate() {
            if is_slow || random.u8(..) < 32 {
                delay(random.u32(0..100));
            }
            *seen = run.test.step(thread, &ground.place(tally.batches, index));
        }
        for (seen, result) in seen.iter().zip(results.chunks_exact(2)) {
            result[0].store(seen[0], SeqCst);
            result[1].store(seen[1], SeqCst);
        }
        barrier.wait();
        if thread == 0 {
            judge(&ground, &mut tally);
            let over = Instant::now() > end || tally.forbidden > 0;
            ground.stop().store(u64::from(over), SeqCst);
        }
        tally.batches += 1;
    }
    barrier.wait();
    if thread == 0 {
        ground.stop().store(0, SeqCst);
    }
    barrier.wait();
    tally
}

/// Takes pages of the variables until the run is over.
fn stir(node: &Node, run: &Run, is_over: &AtomicBool) {
    let words = Words::of(node);
    let mut random = fastrand::Rng::with_seed(run.batch << 8 | u64::from(node.me()));
    while !is_over.load(Relaxed) {
        let page = [run.first, run.first + 1, run.first + 2, run.second][random.usize(..4)];
        let word = &words.pages(page..page + 1)[random.usize(..PAGE_WORDS)];
        if random.u8(..4) == 0 {
            // For writing, and of the same value.
            word.fetch_add(0, SeqCst);
        } else {
            word.load(SeqCst);
        }
        std::thread::sleep(Duration::from_micros(random.u64(..STIR_US)));
    }
}

fn judge(ground: &Ground, tally: &mut Tally) {
    let test = ground.run.test;
    let results: Vec<&[AtomicU64]> = (0..test.threads()).map(|thread| ground.results(thread)).collect();
    for index in 0..PLACES {
        let place = ground.place(tally.batches, index);
        let mut seen = [Seen::default(); THREADS_MAX as usize];
        for (seen, result) in seen.iter_mut().zip(&results) {
            *seen = [result[2 * index].load(SeqCst), result[2 * index + 1].load(SeqCst)];
        }
        match test.judge(&seen, place.last(), place.base) {
            Outcome::Ordinary => tally.ordinary += 1,
            Outcome::Relaxed => tally.relaxed += 1,
            Outcome::Forbidden => tally.forbidden += 1,
        }
    }
}

fn delay(turns: u32) {
    (0..turns).for_each(|_| std::hint::spin_loop());
}
