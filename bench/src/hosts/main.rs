//! Times of clusters: until all agree that a host is dead whose processes were killed or stopped; until a VM
//! has its place, by each transport between cells; and until it has one with memory of another cell.
//! `bench-hosts --mirrorball PATH --out FILE.json --machine TEXT [--runs N]`.
//!
//! Hosts are sets of processes on the loopback of this machine, each with a runtime directory of its own;
//! etcd is real. Nothing runs in a lab, whose hosts stand still occasionally for longer than the measured
//! times.

mod cluster;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::options::Options;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use registry::cluster::interface::{AdmitVm, CellRequest, CellResponse, VmShare};
use serde::Serialize;

use cluster::{Cluster, Way};

/// Limit of any wait.
const LIMIT: Duration = Duration::from_secs(60);
/// Number of places requested in a run.
const PLACES: usize = 200;
/// Number of loans in a run.
const LOANS: usize = 50;
/// Amount of each, in bytes (Cellular Disco, SOSP '99, section 5.2: 758 us).
const LOAN_BYTES: u64 = 4 << 20;
/// Silence after which a host counts as dead, where its death is measured.
const SILENCE_MS: u64 = 200;
/// The same where no host dies: this machine may stop for a while.
const LONG_SILENCE_MS: u64 = 10_000;
/// Number of tries of a sample. This machine may stop a host for longer than the allowed silence, so that it
/// is taken for dead.
const TRIES: usize = 5;

/// Samples of one figure, milliseconds for deaths and microseconds for places.
#[derive(Serialize)]
struct Row {
    what: String,
    unit: &'static str,
    samples: Vec<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: &'a str,
    silence_ms: u64,
    rows: &'a [Row],
}

fn run() -> Outcome<()> {
    let options =
        Options::of_process("bench-hosts --mirrorball PATH --out FILE.json --machine TEXT [--runs N]")?;
    let runs: usize = options.get("runs").unwrap_or("5").parse()?;
    let (program, out, machine) = (
        Path::new(options.needed("mirrorball")?),
        options.needed("out")?,
        options.needed("machine")?,
    );
    let mut rows = Vec::new();
    for way in Way::ALL {
        let mut samples = Vec::new();
        for _ in 0..runs {
            samples.push(sample(|| {
                place_us(&Cluster::up(program, way, 2, LONG_SILENCE_MS)?)
            })?);
        }
        rows.push(Row {
            what: format!("a VM's place, two cells, {way}"),
            unit: "us",
            samples,
        });
    }
    let mut samples = Vec::new();
    for _ in 0..runs {
        samples.push(sample(|| {
            loan_us(&Cluster::up(program, Way::Ring, 2, LONG_SILENCE_MS)?)
        })?);
    }
    rows.push(Row {
        what: format!(
            "the same with {} MiB borrowed for it, {}",
            LOAN_BYTES >> 20,
            Way::Ring
        ),
        unit: "us",
        samples,
    });
    for (what, signal) in [
        ("a host falls silent", Signal::SIGSTOP),
        ("a host's processes are killed", Signal::SIGKILL),
    ] {
        let mut samples = Vec::new();
        for _ in 0..runs {
            samples.push(sample(|| {
                agreed_ms(&Cluster::up(program, Way::Tls, 3, SILENCE_MS)?, signal)
            })?);
        }
        rows.push(Row {
            what: format!("{what}, until the two others agree"),
            unit: "ms",
            samples,
        });
    }
    let report = Report {
        machine,
        silence_ms: SILENCE_MS,
        rows: &rows,
    };
    std::fs::write(out, serde_json::to_string_pretty(&report)? + "\n")?;
    println!("{machine}; silence_ms = {}\n", SILENCE_MS);
    println!("| | median | least | most |\n| --- | --- | --- | --- |");
    for row in &rows {
        let mut sorted = row.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let [least, median, most] = [0, sorted.len() / 2, sorted.len() - 1].map(|at| sorted[at]);
        println!(
            "| {} | {median:.0} {unit} | {least:.0} | {most:.0} |",
            row.what,
            unit = row.unit
        );
    }
    Ok(())
}

fn sample(take: impl Fn() -> Outcome<f64>) -> Outcome<f64> {
    for _ in 1..TRIES {
        match take() {
            Ok(sample) => return Ok(sample),
            Err(error) => eprintln!("bench-hosts: a run failed and is repeated: {error}"),
        }
    }
    take()
}

/// A VM of the first cell.
fn vm(number: usize, memory_bytes: u64) -> AdmitVm {
    AdmitVm {
        only: Some(0),
        ..AdmitVm::new(
            format!("vm{number}"),
            VmShare {
                vcpus: 1,
                memory_bytes,
                ..VmShare::default()
            },
        )
    }
}

/// Time until a VM has its place in the first cell: the median, microseconds.
fn place_us(cluster: &Cluster) -> Outcome<f64> {
    let mut waits = Vec::new();
    for number in 0..PLACES {
        // By then all cells have received the last one's end.
        std::thread::sleep(Duration::from_millis(1));
        let mut connection = cluster.connect(0)?;
        let host = vm(number, 64 << 20);
        let start = Instant::now();
        match connection.ask(&CellRequest::AdmitVm(host))? {
            CellResponse::Hosted(_) => waits.push(start.elapsed().as_secs_f64() * 1e6),
            other => return Err(format!("no place: {other:?}").into()),
        }
    }
    waits.sort_by(f64::total_cmp);
    Ok(waits[waits.len() / 2])
}

/// Time until a VM has its place in the first cell that needs a loan of [`LOAN_BYTES`]: the median,
/// microseconds.
fn loan_us(cluster: &Cluster) -> Outcome<f64> {
    let mut waits = Vec::new();
    for number in 0..LOANS {
        let own_bytes = without_loans(cluster)?;
        let mut connection = cluster.connect(0)?;
        let host = vm(number, own_bytes + LOAN_BYTES);
        let start = Instant::now();
        match connection.ask(&CellRequest::AdmitVm(host))? {
            CellResponse::Hosted(place) if place.borrowed.iter().any(|part| part.bytes == LOAN_BYTES) => {
                waits.push(start.elapsed().as_secs_f64() * 1e6);
            }
            other => return Err(format!("no loan: {other:?}").into()),
        }
    }
    waits.sort_by(f64::total_cmp);
    Ok(waits[waits.len() / 2])
}

/// Waits until no cell has borrowed. Returns the memory of the first cell, in bytes.
fn without_loans(cluster: &Cluster) -> Outcome<u64> {
    let start = Instant::now();
    loop {
        let CellResponse::Status(status) = cluster.connect(0)?.ask(&CellRequest::Status)? else {
            return Err("a cell does not report its state".into());
        };
        let first = status.cells.first().ok_or("no cells")?;
        if first.vms.is_empty() && status.cells.iter().all(|cell| cell.lent.is_empty()) {
            return Ok(first.plan.memory_bytes);
        }
        if start.elapsed() > LIMIT {
            return Err(format!("loans are not returned\n{}", cluster.logs()).into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Time from the end of the last host until both others have noticed it, milliseconds.
fn agreed_ms(cluster: &Cluster, signal: Signal) -> Outcome<f64> {
    let processes = cluster.processes(2)?;
    let mut others = [cluster.connect(0)?, cluster.connect(1)?];
    let start = Instant::now();
    for process in processes {
        kill(Pid::from_raw(process.try_into()?), signal)?;
    }
    for connection in &mut others {
        while cluster::lives(connection, 2)? {
            if start.elapsed() > LIMIT {
                return Err(format!("no cell notices the end of a host\n{}", cluster.logs()).into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-hosts: {error}");
            ExitCode::FAILURE
        }
    }
}
