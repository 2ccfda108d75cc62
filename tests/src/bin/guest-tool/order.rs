//! Litmus tests of x86's memory order between the guest's CPUs, some on each node of the guest.

use std::sync::atomic::AtomicU64;

use dsm_bench::work::litmus::{OutcomeCounts, PAGES, Run, Test, in_memory};

use crate::Fault;
use crate::pinned::{alarm_after, pin};

const PAGE_BYTES: usize = 4096;
const PAGE_WORDS: usize = PAGE_BYTES / size_of::<AtomicU64>();
/// Time limit of the program, for tests whose threads wait for one another forever.
const LIMIT_S: u64 = 480;

/// Runs each test for `millis`, on `cpus` CPUs of each of `nodes` nodes, numbered node by node.
pub fn litmus(nodes: u16, cpus: u16, millis: u64) -> Result<String, Fault> {
    alarm_after(LIMIT_S);
    // One page more for the second variable, and one since the start of a page is unknown.
    let words = (PAGES as usize + 2) * PAGE_WORDS;
    let words: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
    let words = &words[words.as_ptr().align_offset(PAGE_BYTES)..][..(PAGES as usize + 1) * PAGE_WORDS];
    let mut all = OutcomeCounts {
        batches: 1,
        ..OutcomeCounts::default()
    };
    for test in Test::ALL {
        let run = Run {
            test,
            millis,
            first: 0,
            second: PAGES,
            batch: all.batches,
            nodes,
            cpus,
        };
        let begin = |node: u16, number: usize| {
            let cpu = usize::from(node * cpus) + number % usize::from(cpus);
            pin(cpu).unwrap_or_else(|error| panic!("{error}"));
        };
        let counts = in_memory(words, &run, begin);
        if counts.forbidden > 0 {
            return Err(format!("{}: {counts:?}", test.name()).into());
        }
        all.ordinary += counts.ordinary;
        all.relaxed += counts.relaxed;
        all.batches = counts.batches;
    }
    Ok(format!(
        "tests={} ordinary={} relaxed={} forbidden=0",
        Test::ALL.len(),
        all.ordinary,
        all.relaxed
    ))
}
