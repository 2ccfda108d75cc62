//! How fast one guest reads, twice: from the host's disk or page cache, then again when the host has it in memory.

use serde::Serialize;

use crate::guests::{Guests, Read};
use crate::kinds::Kind;
use crate::measure::Runtime;
use crate::{Options, Outcome, host, stage};

const READ_MB: f64 = (150 << 20) as f64 / 1e6;

#[derive(Serialize)]
struct Row {
    kind: String,
    /// Of the reads in MB (10^6 bytes) per second, the host's page cache dropped before.
    cold_mb_s: Vec<f64>,
    /// The same, read again by the guest that has just forgotten it.
    warm_mb_s: Vec<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: &'a str,
    rows: &'a [Row],
}

/// Times all kinds in turn, `runs` times; prints medians and writes the JSON.
pub fn speed(options: &Options) -> Outcome<()> {
    let runtime = Runtime::new()?;
    let mut rows: Vec<Row> = options
        .kinds
        .iter()
        .map(|kind| Row {
            kind: kind.name(),
            cold_mb_s: Vec::new(),
            warm_mb_s: Vec::new(),
        })
        .collect();
    for run in 0..options.runs {
        for (kind, row) in options.kinds.iter().zip(&mut rows) {
            let read = one(kind, options, &runtime)?;
            let again_s = read.again_s.ok_or("the guest has not read again")?;
            row.cold_mb_s.push(READ_MB / read.first_s);
            row.warm_mb_s.push(READ_MB / again_s);
            eprintln!(
                "bench-sharing: run {run}, {}: {:.0} MB/s, then {:.0} MB/s",
                row.kind,
                READ_MB / read.first_s,
                READ_MB / again_s
            );
        }
        let report = Report {
            machine: &options.machine,
            rows: &rows,
        };
        std::fs::write(&options.out, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    println!(
        "{}\n\n| reads of 150 MiB, MB/s | cold | warm |\n| --- | --- | --- |",
        options.machine
    );
    for row in &rows {
        println!(
            "| {} | {:.0} | {:.0} |",
            row.kind,
            median(&row.cold_mb_s),
            median(&row.warm_mb_s)
        );
    }
    Ok(())
}

fn one(kind: &Kind, options: &Options, runtime: &Runtime) -> Outcome<Read> {
    host::drop_caches(true)?;
    let files = stage::files(&options.folder);
    let mut guests = Guests::start(kind, 1, &files, &options.mirrorball, &runtime.folder, "again")?;
    guests.wait()?.first().copied().ok_or_else(|| "no answer".into())
}

/// The lower one of two in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
        .get(sorted.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(f64::NAN)
}
