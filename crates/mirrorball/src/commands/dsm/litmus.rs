//! `mirrorball dsm litmus`: memory order between threads of different nodes.

use std::process::ExitCode;

use clap::Args;
use dsm::work::litmus::{PAGES, Run, Tally, Test};
use dsm::work::{Answer, Job};
use miette::{IntoDiagnostic, Result, bail, miette};
use serde::Serialize;

use super::nodes::NodesArgs;
use crate::exit;

/// How to look.
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
    tally: Tally,
}

/// Runs all tests in turn, several times; fails if one shows what is forbidden.
pub fn litmus(args: &LitmusArgs) -> Result<ExitCode> {
    /// Turns, so that every test meets different moments of the host.
    const TURNS: u64 = 4;
    let nodes = args.nodes.start(4 * PAGES * u32::from(dsm::LANES_MAX))?;
    let node = nodes.session.node();
    let pages = node.bytes() as u32 / dsm::PAGE_BYTES as u32;
    // The first page of the last node's, so that the variables have different managers.
    let second = (0..pages)
        .find(|page| node.home(*page) == nodes.count - 1)
        .ok_or_else(|| miette!("the last node manages no page"))?;
    let mut rows: Vec<Row> = Test::ALL
        .iter()
        .map(|test| Row {
            test: test.name(),
            tally: Tally::default(),
        })
        .collect();
    let mut batch = 1;
    let millis = (args.seconds * 1000 / (TURNS * Test::ALL.len() as u64)).max(1);
    for _ in 0..TURNS {
        for (test, row) in Test::ALL.iter().zip(&mut rows) {
            let run = Run {
                test: *test,
                millis,
                first: 0,
                second,
                batch,
                nodes: nodes.count,
            };
            let jobs = vec![Job::Litmus(run); usize::from(nodes.count)];
            let answers = nodes.session.all(&jobs).map_err(|error| miette!("{error}"))?;
            let Some(Answer::Litmus(tally)) = answers.first() else {
                bail!("node 0 answers {:?}", answers.first());
            };
            row.tally.ordinary += tally.ordinary;
            row.tally.relaxed += tally.relaxed;
            row.tally.forbidden += tally.forbidden;
            row.tally.batches += tally.batches - batch;
            batch = tally.batches;
        }
    }
    let sent = nodes.session.meter().map_err(|error| miette!("{error}"))?;
    nodes.part()?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rows).into_diagnostic()?);
    } else {
        println!("test                     times   only x86 allows   forbidden");
        for Row { test, tally } in &rows {
            let times = tally.ordinary + tally.relaxed + tally.forbidden;
            println!("{test:18} {times:11} {:17} {:11}", tally.relaxed, tally.forbidden);
        }
        let faults = sent.reads.count + sent.writes.count + sent.upgrades.count;
        println!("{faults} faults, {} pages sent", sent.pages);
    }
    if rows.iter().any(|row| row.tally.forbidden > 0) {
        eprintln!("mirrorball: the memory's order was broken: see the column of forbidden outcomes");
        return Ok(ExitCode::from(exit::FAILED));
    }
    Ok(ExitCode::SUCCESS)
}
