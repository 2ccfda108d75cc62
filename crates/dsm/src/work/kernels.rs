//! Small programs of high-performance computing, as the paper's evaluation has (vNUMA, section 5.2), one thread on each node.
//!
//! Each gives a sum of its result that does not depend on how many nodes took part.

mod matrix;
mod sor;
mod sort;
mod tsp;

use serde::{Deserialize, Serialize};

use super::Answer;
use crate::clock::now_ns;
use crate::node::Node;
use crate::shared::{Barrier, PAGE_WORDS, Words};

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
    /// The first of [`Kernel::pages`] pages of zeroes that nobody else uses.
    pub first: u32,
}

/// One thread's share.
struct Share<'a> {
    me: u64,
    count: u64,
    size: usize,
    words: Words<'a>,
    /// The first page for data.
    first: u32,
    barrier: Barrier<'a>,
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

    /// A size that takes a second or so.
    pub fn size(self) -> u32 {
        match self {
            Self::Sor => 1024,
            Self::Sort => 4096,
            Self::Matrix => 512,
            Self::Tsp => 11,
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

impl Share<'_> {
    /// This thread's part of so many things.
    fn part(&self, things: usize) -> std::ops::Range<usize> {
        let at = |number: u64| (things as u64 * number / self.count) as usize;
        at(self.me)..at(self.me + 1)
    }
}

/// Runs this node's thread, if it takes part.
pub(super) fn run(node: &Node, run: &Run) -> Answer {
    if node.me() >= run.nodes {
        return Answer::Done;
    }
    let words = Words::of(node);
    let share = Share {
        me: u64::from(node.me()),
        count: u64::from(run.nodes),
        size: run.size as usize,
        words,
        first: run.first + 1,
        barrier: Barrier::new(words, run.first, u64::from(run.nodes)),
    };
    share.barrier.wait();
    let before = now_ns();
    let sum = match run.kernel {
        Kernel::Sor => sor::run(&share),
        Kernel::Sort => sort::run(&share),
        Kernel::Matrix => matrix::run(&share),
        Kernel::Tsp => tsp::run(&share),
    };
    let ns = now_ns() - before;
    Answer::Kernel {
        ns,
        sum: if node.me() == 0 { sum() } else { 0 },
    }
}
