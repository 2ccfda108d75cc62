//! Many pages used by one thread, with and without prefetching.

use std::ops::Range;

use dsm::Meter;
use dsm_bench::work::{AccessOrder, Job, Touch};
use miette::{Result, miette};
use serde::Serialize;

use super::{PAGES, all, meter, middle, touch, touched};
use crate::commands::dsm::nodes::Nodes;

/// Pages of another node.
#[derive(Debug, Serialize)]
pub struct Stream {
    kind: &'static str,
    ahead: bool,
    megabytes_per_second: f64,
    us_per_page: f64,
    /// Messages per used page, including those by which the owner of read pages takes all back to write them
    /// again.
    messages_per_page: f64,
    /// Requests that a thread waited for from their start.
    waits_per_page: f64,
    /// Prefetched pages.
    ahead_per_page: f64,
}

/// Access pattern of a thread over many pages.
struct Kind {
    name: &'static str,
    /// Whether it writes pages that were never written; else it reads pages that another node wrote.
    fills: bool,
    /// Length of a row of pages, and the number of them that it uses.
    row: usize,
    used: u32,
    order: AccessOrder,
}

const KINDS: [Kind; 4] = [
    Kind {
        name: "reads one after the other",
        fills: false,
        row: PAGES as usize,
        used: PAGES,
        order: AccessOrder::Ascending,
    },
    Kind {
        name: "reads 4 in a row of 32",
        fills: false,
        row: 32,
        used: 4,
        order: AccessOrder::Ascending,
    },
    Kind {
        name: "reads scattered",
        fills: false,
        row: PAGES as usize,
        used: PAGES,
        order: AccessOrder::Scattered,
    },
    Kind {
        name: "fills one after the other",
        fills: true,
        row: PAGES as usize,
        used: PAGES,
        order: AccessOrder::Ascending,
    },
];

/// Measures all patterns, on pages of node 1 from `first` on.
pub fn measure(nodes: &Nodes, rounds: u32, first: u32) -> Result<Vec<Stream>> {
    let pages = first..first + PAGES;
    let mut streams = Vec::new();
    for kind in KINDS {
        // Alternating, so that both run under the same host load.
        let mut both = [
            (false, Vec::new(), Meter::default()),
            (true, Vec::new(), Meter::default()),
        ];
        let all_used = f64::from(PAGES / kind.row as u32 * kind.used);
        for _ in 0..rounds {
            for (ahead, times, sent) in &mut both {
                all(nodes, &Job::Ahead(*ahead))?;
                let (ns, round) = kind.round(nodes, &pages)?;
                *sent += round;
                times.push(ns as f64 / all_used);
            }
        }
        for (ahead, times, sent) in both {
            let ns_per_page = middle(times);
            let per_page = |count: u64| count as f64 / (all_used * f64::from(rounds));
            streams.push(Stream {
                kind: kind.name,
                ahead,
                megabytes_per_second: page::PAGE_LEN as f64 * 1e3 / ns_per_page,
                us_per_page: ns_per_page / 1e3,
                messages_per_page: per_page(sent.messages),
                waits_per_page: match kind.fills {
                    true => per_page(sent.writes.count),
                    false => per_page(sent.reads.count - sent.joined),
                },
                ahead_per_page: per_page(sent.ahead + sent.filled),
            });
        }
    }
    all(nodes, &Job::Ahead(nodes.ahead))?;
    Ok(streams)
}

impl Kind {
    /// Returns the time of node 0's thread, and the sent messages.
    fn round(&self, nodes: &Nodes, pages: &Range<u32>) -> Result<(u64, Meter)> {
        if self.fills {
            let discard = Job::Discard(pages.clone());
            nodes
                .session
                .run_on(1, discard)
                .map_err(|error| miette!("{error}"))?;
        } else {
            touch(nodes, 1, pages.clone(), true, 1)?;
        }
        let before = meter(nodes)?;
        let mut ns = 0;
        for start in pages.clone().step_by(self.row) {
            let used = Touch {
                pages: start..start + self.used,
                write: self.fills,
                threads: 1,
                order: self.order,
            };
            ns += touched(nodes, 0, used)?.1;
        }
        if !self.fills {
            touch(nodes, 1, pages.clone(), true, 1)?;
        }
        Ok((ns, meter(nodes)? - before))
    }
}

/// Prints a table.
pub fn print(streams: &[Stream]) {
    println!(
        "one thread                 ahead    MB/s   us/page   messages   waits   came ahead   (for each page)"
    );
    for stream in streams {
        println!(
            "{:27} {:5} {:7.0} {:9.2} {:10.2} {:7.3} {:12.3}",
            stream.kind,
            if stream.ahead { "yes" } else { "no" },
            stream.megabytes_per_second,
            stream.us_per_page,
            stream.messages_per_page,
            stream.waits_per_page,
            stream.ahead_per_page
        );
    }
}
