//! Jobs: the parts of benches and tests that run on each node.

pub mod kernels;
pub mod litmus;
mod touch;

use std::ops::Range;

use dsm::{Meter, Node};
use serde::{Deserialize, Serialize};

pub use touch::{AccessOrder, Touch};

/// A job. All nodes that take part are sent theirs at the same time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Job {
    /// Access pages, and measure how long that takes.
    Touch(Touch),
    /// Read all bytes of pages in order, and add up their words.
    Scan(Range<u32>),
    /// Add to one word for a number of milliseconds.
    Add {
        /// Page of the word.
        page: u32,
        /// Duration, milliseconds.
        millis: u64,
    },
    /// Set the CPU time after which a page may be released, nanoseconds.
    Hold(u64),
    /// Discard the contents of pages.
    Discard(std::ops::Range<u32>),
    /// Return the memory of the host that this node uses, bytes.
    Memory,
    /// Enable or disable prefetching.
    Ahead(bool),
    /// Return the counters.
    Meter,
    /// Run threads of a litmus test.
    Litmus(litmus::Run),
    /// Run a kernel.
    Kernel(kernels::Run),
    /// Reply to requests for pages on the stream of commands.
    ServeRequests {
        /// Number of requests.
        count: u32,
        /// How this end waits.
        waits: crate::baseline::WaitMode,
        /// Whether to use real-time priority, as page servers do.
        realtime: bool,
    },
}

/// Answer of a node to a job of node 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum JobResult {
    /// The job has no result.
    Done,
    /// Times of the accesses.
    Touched {
        /// Time of each access, nanoseconds.
        each_ns: Vec<u64>,
        /// Time of all accesses together, nanoseconds.
        all_ns: u64,
    },
    /// Number of additions, pages or bytes, as the job counts them.
    Count(u64),
    /// Time and sum of a scan.
    Scanned {
        /// Duration of the scan, nanoseconds.
        ns: u64,
        /// Sum of the words.
        sum: u64,
    },
    /// Counters of this node since it joined.
    Meter(Meter),
    /// Outcomes of a litmus test.
    Litmus(litmus::OutcomeCounts),
    /// Result of a kernel on this node.
    Kernel {
        /// Time and counters.
        figures: kernels::Figures,
        /// Sum of the result.
        sum: u64,
    },
    /// The job failed, with the reason.
    Failed(String),
}

/// Runs a job, except those that the session itself runs.
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
            // Page servers publish their counters when they sleep.
            std::thread::sleep(std::time::Duration::from_millis(5));
            JobResult::Meter(node.meter())
        }
        Job::Litmus(run) => litmus::run(node, run),
        Job::Kernel(run) => kernels::run(node, run),
        Job::ServeRequests { .. } => JobResult::Failed("only a session can answer requests".into()),
    }
}
