//! Accesses to pages, timed.

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Answer;
use crate::clock::now_ns;
use crate::node::Node;
use crate::shared::{PAGE_WORDS, Words};

/// Use each of these pages once.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Touch {
    /// Which.
    pub pages: Range<u32>,
    /// Write, else read.
    pub write: bool,
    /// By so many threads, each a part.
    pub threads: u32,
}

impl Touch {
    pub(super) fn run(&self, node: &Node) -> Answer {
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
        Answer::Touched {
            each_ns: times.concat(),
            all_ns: now_ns() - before,
        }
    }

    fn part(&self, node: &Node, pages: Range<u32>) -> Vec<u64> {
        let words = Words::of(node).pages(pages.clone());
        words
            .iter()
            .step_by(PAGE_WORDS)
            .zip(pages)
            .map(|(word, page)| {
                let before = now_ns();
                if self.write {
                    word.store(u64::from(page), SeqCst);
                } else {
                    word.load(SeqCst);
                }
                now_ns() - before
            })
            .collect()
    }
}

/// Adds to a word for a while; how often.
pub(super) fn add(node: &Node, page: u32, millis: u64) -> u64 {
    let word = &Words::of(node).pages(page..page + 1)[0];
    let end = Instant::now() + Duration::from_millis(millis);
    let mut times = 0;
    while Instant::now() < end {
        word.fetch_add(1, Relaxed);
        times += 1;
    }
    times
}
