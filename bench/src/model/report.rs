//! The model's results, as a table and for programs.

use std::fmt::Write;

use bench::Outcome;
use bench::tables::median;
use serde::Serialize;

use crate::estimate::{Build, Range, program};
use crate::links::{LINKS, Link};
use crate::record::{Costs, Heat, Shard, Stalls};

/// Measurements of the paper's compile (vNUMA, section 5.3): nodes, speed-up, and the speed-up of its model
/// without any cost.
const PAPER: [(usize, f64, f64); 2] = [(4, 2.3, 2.8), (8, 3.1, 4.0)];

/// All results.
#[derive(Debug, Serialize)]
pub struct Report {
    costs: Costs,
    links: [Link; LINKS.len()],
    programs: Vec<Row>,
    builds: Vec<BuildRow>,
    stalls: Vec<StallRow>,
    /// Nodes, speed-up and ideal of the paper's compile, over 1 Gb/s Ethernet.
    paper_compile: [(usize, f64, f64); PAPER.len()],
}

/// A program on a number of nodes with one link; medians, lowest and highest of the recorded runs.
#[derive(Debug, Serialize)]
struct Row {
    kernel: String,
    size: u32,
    nodes: usize,
    link: &'static str,
    speedup: f64,
    low: f64,
    high: f64,
    /// Waits of all nodes, the fewest and most of the runs.
    waits: [u64; 2],
}

#[derive(Debug, Serialize)]
struct BuildRow {
    nodes: usize,
    link: &'static str,
    speedup: Range,
}

/// Waits of a build, sums over its nodes.
#[derive(Debug, Serialize)]
struct StallRow {
    nodes: usize,
    /// For a page to read, for one to write, and for the right to write alone.
    read: u64,
    write: u64,
    upgrade: u64,
    messages: u64,
    pages: u64,
}

impl StallRow {
    fn of(heat: &Heat) -> Self {
        let sum = |what: fn(&Shard) -> u64| heat.shards.iter().map(what).sum();
        Self {
            nodes: heat.shards.len(),
            read: sum(|shard| shard.faults.read.count),
            write: sum(|shard| shard.faults.write.count),
            upgrade: sum(|shard| shard.faults.upgrade.count),
            messages: sum(|shard| shard.messages),
            pages: sum(|shard| shard.pages),
        }
    }
}

impl Report {
    /// Results of programs.
    pub fn of(stalls: &Stalls, costs: Costs) -> Self {
        let mut programs = Vec::new();
        for recorded in stalls.records.iter().flat_map(|record| &record.programs) {
            let waits = |run: &crate::record::Run| -> u64 {
                let phases = run.nodes.iter().flat_map(|node| &node.phases);
                phases
                    .map(|phase| phase[1..4].iter().chain(&phase[5..]).sum::<u64>())
                    .sum()
            };
            let waits: Vec<u64> = recorded.runs.iter().map(waits).collect();
            for link in &LINKS {
                let speedups: Vec<f64> = recorded
                    .runs
                    .iter()
                    .map(|run| program(run, link, &costs))
                    .collect();
                let (Some(speedup), Some(run)) = (median(&speedups), recorded.runs.first()) else {
                    continue;
                };
                programs.push(Row {
                    kernel: recorded.kernel.clone(),
                    size: recorded.size,
                    nodes: run.nodes.len(),
                    link: link.name,
                    speedup,
                    low: speedups.iter().copied().fold(f64::INFINITY, f64::min),
                    high: speedups.iter().copied().fold(0.0, f64::max),
                    waits: [
                        waits.iter().copied().min().unwrap_or(0),
                        waits.iter().copied().max().unwrap_or(0),
                    ],
                });
            }
        }
        Self {
            costs,
            links: LINKS,
            programs,
            builds: Vec::new(),
            stalls: Vec::new(),
            paper_compile: PAPER,
        }
    }

    /// Adds those of a build.
    pub fn build(&mut self, build: &Build, heat: &Heat) {
        self.stalls.push(StallRow::of(heat));
        self.builds.extend(LINKS.iter().map(|link| BuildRow {
            nodes: heat.shards.len(),
            link: link.name,
            speedup: build.speedup(&heat.shards, link, &self.costs),
        }));
    }

    /// The table.
    ///
    /// # Errors
    /// None.
    pub fn text(&self) -> Outcome<String> {
        let mut text = String::from(
            "Modelled, from counts of this host and assumed links; none of this was measured\n\n",
        );
        writeln!(
            text,
            "{:15} {:>6} {:>5} {:>15}  {:20} {:>8}  (lowest - highest)",
            "program", "size", "nodes", "waits", "link", "speed-up"
        )?;
        for row in &self.programs {
            let waits = format!("{} - {}", row.waits[0], row.waits[1]);
            writeln!(
                text,
                "{:15} {:6} {:5} {waits:>15}  {:20} {:8.2}  ({:.2} - {:.2})",
                row.kernel, row.size, row.nodes, row.link, row.speedup, row.low, row.high
            )?;
        }
        if self.builds.is_empty() {
            writeln!(text, "\nno build was recorded (--builds)")?;
        } else {
            writeln!(
                text,
                "\n{:>5}  {:>8} {:>8} {:>8} {:>9} {:>8}   \
                 waits of a build, to read, to write, for the right alone",
                "nodes", "read", "write", "upgrade", "messages", "pages"
            )?;
            for row in &self.stalls {
                writeln!(
                    text,
                    "{:5}  {:8} {:8} {:8} {:9} {:8}",
                    row.nodes, row.read, row.write, row.upgrade, row.messages, row.pages
                )?;
            }
            writeln!(
                text,
                "\n{:>5}  {:20} {:>8} {:>8} {:>8}   a build; other numbers of nodes were not recorded",
                "nodes", "link", "at least", "at most", "ideal"
            )?;
        }
        for BuildRow { nodes, link, speedup } in &self.builds {
            writeln!(
                text,
                "{nodes:5}  {link:20} {:8.2} {:8.2} {:8.2}",
                speedup.low, speedup.high, speedup.ideal
            )?;
        }
        for (nodes, speedup, ideal) in self.paper_compile {
            writeln!(
                text,
                "{nodes:5}  1 Gb/s Ethernet, the paper's compile as it was measured (Figure 10): {speedup}, \
                 ideal {ideal}"
            )?;
        }
        writeln!(
            text,
            "the numbers of the paper's programs (Figure 9) are not in its text"
        )?;
        Ok(text)
    }
}
