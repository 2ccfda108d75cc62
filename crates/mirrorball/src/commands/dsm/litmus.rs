//! `mirrorball dsm litmus`: memory order between threads of different nodes.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use dsm::Meter;
use dsm_bench::work::litmus::{CPUS_MAX, OutcomeCounts, PAGES, Run, Test};
use dsm_bench::work::{Job, JobResult};
use miette::{IntoDiagnostic, Result, bail, miette};
use serde::Serialize;

use super::nodes::NodesArgs;
use crate::exit;

/// Arguments of `litmus`.
#[derive(Debug, Args)]
pub struct LitmusArgs {
    #[command(flatten)]
    nodes: NodesArgs,
    /// How long all tests take together
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=86400))]
    seconds: u64,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    test: &'static str,
    #[serde(flatten)]
    counts: OutcomeCounts,
}

/// Extra time before the run is aborted: a memory that lost a write may leave threads waiting for one another
/// forever.
const GRACE: Duration = Duration::from_secs(60);

/// Runs all tests in turn, several times; fails if one shows a forbidden outcome.
pub fn litmus(args: &LitmusArgs) -> Result<ExitCode> {
    let limit = Duration::from_secs(args.seconds) + GRACE;
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        eprintln!(
            "mirrorball: the memory's order was broken: after {} s threads still wait for one another",
            limit.as_secs()
        );
        std::process::exit(i32::from(exit::FAILED));
    });
    let mut rows: Vec<Row> = Test::ALL
        .iter()
        .map(|test| Row {
            test: test.name(),
            counts: OutcomeCounts::default(),
        })
        .collect();
    let mut sent = Meter::default();
    for &spread in args.nodes.placings() {
        sent += turns(args, spread, &mut rows)?;
    }
    report(args, &rows, sent)
}

/// Adds the outcomes of a memory with this placement; returns its counters.
fn turns(args: &LitmusArgs, spread: bool, rows: &mut [Row]) -> Result<Meter> {
    let nodes = args
        .nodes
        .start_placed(4 * PAGES * u32::from(dsm::LANES_MAX), spread)?;
    let node = nodes.session.node();
    let pages = node.bytes() as u32 / page::PAGE_LEN as u32;
    // The first page that the last node manages, so that the variables have different managers.
    let second = (0..pages)
        .find(|page| node.manager(*page) == nodes.count - 1)
        .ok_or_else(|| miette!("the last node manages no page"))?;
    let mut batch = 1;
    let runs = args.nodes.placings().len() as u64 * u64::from(CPUS_MAX) * Test::ALL.len() as u64;
    let millis = (args.seconds * 1000 / runs).max(1);
    // Nodes with one busy CPU, then with two.
    for cpus in 1..=CPUS_MAX {
        for (test, row) in Test::ALL.iter().zip(rows.iter_mut()) {
            let run = Run {
                test: *test,
                millis,
                first: 0,
                second,
                batch,
                nodes: nodes.count,
                cpus,
            };
            let jobs = vec![Job::Litmus(run); usize::from(nodes.count)];
            let answers = nodes.session.run_all(&jobs).map_err(|error| miette!("{error}"))?;
            let Some(JobResult::Litmus(counts)) = answers.first() else {
                bail!("node 0 answers {:?}", answers.first());
            };
            row.counts.ordinary += counts.ordinary;
            row.counts.relaxed += counts.relaxed;
            row.counts.forbidden += counts.forbidden;
            row.counts.batches += counts.batches - batch;
            batch = counts.batches;
        }
    }
    let sent = nodes.session.meter().map_err(|error| miette!("{error}"))?;
    nodes.part()?;
    Ok(sent)
}

fn report(args: &LitmusArgs, rows: &[Row], sent: Meter) -> Result<ExitCode> {
    if args.json {
        println!("{}", serde_json::to_string_pretty(rows).into_diagnostic()?);
    } else {
        println!("test                     times   only x86 allows   forbidden");
        for Row { test, counts } in rows {
            let times = counts.ordinary + counts.relaxed + counts.forbidden;
            println!(
                "{test:18} {times:11} {:17} {:11}",
                counts.relaxed, counts.forbidden
            );
        }
        let faults = sent.reads.count + sent.writes.count + sent.upgrades.count;
        println!("{faults} faults, {} pages sent", sent.pages);
    }
    if rows.iter().any(|row| row.counts.forbidden > 0) {
        eprintln!("mirrorball: the memory's order was broken: see the column of forbidden outcomes");
        return Ok(ExitCode::from(exit::FAILED));
    }
    Ok(ExitCode::SUCCESS)
}
