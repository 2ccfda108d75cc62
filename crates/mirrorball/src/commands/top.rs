//! `mirrorball top`: the use of this host's CPUs and memory by cells, VMs and vCPUs, again and again.
//!
//! [`operations::usage`] gathers the figures. On a terminal [`terminal`] shows them, and takes orders;
//! `--batch` and `--json` print each sample.

mod plain;
mod screen;
mod state;
mod table;
mod terminal;
#[cfg(test)]
mod tests;

use std::io::{ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use miette::{IntoDiagnostic, Result, miette};
use operations::usage::{Collector, Reading, Sample};

use super::execution_site::in_lab;
use crate::failed;

/// Shortest and longest time between two samples, in seconds.
const INTERVAL_S: std::ops::RangeInclusive<f64> = 0.1..=3600.0;

/// Flags of `top`.
#[derive(Debug, clap::Args)]
pub struct TopArgs {
    /// Time between two samples
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    interval: Duration,
    /// Print each sample as text instead of showing it
    #[arg(long)]
    batch: bool,
    /// Print each sample as JSON, an object a line, instead of showing it
    #[arg(long)]
    json: bool,
    /// Number of samples to print; without it, until Ctrl-C
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

fn interval(text: &str) -> std::result::Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| INTERVAL_S.contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("write {} to {} seconds", INTERVAL_S.start(), INTERVAL_S.end()))
}

/// Returns the time of the next reading, an `interval` after that of the last one. A reading that took longer
/// than that delays the next one: rates over a moment say little.
fn time_of_next(last: Instant, now: Instant, interval: Duration) -> Instant {
    let next = last + interval;
    if next > now { next } else { now + interval }
}

/// Shows or prints samples.
pub fn top(args: &TopArgs) -> Result<ExitCode> {
    let prints = args.batch || args.json;
    if !prints && args.count.is_some() {
        return Err(miette!(
            help = "add --batch or --json",
            "--count counts the samples that are printed"
        ));
    }
    let has_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    if !prints && !has_terminal {
        return Err(miette!(
            help = "--batch prints the figures as text, and --json as JSON",
            "top needs a terminal at its standard input and output"
        ));
    }
    let mut collector = Collector::open().map_err(failed)?;
    let first = collector.read().map_err(failed)?;
    if first.vms.is_empty()
        && first.cells.is_empty()
        && let Some(code) = in_lab()?
    {
        return Ok(code);
    }
    if prints {
        print(collector, first, args)
    } else {
        terminal::run(collector, first, args.interval)
    }
}

/// Prints samples, the first one an interval after the reading `before`.
fn print(mut collector: Collector, mut before: Reading, args: &TopArgs) -> Result<ExitCode> {
    let mut next = Instant::now();
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 {
        next = time_of_next(next, Instant::now(), args.interval);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let after = collector.read().map_err(failed)?;
        let sample = Sample::between(Some(&before), &after);
        let text = if args.json {
            serde_json::to_string(&sample).into_diagnostic()? + "\n"
        } else {
            plain::text(&sample)
        };
        let mut output = std::io::stdout().lock();
        match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
            // The reader has seen enough, as with `| head`.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
            printed => printed.into_diagnostic()?,
        }
        before = after;
        left -= 1;
    }
    Ok(ExitCode::SUCCESS)
}
