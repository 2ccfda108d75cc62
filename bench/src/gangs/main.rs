//! Two VMs of two vCPUs each on two CPUs, whose threads wait for one another: under Linux's scheduler, with
//! each vCPU on a CPU of its own (balance scheduling), and with gangs.
//! `bench-gangs --mirrorball PATH --folder NEW --out FILE.json --machine TEXT [--runs N]`.
//!
//! All kinds run in turn, `runs` times, each with a guest kernel that has paravirtual spin locks, with one
//! that has none (`nopvspin`), and in VMs that span two cells of a CPU each. The guest is the image `tiny`.
//! It needs KVM, two CPUs, and that no other VM runs.

mod kinds;
mod report;
mod sample;
mod vm;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use bench::Outcome;
use bench::mirrorball::Mirrorball;
use bench::options::Options;

use report::Report;
use sample::{Bench, Work};

fn run() -> Outcome<()> {
    let options = Options::of_process(
        "bench-gangs --mirrorball PATH --folder NEW --out FILE.json --machine TEXT [--runs N]",
    )?;
    let runs: usize = options.get("runs").unwrap_or("3").parse()?;
    let (out, machine) = (options.needed("out")?, options.needed("machine")?);
    let [folder, program] = [options.needed("folder")?, options.needed("mirrorball")?].map(Path::new);
    let bench = Bench::new(Mirrorball::new(folder, program)?)?;
    let work = calibrate(&bench)?;
    eprintln!("bench-gangs: 100 us are {work:?}");
    let mut samples = Vec::new();
    for run in 1..=runs {
        eprintln!("bench-gangs: run {run} of {runs}");
        samples.extend(take(&bench, run, work)?);
        // Finished runs are saved, should a later one fail.
        let report = Report::of(machine, work, &samples)?;
        fs::write(out, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    print!("{}", Report::of(machine, work, &samples)?.markdown()?);
    Ok(())
}

/// In emulation a nested guest dies occasionally, under any VMM: the run is repeated, with a message.
fn calibrate(bench: &Bench) -> Outcome<Work> {
    bench.calibrate().or_else(|error| {
        eprintln!("bench-gangs: the calibration failed and is repeated: {error}");
        bench.calibrate()
    })
}

/// The same for a run.
fn take(bench: &Bench, run: usize, work: Work) -> Outcome<Vec<sample::Sample>> {
    bench.take(run, work).or_else(|error| {
        eprintln!("bench-gangs: a run failed and is repeated: {error}");
        bench.take(run, work)
    })
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-gangs: {error}");
            ExitCode::FAILURE
        }
    }
}
