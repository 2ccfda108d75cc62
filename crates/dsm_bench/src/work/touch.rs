//! Timed accesses to pages.

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use dsm::{Node, now_ns};
use serde::{Deserialize, Serialize};

use super::JobResult;
use crate::shared::{PAGE_WORDS, SharedWords};

/// One access to each page of a range.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Touch {
    /// Pages to use.
    pub pages: Range<u32>,
    /// Whether to write; otherwise read.
    pub write: bool,
    /// Number of threads, each with a part of the pages.
    pub threads: u32,
    /// Order in which each thread uses its part.
    pub order: AccessOrder,
}

/// Order of accesses to pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AccessOrder {
    /// By ascending page number.
    Ascending,
    /// Random, the same in each run.
    Scattered,
}

impl Touch {
    pub(super) fn run(&self, node: &Node) -> JobResult {
        let before = now_ns();
        let each = self.pages.len() as u32 / self.threads.max(1);
        let start = |thread: u32| self.pages.start + thread * each;
        let times: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|thread| scope.spawn(move || self.part(node, start(thread)..start(thread + 1))))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_default())
                .collect()
        });
        JobResult::Touched {
            each_ns: times.concat(),
            all_ns: now_ns() - before,
        }
    }

    fn part(&self, node: &Node, pages: Range<u32>) -> Vec<u64> {
        let words = SharedWords::of(node).pages(pages.clone());
        let mut order: Vec<u32> = pages.clone().collect();
        if self.order == AccessOrder::Scattered {
            fastrand::Rng::with_seed(u64::from(pages.start)).shuffle(&mut order);
        }
        let touch = |page: u32| {
            let word = &words[(page - pages.start) as usize * PAGE_WORDS];
            let before = now_ns();
            if self.write {
                word.store(u64::from(page), SeqCst);
            } else {
                word.load(SeqCst);
            }
            now_ns() - before
        };
        order.into_iter().map(touch).collect()
    }
}

/// Adds to a word for a while. Returns the number of additions.
pub(super) fn add(node: &Node, page: u32, millis: u64) -> u64 {
    let word = &SharedWords::of(node).pages(page..page + 1)[0];
    let end = Instant::now() + Duration::from_millis(millis);
    let mut times = 0;
    while Instant::now() < end {
        word.fetch_add(1, Relaxed);
        times += 1;
    }
    times
}

/// Reads all of these pages, as a copy of them does.
pub(super) fn scan(node: &Node, pages: Range<u32>) -> JobResult {
    let before = now_ns();
    let words = SharedWords::of(node).pages(pages);
    let sum = words
        .iter()
        .fold(0_u64, |sum, word| sum.wrapping_add(word.load(Relaxed)));
    JobResult::Scanned {
        ns: now_ns() - before,
        sum,
    }
}
