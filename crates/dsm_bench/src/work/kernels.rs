//! Small programs of high-performance computing, as the paper's evaluation has (vNUMA, section 5.2), one thread on each node.
//!
//! Each gives a sum of its result that does not depend on how many nodes took part. What it starts from is made, each part on the node
//! that uses it as far as programs do so, before time and faults are counted.

mod log;
mod matrix;
mod sor;
mod sort;
mod tsp;

use std::sync::atomic::AtomicU64;

use dsm::Node;
use serde::{Deserialize, Serialize};

use super::JobResult;
use crate::shared::{Barrier, PAGE_WORDS, SharedWords, locked};

use log::Log;
pub use log::{Figures, Part, Phase};

/// A program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kernel {
    /// Red-black successive over-relaxation on a square grid.
    Sor,
    /// Integer sort by counting, with one table for all.
    Sort,
    /// Matrix product.
    Matrix,
    /// The shortest tour of all towns, by branch and bound.
    Tsp,
}

/// Its run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Which.
    pub kernel: Kernel,
    /// Rows of the grid or matrices; keys, in thousands; towns.
    pub size: u32,
    /// How many nodes take part, a thread on each.
    pub nodes: u16,
    /// The first of [`Kernel::pages`] pages that are all zeroes, or that runs have used before.
    pub first: u32,
    /// Whether to tell what was waited for in each phase. The run then takes longer: it stops for that.
    pub phases: bool,
}

/// How large a program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// A tenth of a second or so.
    Small,
    /// A second or so.
    Large,
}

/// One thread's share.
struct ThreadShare<'a> {
    me: u64,
    count: u64,
    size: usize,
    words: SharedWords<'a>,
    /// The first page for data.
    first: u32,
    barrier: Barrier<'a>,
    log: Log<'a>,
}

/// Of a result, which is there already: adding up is not timed.
type Sum<'a> = Box<dyn FnOnce() -> u64 + 'a>;

impl Kernel {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Sor, Self::Sort, Self::Matrix, Self::Tsp];

    /// As people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sor => "SOR",
            Self::Sort => "integer sort",
            Self::Matrix => "matrix product",
            Self::Tsp => "TSP",
        }
    }

    /// Its [`Run::size`].
    pub fn size(self, scale: Scale) -> u32 {
        let (small, large) = match self {
            Self::Sor => (1024, 2048),
            Self::Sort => (4096, 16_384),
            Self::Matrix => (512, 1024),
            Self::Tsp => (11, 12),
        };
        match scale {
            Scale::Small => small,
            Scale::Large => large,
        }
    }

    /// Pages that a run needs.
    pub fn pages(self, size: u32) -> u32 {
        let square = (u64::from(size) * u64::from(size)).div_ceil(PAGE_WORDS as u64) as u32;
        1 + match self {
            Self::Sor => square,
            Self::Sort => sort::PAGES,
            Self::Matrix => 3 * square,
            Self::Tsp => 1,
        }
    }
}

impl ThreadShare<'_> {
    /// This thread's part of so many things.
    fn part(&self, things: usize) -> std::ops::Range<usize> {
        let at = |number: u64| (things as u64 * number / self.count) as usize;
        at(self.me)..at(self.me + 1)
    }

    /// All is made: time and counts are from here on.
    fn begin(&self) {
        self.barrier.wait();
        self.log.begin();
        // Whoever is first sends nothing before the others count.
        self.barrier.wait();
        self.log.start();
    }

    /// WaitMode until all have come, which ends a phase.
    fn end_phase(&self) {
        self.log.wait(|| self.barrier.wait());
        self.log.phase_ends();
    }

    /// Runs `work` while no other thread is at such work.
    fn in_turn<T>(&self, lock: &AtomicU64, work: impl FnOnce() -> T) -> T {
        self.log.stop_clock();
        locked(lock, || {
            self.log.turn_begins();
            let result = work();
            self.log.turn_ends();
            result
        })
    }
}

/// Runs this node's thread, if it takes part.
pub(super) fn run(node: &Node, run: &Run) -> JobResult {
    if node.me() >= run.nodes {
        return JobResult::Done;
    }
    let words = SharedWords::of(node);
    let share = ThreadShare {
        me: u64::from(node.me()),
        count: u64::from(run.nodes),
        size: run.size as usize,
        words,
        first: run.first + 1,
        barrier: Barrier::new(words, run.first, u64::from(run.nodes)),
        log: Log::new(node, run.phases),
    };
    let sum = match run.kernel {
        Kernel::Sor => sor::run(&share),
        Kernel::Sort => sort::run(&share),
        Kernel::Matrix => matrix::run(&share),
        Kernel::Tsp => tsp::run(&share),
    };
    let ThreadShare { barrier, log, .. } = share;
    let figures = log.figures();
    // Adding up asks others for their pages; by now they have counted.
    barrier.wait();
    JobResult::Kernel {
        figures,
        sum: if node.me() == 0 { sum() } else { 0 },
    }
}
