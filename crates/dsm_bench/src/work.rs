//! What a node does when node 0 asks: the parts of benches and tests that must run on every node.

pub mod kernels;
pub mod litmus;
mod touch;

use std::ops::Range;

use dsm::{Meter, Node};
use serde::{Deserialize, Serialize};

pub use touch::{AccessOrder, Touch};

/// A part of a bench or test. All nodes that take part are asked at the same time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Job {
    /// Use pages.
    Touch(Touch),
    /// Read all bytes of pages, one after the other, and add up their words.
    Scan(Range<u32>),
    /// Add to one word for so many milliseconds.
    Add {
        /// Its page.
        page: u32,
        /// How long.
        millis: u64,
    },
    /// How long a thread is to run before its page goes, nanoseconds.
    Hold(u64),
    /// Forget what is in these pages.
    Discard(std::ops::Range<u32>),
    /// How much memory of the host's this node takes, bytes.
    Memory,
    /// Whether to ask for pages ahead.
    Ahead(bool),
    /// Tell what was counted.
    Meter,
    /// Run threads of a litmus test.
    Litmus(litmus::Run),
    /// Compute.
    Kernel(kernels::Run),
    /// JobResult requests for pages on the stream of orders.
    ServeRequests {
        /// How many.
        count: u32,
        /// How.
        waits: crate::baseline::WaitMode,
        /// At real-time priority, as lanes are.
        realtime: bool,
    },
}

/// What came of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum JobResult {
    /// It is done.
    Done,
    /// How long each access took, and all of them together, nanoseconds.
    Touched {
        /// Each.
        each_ns: Vec<u64>,
        /// All.
        all_ns: u64,
    },
    /// How many times.
    Count(u64),
    /// How long that took, nanoseconds, and the sum.
    Scanned {
        /// The time.
        ns: u64,
        /// The sum.
        sum: u64,
    },
    /// What was counted.
    Meter(Meter),
    /// Outcomes of a litmus test.
    Litmus(litmus::OutcomeCounts),
    /// What it took on this node, and a sum of the result.
    Kernel {
        /// Time and counts.
        figures: kernels::Figures,
        /// The sum.
        sum: u64,
    },
    /// It could not be done.
    Failed(String),
}

/// Does a job; those on the stream of orders are the session's.
pub fn run(node: &Node, job: &Job) -> JobResult {
    match job {
        Job::Touch(touch) => touch.run(node),
        Job::Scan(pages) => touch::scan(node, pages.clone()),
        Job::Add { page, millis } => JobResult::Count(touch::add(node, *page, *millis)),
        Job::Hold(ns) => {
            node.set_enough_ns(*ns);
            JobResult::Done
        }
        Job::Discard(pages) => JobResult::Count(node.discards().give_back([pages.clone()])),
        Job::Memory => match node.resident_bytes() {
            Ok(bytes) => JobResult::Count(bytes),
            Err(error) => JobResult::Failed(format!("its memory can't be counted: {error}")),
        },
        Job::Ahead(ahead) => {
            node.set_ahead(*ahead);
            JobResult::Done
        }
        Job::Meter => {
            // Lanes tell when they sleep.
            std::thread::sleep(std::time::Duration::from_millis(5));
            JobResult::Meter(node.meter())
        }
        Job::Litmus(run) => litmus::run(node, run),
        Job::Kernel(run) => kernels::run(node, run),
        Job::ServeRequests { .. } => JobResult::Failed("only a session can answer requests".into()),
    }
}
