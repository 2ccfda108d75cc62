//! Kernels of high-performance computing, as in the paper's evaluation (vNUMA, section 5.2), one thread on
//! each node.
//!
//! Each returns a sum of its result that does not depend on the number of nodes. Its input is made before
//! time and faults are counted, each part on the node that uses it as far as such programs do so.

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

/// A computation of the bench (vNUMA, section 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kernel {
    /// Red-black successive over-relaxation on a square grid.
    Sor,
    /// Integer sort by counting, with one shared table.
    Sort,
    /// Matrix product.
    Matrix,
    /// Shortest tour of all towns, by branch and bound.
    Tsp,
}

/// A run of a kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Kernel to run.
    pub kernel: Kernel,
    /// Size: rows of the grid or matrices; keys, in thousands; towns.
    pub size: u32,
    /// Number of nodes, with a thread on each.
    pub nodes: u16,
    /// First of [`Kernel::pages`] pages that are zero, or that earlier runs used.
    pub first: u32,
    /// Whether to count the waits of each phase. The run then takes longer, as it stops for that.
    pub phases: bool,
}

/// Size of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// About a tenth of a second.
    Small,
    /// About a second.
    Large,
}

/// Share of one thread.
struct ThreadShare<'a> {
    me: u64,
    count: u64,
    size: usize,
    words: SharedWords<'a>,
    /// First page of the data.
    first: u32,
    barrier: Barrier<'a>,
    log: Log<'a>,
}

/// Computes the sum of a finished result, which is not timed.
type Sum<'a> = Box<dyn FnOnce() -> u64 + 'a>;

impl Kernel {
    /// All kernels.
    pub const ALL: [Self; 4] = [Self::Sor, Self::Sort, Self::Matrix, Self::Tsp];

    /// Returns the name for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sor => "SOR",
            Self::Sort => "integer sort",
            Self::Matrix => "matrix product",
            Self::Tsp => "TSP",
        }
    }

    /// Returns the [`Run::size`] of a scale.
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

    /// Returns the number of pages that a run needs.
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
    /// Returns this thread's part of a number of things.
    fn part(&self, things: usize) -> std::ops::Range<usize> {
        let at = |number: u64| (things as u64 * number / self.count) as usize;
        at(self.me)..at(self.me + 1)
    }

    /// Begins the measurement: the input is complete.
    fn begin(&self) {
        self.barrier.wait();
        self.log.begin();
        // No thread sends anything before all have read their counters.
        self.barrier.wait();
        self.log.start();
    }

    /// Waits until all threads have arrived, and ends the phase.
    fn end_phase(&self) {
        self.log.wait(|| self.barrier.wait());
        self.log.phase_ends();
    }

    /// Runs `work` while holding the lock.
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
    // The sum fetches pages of other nodes, which have read their counters by now.
    barrier.wait();
    JobResult::Kernel {
        figures,
        sum: if node.me() == 0 { sum() } else { 0 },
    }
}
