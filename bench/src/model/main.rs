//! What a program on one memory would gain on several hosts, by link: a model, fed with what was counted on this one.
//!
//! ```text
//! bench-model --faults dsm.json --stalls dsm-stalls.json --out FILE.json
//!             [--heat AFTER.json [--heat-before BEFORE.json] --alone SECONDS [--cpus N] [--parallel 0.86]]
//! ```
//! `--heat` is what `mirrorball heat VM --json` printed after a build, `--heat-before` what it printed before; `--alone` what the same
//! build takes on one node, `--cpus` the CPUs of each node, `--parallel` the part of the build that they do together (vNUMA, section 5.3).

mod estimate;
mod links;
mod record;
mod report;
#[cfg(test)]
mod tests;

use std::process::ExitCode;

use bench::Outcome;
use bench::options::Options;
use estimate::Build;
use record::{Heat, Measured, Stalls};
use report::Report;
use serde::de::DeserializeOwned;

const USAGE: &str = "bench-model --faults FILE --stalls FILE --out FILE \
                     [--heat FILE [--heat-before FILE] --alone SECONDS [--cpus N] [--parallel PART]]";

fn read<T: DeserializeOwned>(file: &str) -> Outcome<T> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("{file}: {error}; name a file that can be read"))?;
    Ok(serde_json::from_str(&text).map_err(|error| format!("{file}: {error}; {USAGE}"))?)
}

/// A value in a range.
fn number(name: &str, text: &str, range: std::ops::RangeInclusive<f64>) -> Outcome<f64> {
    let value: Option<f64> = text.parse().ok().filter(|value| range.contains(value));
    Ok(value.ok_or(format!(
        "--{name} {text}: say a number from {} to {}",
        range.start(),
        range.end()
    ))?)
}

fn run() -> Outcome<()> {
    let options = Options::of_process(USAGE)?;
    let faults = options.needed("faults")?;
    let costs = read::<Measured>(faults)?.costs().ok_or(format!(
        "{faults}: no run has a read fetch; `make bench-dsm` makes it"
    ))?;
    let stalls: Stalls = read(options.needed("stalls")?)?;
    let mut report = Report::of(&stalls, costs);
    if let Some(file) = options.get("heat") {
        let mut heat: Heat = read(file)?;
        if let Some(before) = options.get("heat-before") {
            heat = heat.since(&read(before)?).ok_or(format!(
                "--heat-before {before}: not of the same VM before {file}; record both again"
            ))?;
        }
        if heat.shards.len() < 2 {
            return Err(
                format!("--heat {file}: a VM of one shard waits for nobody; record one of two").into(),
            );
        }
        let build = Build {
            alone_us: number("alone", options.needed("alone")?, 1e-3..=1e6)? * 1e6,
            parallel: number("parallel", options.get("parallel").unwrap_or("0.86"), 0.0..=1.0)?,
            cpus: number("cpus", options.get("cpus").unwrap_or("1"), 1.0..=4096.0)? as u32,
        };
        report.build(&build, &heat);
    }
    std::fs::write(
        options.needed("out")?,
        serde_json::to_string_pretty(&report)? + "\n",
    )?;
    print!("{}", report.text()?);
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-model: {error}");
            ExitCode::FAILURE
        }
    }
}
