//! Estimates the time of a program on several hosts, from the waits of its nodes. Pure.
//!
//! The counts do not depend on the link, so they are taken from a run on one host, and each wait gets the
//! time that it would take on another. Programs wait for one another at the end of each phase, which
//! therefore takes as long as its slowest node; work under a contended lock is added up over all nodes.

use crate::links::Link;
use crate::record::{Builds, Costs, Node, RecordedBuild, Run, Shard};

/// Waits of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Waits {
    /// For a page.
    fetches: u64,
    /// For the right alone.
    upgrades: u64,
}

/// Time of a wait on a link, microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Prices {
    fetch_us: f64,
    upgrade_us: f64,
    /// CPU time that each reply costs the node that sends it.
    answer_us: f64,
}

/// Sums over all nodes.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    fetches: u64,
    upgrades: u64,
    /// Those of all waits that are for writing.
    to_write: u64,
    messages: u64,
    pages: u64,
    invalidated: u64,
}

impl Totals {
    /// Times with the cost of a message. Each wait has the same number of messages in a row, the mean: all
    /// messages, except that of the invalidations of one write, which go out together, only one and its
    /// answer count.
    fn prices(&self, link: &Link, costs: &Costs) -> Prices {
        let waits = self.fetches + self.upgrades;
        let in_a_row = (self.messages + 2 * self.invalidated.min(self.to_write))
            .saturating_sub(2 * self.invalidated) as f64
            / waits.max(1) as f64;
        let with_page = (self.pages as f64 / self.fetches.max(1) as f64).min(1.0);
        let message_us = link.message_us.unwrap_or(costs.message_us);
        let upgrade_us = costs.local_us + in_a_row * message_us;
        Prices {
            fetch_us: upgrade_us + with_page * link.page_us,
            upgrade_us,
            answer_us: costs.serve_us + link.answer_cpu_us.unwrap_or(costs.message_us),
        }
    }
}

impl Prices {
    fn of(&self, waits: Waits) -> f64 {
        waits.fetches as f64 * self.fetch_us + waits.upgrades as f64 * self.upgrade_us
    }

    /// Time that a node lost to others' requests: all its messages except the requests of its own waits.
    fn lost_us(&self, messages: u64, waits: u64) -> f64 {
        messages.saturating_sub(waits) as f64 * self.answer_us
    }
}

fn waits(four: &[u64]) -> Waits {
    Waits {
        fetches: four[1] + four[2],
        upgrades: four[3],
    }
}

/// Speed-up of the run over one node.
pub fn program(run: &Run, link: &Link, costs: &Costs) -> f64 {
    let mut totals = Totals::default();
    for node in &run.nodes {
        totals.messages += node.messages;
        totals.pages += node.pages;
        totals.invalidated += node.invalidated;
        for four in node.phases.iter().flat_map(|phase| phase.chunks(4)) {
            let waits = waits(four);
            totals.fetches += waits.fetches;
            totals.upgrades += waits.upgrades;
            totals.to_write += four[2] + four[3];
        }
    }
    let prices = totals.prices(link, costs);
    let part_us = |four: &[u64]| four[0] as f64 + prices.of(waits(four));
    let phases = run.nodes.iter().map(|node| node.phases.len()).max().unwrap_or(0);
    let phase_us = |number: usize| -> f64 {
        let phases = run.nodes.iter().filter_map(|node| node.phases.get(number));
        let (longest_us, turns_us) = phases.fold((0.0_f64, 0.0), |(longest, turns), phase| {
            (longest.max(part_us(&phase[..4])), turns + part_us(&phase[4..]))
        });
        longest_us + turns_us
    };
    let lost_us = |node: &Node| {
        let waits = node
            .phases
            .iter()
            .flat_map(|phase| phase.chunks(4))
            .map(|four| four[1..].iter().sum::<u64>());
        prices.lost_us(node.messages, waits.sum())
    };
    let lost_us = run.nodes.iter().map(lost_us).fold(0.0, f64::max);
    run.alone_cpu_us / ((0..phases).map(phase_us).sum::<f64>() + lost_us)
}

/// A build in a VM.
#[derive(Clone, Copy, Debug)]
pub struct Build {
    /// How long it takes on one node, microseconds.
    pub alone_us: f64,
    /// The part of that which all CPUs do together.
    pub parallel: f64,
    /// CPUs of each node.
    pub cpus: u32,
}

/// Speed-up of a build over one node.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Range {
    /// If no two CPUs ever wait at the same time.
    pub low: f64,
    /// If all work that is done at the same time waits at the same time.
    pub high: f64,
    /// Without any waits.
    pub ideal: f64,
}

impl Build {
    /// One of the recorded builds.
    pub fn of(builds: &Builds, one: &RecordedBuild) -> Self {
        Self {
            alone_us: builds.alone_s * 1e6,
            parallel: builds.parallel,
            cpus: one.cpus,
        }
    }

    /// The speed-up on as many nodes as shards were recorded.
    pub fn speedup(&self, shards: &[Shard], link: &Link, costs: &Costs) -> Range {
        let mut totals = Totals::default();
        for Shard {
            faults,
            messages,
            pages,
        } in shards
        {
            totals.fetches += faults.read.count + faults.write.count;
            totals.upgrades += faults.upgrade.count;
            totals.to_write += faults.write.count + faults.upgrade.count;
            totals.messages += messages;
            totals.pages += pages;
        }
        let prices = totals.prices(link, costs);
        let stalls_us = |shard: &Shard| {
            let waits = Waits {
                fetches: shard.faults.read.count + shard.faults.write.count,
                upgrades: shard.faults.upgrade.count,
            };
            prices.of(waits) + prices.lost_us(shard.messages, waits.fetches + waits.upgrades)
        };
        self.with(&shards.iter().map(stalls_us).collect::<Vec<f64>>())
    }

    /// The speed-up on as many nodes as `stalls_us` has entries: all waits of each node's CPUs, microseconds.
    pub fn with(&self, stalls_us: &[f64]) -> Range {
        let nodes = stalls_us.len().max(1) as f64;
        let ideal_us = self.alone_us * (1.0 - self.parallel + self.parallel / nodes);
        let together_us = stalls_us.iter().copied().fold(0.0, f64::max) / f64::from(self.cpus.max(1));
        Range {
            low: self.alone_us / (ideal_us + stalls_us.iter().sum::<f64>()),
            high: self.alone_us / (ideal_us + together_us),
            ideal: self.alone_us / ideal_us,
        }
    }
}
