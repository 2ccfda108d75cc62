//! Programs on one memory for two processes, beside the same programs with MPI: speed and messages.
//! `bench-mpi --mirrorball PATH --programs FOLDER --out FILE.json [--rounds N]`, where FOLDER has the
//! programs that `mpicc` made of `bench/mpi`.
//!
//! In each round all of them run once, one after the other. All must give the same result.

mod figures;

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::options::Options;
use figures::{Figures, Sample, Way};
use serde::Deserialize;

/// Time limit of one run.
const LIMIT: Duration = Duration::from_secs(120);

/// The used part of the output of `mirrorball dsm bench --kernels --json`.
#[derive(Deserialize)]
struct Ours {
    programs: Vec<OurProgram>,
}

#[derive(Deserialize)]
struct OurProgram {
    kernel: String,
    size: u32,
    sum: String,
    one_node_ms: f64,
    all_nodes_ms: f64,
    messages: f64,
    megabytes: f64,
}

/// Output of a program of `bench/mpi`.
#[derive(Deserialize)]
struct Theirs {
    kernel: String,
    size: u32,
    ms: f64,
    sum: String,
    messages: f64,
    bytes: f64,
}

/// Waits for a program, and ends it when it takes too long; returns its output.
fn output_of(command: &mut Command) -> Outcome<String> {
    let shown = format!("{command:?}");
    let mut child = command.stdout(std::process::Stdio::piped()).spawn()?;
    let end = Instant::now() + LIMIT;
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            return Err(format!("{shown}: no end after {} s", LIMIT.as_secs()).into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        return Err(format!("{shown}: {}", output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn ours(program: &Path, figures: &mut Figures) -> Outcome<()> {
    let mut command = Command::new(program);
    command.args(["dsm", "bench", "--kernels", "--large", "--rounds", "1", "--json"]);
    let ours: Ours = serde_json::from_str(&output_of(&mut command)?)?;
    for program in ours.programs {
        let name = (program.kernel.as_str(), program.size, program.sum.as_str());
        let alone = Sample {
            ms: program.one_node_ms,
            messages: 0.0,
            bytes: 0.0,
        };
        let together = Sample {
            ms: program.all_nodes_ms,
            messages: program.messages,
            bytes: program.megabytes * 1e6,
        };
        figures.add(name, Way::OneNode, alone)?;
        figures.add(name, Way::TwoNodes, together)?;
    }
    Ok(())
}

fn theirs(folder: &Path, file: &str, size: u32, figures: &mut Figures) -> Outcome<()> {
    for (way, ranks, channels) in [
        (Way::OneRank, "1", "self"),
        (Way::TwoRanksTcp, "2", "tcp,self"),
        (Way::TwoRanksMemory, "2", "vader,self"),
    ] {
        let mut command = Command::new("mpirun");
        // MPI refuses root by default. No other transport is tried, whatever this machine has.
        command.args([
            "--allow-run-as-root",
            "--oversubscribe",
            "-n",
            ranks,
            "--mca",
            "pml",
            "ob1",
            "--mca",
            "btl",
            channels,
        ]);
        // Both are of this host: streams go by its loopback, as ours do.
        command.args(["--mca", "btl_tcp_if_include", "lo"]);
        command.arg(folder.join(file)).arg(size.to_string());
        let told: Theirs = serde_json::from_str(&output_of(&mut command)?)?;
        let sample = Sample {
            ms: told.ms,
            messages: told.messages,
            bytes: told.bytes,
        };
        figures.add((&told.kernel, told.size, &told.sum), way, sample)?;
    }
    Ok(())
}

fn run() -> Outcome<()> {
    const USAGE: &str = "bench-mpi --mirrorball PATH --programs FOLDER --out FILE.json [--rounds N]";
    let options = Options::of_process(USAGE)?;
    let (mirrorball, programs) = (
        Path::new(options.needed("mirrorball")?),
        Path::new(options.needed("programs")?),
    );
    let rounds: usize = options.get("rounds").unwrap_or("5").parse()?;
    let mut figures = Figures::default();
    for round in 1..=rounds {
        eprintln!("programs, round {round} of {rounds}");
        ours(mirrorball, &mut figures)?;
        for (file, kernel) in [
            ("sor", "SOR"),
            ("sort", "integer sort"),
            ("matrix", "matrix product"),
            ("tsp", "TSP"),
        ] {
            let size = figures
                .size(kernel)
                .ok_or(format!("mirrorball does not run {kernel}"))?;
            theirs(programs, file, size, &mut figures)?;
        }
    }
    std::fs::write(
        options.needed("out")?,
        serde_json::to_string_pretty(&figures.told()?)? + "\n",
    )?;
    print!("{}", figures.text()?);
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-mpi: {error}");
            ExitCode::FAILURE
        }
    }
}
