//! Model of a program's gain on several hosts with one memory, by link, from counts on this host.
//!
//! ```text
//! bench-model --faults dsm.json --stalls dsm-stalls.json [--builds dsm-compile.json] --out FILE.json
//! ```
//! `--builds` is the record of `scripts/bench-compile.sh` on builds in VMs over several nodes.

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
use record::{Builds, Measured, Stalls};
use report::Report;
use serde::de::DeserializeOwned;

const USAGE: &str = "bench-model --faults FILE --stalls FILE [--builds FILE] --out FILE";

fn read<T: DeserializeOwned>(file: &str) -> Outcome<T> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("{file}: {error}; name a file that can be read"))?;
    Ok(serde_json::from_str(&text).map_err(|error| format!("{file}: {error}; {USAGE}"))?)
}

fn run() -> Outcome<()> {
    let options = Options::of_process(USAGE)?;
    let faults = options.needed("faults")?;
    let costs = read::<Measured>(faults)?.costs().ok_or(format!(
        "{faults}: no run has a read fetch; `make bench-dsm` makes it"
    ))?;
    let stalls: Stalls = read(options.needed("stalls")?)?;
    let mut report = Report::of(&stalls, costs);
    if let Some(file) = options.get("builds") {
        let builds: Builds = read(file)?;
        for (recorded, heat) in builds.each().map_err(|error| format!("{file}: {error}"))? {
            report.build(&Build::of(&builds, recorded), &heat);
        }
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
