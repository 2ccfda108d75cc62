//! A VM of four vCPUs in one shard with the kernel's interrupt chip, in one with our interrupt controllers,
//! and in two. `bench-span --mirrorball PATH --source FILE.tar --folder NEW --out FILE.json --machine TEXT
//! [--runs N]`.
//!
//! All kinds run in turn, `runs` times, on the same CPUs: the host is one cell for a VM of one shard, and two
//! for one of two. The guest is the image `debian-12` with gcc and make. It needs KVM, root for KVM's own
//! counts, and that no other VM runs.

mod environment;
mod exits;
mod kinds;
mod report;
mod sample;
mod vm;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use bench::Outcome;
use bench::options::Options;

use environment::Environment;
use kinds::Kind;
use report::Report;
use sample::{Sample, take};

fn run() -> Outcome<()> {
    let options = Options::of_process(
        "bench-span --mirrorball PATH --source FILE.tar --folder NEW --out FILE.json --machine TEXT \
         [--runs N]",
    )?;
    let runs: usize = options.get("runs").unwrap_or("3").parse()?;
    let (out, machine) = (options.needed("out")?, options.needed("machine")?);
    let [folder, mirrorball, source] = [
        options.needed("folder")?,
        options.needed("mirrorball")?,
        options.needed("source")?,
    ]
    .map(Path::new);
    let environment = Environment::new(folder, mirrorball, source)?;
    // Not counted: the first guest of a host is slower than all others.
    sample::boot(&environment, Kind::Plain)?;
    let mut round_trips_us = Vec::new();
    let mut samples = Kind::ALL.map(|_| Vec::new());
    for run in 1..=runs {
        round_trips_us.push(environment.channel_round_trip_us()?);
        for (kind, list) in Kind::ALL.into_iter().zip(&mut samples) {
            eprintln!("bench-span: run {run} of {runs}, {}", kind.name());
            list.push(sample(&environment, kind)?);
        }
        // Finished runs are saved, should a later one fail.
        let report = Report::of(machine, &samples, &round_trips_us)?;
        fs::write(out, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    print!("{}", Report::of(machine, &samples, &round_trips_us)?.markdown()?);
    Ok(())
}

/// Takes a sample. In emulation a nested guest dies occasionally, under any VMM. The sample is then taken
/// again, with a message.
fn sample(environment: &Environment, kind: Kind) -> Outcome<Sample> {
    take(environment, kind).or_else(|error| {
        eprintln!("bench-span: {} failed and is repeated: {error}", kind.name());
        take(environment, kind)
    })
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-span: {error}");
            ExitCode::FAILURE
        }
    }
}
