//! Litmus tests of x86's memory order between threads of different nodes (Sewell et al., "x86-TSO", CACM
//! 2010).
//!
//! A test is a few accesses by two or four threads, and an outcome that the order forbids. Threads run
//! through many instances at about the same time. At the end of a batch thread 0 classifies what all have
//! read. The instances of a batch lie in the same few pages, so that most accesses are plain and some fault,
//! at any point of a test.
//!
//! One more thread of each node, the *perturber*, takes these pages at random moments for reading or writing,
//! and changes nothing there. Without it pages move only where the test's own accesses make them, and never
//! while a thread of the same node uses them: a driver's wrong order would not show.
//!
//! With two CPUs in a node two of its threads run at the same time. In tests of two threads those belong to
//! another test in the same pages. In larger ones they belong to the same test, and one may see the other's
//! write before it has left the node.
//!
//! No instance is ever cleared: each test in it writes numbers larger than those before, and smaller ones are
//! old.

mod program;
#[cfg(test)]
mod tests;
mod variable;

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use dsm::Node;
use serde::{Deserialize, Serialize};

pub use program::{Outcome, Test};

use super::JobResult;
use crate::shared::{Barrier, PAGE_WORDS, SharedWords};
use program::{Instance, Seen};

/// Instances of a batch, for all teams together.
const INSTANCES: usize = PAGE_WORDS / 2;
/// Range of the numbers of one test: they are larger than a multiple of this, and less than the next.
const STEP: u64 = 4;
/// Longest sleep of a perturber between pages, microseconds.
const PERTURB_MAX_US: u64 = 40;
/// Largest number of threads of all teams, and of one.
const THREADS_MAX: u32 = 4;
/// Largest number of CPUs of a node that run threads of a test.
pub const CPUS_MAX: u16 = 2;

/// Pages that a run uses, from its first one.
pub const PAGES: u32 = 4 + 2 * THREADS_MAX;

/// Threads of a test on some nodes ([`placements`]).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Test to run.
    pub test: Test,
    /// Duration, milliseconds.
    pub millis: u64,
    /// First of [`PAGES`] pages that nothing else uses.
    pub first: u32,
    /// Page of the second variable, managed by another node than the first one's.
    pub second: u32,
    /// Number of batches of all tests in these pages so far.
    pub batch: u64,
    /// Number of nodes.
    pub nodes: u16,
    /// CPUs of each node that run threads: 1, or [`CPUS_MAX`].
    pub cpus: u16,
}

/// Node of a thread. Each team runs the whole test, in instances of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Placement {
    team: u32,
    thread: u32,
    node: u16,
}

impl Run {
    /// Returns the number of teams. All teams would share the variable of [`Test::Crossing`].
    fn teams(&self) -> u32 {
        match self.test.threads() {
            2 if self.test != Test::Crossing => u32::from(self.cpus.clamp(1, CPUS_MAX)),
            _ => 1,
        }
    }
}

/// Returns every thread of a run with its node.
fn placements(run: &Run) -> Vec<Placement> {
    let threads = run.test.threads();
    let all = (0..run.teams()).flat_map(|team| (0..threads).map(move |thread| (team, thread)));
    let node = |team: u32, thread: u32| match (run.cpus, threads) {
        (CPUS_MAX.., 3..) => thread / u32::from(CPUS_MAX),
        _ => thread + team,
    };
    let nodes = u32::from(run.nodes.max(1));
    all.map(|(team, thread)| Placement {
        team,
        thread,
        node: (node(team, thread) % nodes) as u16,
    })
    .collect()
}

/// Number of times that each outcome was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeCounts {
    /// Outcomes that some order of the accesses explains.
    pub ordinary: u64,
    /// Outcomes that only x86's order allows, not one that all threads agree on; or that show an access in
    /// two parts, where that is allowed.
    pub relaxed: u64,
    /// Outcomes that x86's order forbids.
    pub forbidden: u64,
    /// Batches, earlier ones included.
    pub batches: u64,
}

/// Memory of a run.
struct TestMemory<'a> {
    words: SharedWords<'a>,
    run: &'a Run,
}

impl<'a> TestMemory<'a> {
    /// Returns an instance of a team. In every other batch both variables are in one page.
    fn instance(&self, batch: u64, team: u32, index: usize) -> Instance {
        // Neighbouring instances of two teams share a cache line.
        let index = index * self.run.teams() as usize + team as usize;
        let page = |page: u32| self.words.pages(page..page + 1);
        let y_page = if batch.is_multiple_of(2) {
            self.run.first
        } else {
            self.run.second
        };
        // The last word of one page and the first of the next, half of each.
        let last = &page(self.run.first + 1)[PAGE_WORDS - 1];
        Instance {
            x: pointer(&page(self.run.first)[index]),
            y: pointer(&page(y_page)[INSTANCES + index]),
            across: pointer(last).wrapping_byte_add(4),
            base: (batch * INSTANCES as u64 + index as u64) * STEP,
        }
    }

    /// Returns the number of a team's instances in a batch.
    fn instances(&self) -> usize {
        INSTANCES / self.run.teams() as usize
    }

    /// Returns the text of the values that a thread has read.
    fn results(&self, team: u32, thread: u32) -> &'a [AtomicU64] {
        let first = self.run.first + 4 + 2 * (team * self.run.test.threads() + thread);
        self.words.pages(first..first + 2)
    }

    /// Returns the word that ends the run.
    fn stop(&self) -> &'a AtomicU64 {
        &self.words.pages(self.run.first + 3..self.run.first + 4)[128]
    }
}

fn pointer(word: &AtomicU64) -> *mut u64 {
    word.as_ptr()
}

/// Runs this node's threads.
pub(super) fn run(node: &Node, run: &Run) -> JobResult {
    let words = SharedWords::of(node);
    let mine: Vec<Placement> = placements(run)
        .into_iter()
        .filter(|placement| placement.node == node.me())
        .collect();
    match threads(words, run, &mine, &[node.me()], &|_, _| ()) {
        Some(counts) => JobResult::Litmus(counts),
        None => JobResult::Done,
    }
}

/// Runs the threads of all nodes in local memory of [`PAGES`] pages and one more: that of a guest, whose CPUs
/// are the nodes'. Each thread calls `begin` first, with its node and its number there. Threads of one node
/// may share a CPU of it.
pub fn in_memory(words: &[AtomicU64], run: &Run, begin: impl Fn(u16, usize) + Sync) -> OutcomeCounts {
    let all = placements(run);
    let nodes: Vec<u16> = (0..run.nodes).collect();
    let counts = threads(SharedWords::at(words), run, &all, &nodes, &begin);
    counts.unwrap_or_default()
}

/// Runs threads of these nodes, and a perturber of each. Returns the counts of the thread that classifies, if
/// it is among them.
fn threads(
    words: SharedWords<'_>,
    run: &Run,
    placements: &[Placement],
    nodes: &[u16],
    begin: &(impl Fn(u16, usize) + Sync),
) -> Option<OutcomeCounts> {
    let is_over = &AtomicBool::new(false);
    let all_counts: Vec<OutcomeCounts> = std::thread::scope(|scope| {
        let mut at_work = Vec::with_capacity(placements.len());
        for (number, placement) in placements.iter().enumerate() {
            let rank = placements[..number]
                .iter()
                .filter(|other| other.node == placement.node)
                .count();
            at_work.push(scope.spawn(move || {
                begin(placement.node, rank);
                part(words, run, *placement)
            }));
        }
        for node in nodes {
            scope.spawn(move || {
                begin(*node, 0);
                perturb(words, run, *node, is_over);
            });
        }
        let ends: Vec<_> = at_work
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        is_over.store(true, Relaxed);
        ends.into_iter()
            .map(|counts| counts.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let classify = placements
        .iter()
        .position(|placement| (placement.team, placement.thread) == (0, 0));
    classify.map(|classify| all_counts[classify])
}

/// Runs one thread.
fn part(words: SharedWords<'_>, run: &Run, Placement { team, thread, .. }: Placement) -> OutcomeCounts {
    let memory = TestMemory { words, run };
    let count = run.teams() * run.test.threads();
    let is_classifier = (team, thread) == (0, 0);
    let barrier = Barrier::new(memory.words, run.first + 3, u64::from(count));
    let end = Instant::now() + Duration::from_millis(run.millis);
    let number = team * run.test.threads() + thread;
    let mut random = fastrand::Rng::with_seed(u64::from(number) + run.batch);
    let mut counts = OutcomeCounts {
        batches: run.batch,
        ..OutcomeCounts::default()
    };
    let results = memory.results(team, thread);
    let mut seen = [Seen::default(); INSTANCES];
    let seen = &mut seen[..memory.instances()];
    loop {
        barrier.wait();
        if memory.stop().load(SeqCst) == 1 {
            break;
        }
        // Different starts let every order occur.
        delay(random.u32(0..2000));
        // A fast run ends before a page may leave; in a slow one pages leave at any access.
        let is_slow = random.u8(..4) == 0;
        for (index, seen) in seen.iter_mut().enumerate() {
            if is_slow || random.u8(..) < 32 {
                delay(random.u32(0..100));
            }
            *seen = run
                .test
                .step(thread, &memory.instance(counts.batches, team, index));
        }
        for (seen, result) in seen.iter().zip(results.chunks_exact(2)) {
            result[0].store(seen[0], SeqCst);
            result[1].store(seen[1], SeqCst);
        }
        barrier.wait();
        if is_classifier {
            classify(&memory, &mut counts);
            let over = Instant::now() > end || counts.forbidden > 0;
            memory.stop().store(u64::from(over), SeqCst);
        }
        counts.batches += 1;
    }
    barrier.wait();
    if is_classifier {
        memory.stop().store(0, SeqCst);
    }
    barrier.wait();
    counts
}

/// Takes the pages of the variables until the run is over.
fn perturb(words: SharedWords<'_>, run: &Run, node: u16, is_over: &AtomicBool) {
    let mut random = fastrand::Rng::with_seed(run.batch << 8 | u64::from(node));
    while !is_over.load(Relaxed) {
        let page = [run.first, run.first + 1, run.first + 2, run.second][random.usize(..4)];
        let word = &words.pages(page..page + 1)[random.usize(..PAGE_WORDS)];
        if random.u8(..4) == 0 {
            // A write that keeps the value.
            word.fetch_add(0, SeqCst);
        } else {
            word.load(SeqCst);
        }
        std::thread::sleep(Duration::from_micros(random.u64(..PERTURB_MAX_US)));
    }
}

fn classify(memory: &TestMemory, counts: &mut OutcomeCounts) {
    let test = memory.run.test;
    for team in 0..memory.run.teams() {
        let results: Vec<&[AtomicU64]> = (0..test.threads())
            .map(|thread| memory.results(team, thread))
            .collect();
        for index in 0..memory.instances() {
            let instance = memory.instance(counts.batches, team, index);
            let mut seen = [Seen::default(); THREADS_MAX as usize];
            for (seen, result) in seen.iter_mut().zip(&results) {
                *seen = [result[2 * index].load(SeqCst), result[2 * index + 1].load(SeqCst)];
            }
            match test.classify(&seen, instance.last(), instance.base) {
                Outcome::Ordinary => counts.ordinary += 1,
                Outcome::Relaxed => counts.relaxed += 1,
                Outcome::Forbidden => counts.forbidden += 1,
            }
        }
    }
}

fn delay(turns: u32) {
    (0..turns).for_each(|_| std::hint::spin_loop());
}
