//! Ways to have a CPU run the vCPU that a monitor chose: time until it runs, the share of the one that waits,
//! the cost of the choice, and the share that an ordinary program keeps on the same CPU.
//! `bench-gates --out FILE.json --machine TEXT [--switches N]`.
//!
//! Two threads compute on one CPU, and the first thread, on another CPU, chooses one of them in turns, as a
//! CPU driver does each time slice. The threads stand for vCPUs: a kick interrupts them as it does a guest,
//! without the exit from the guest.

mod gate;
mod spinner;

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::options::Options;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::Serialize;

use gate::Gate;
use spinner::Spinner;

/// Time slice between two switches: the tick of Cellular Disco (section 4.2).
const SLICE: Duration = Duration::from_millis(10);
/// Limit of the wait for a chosen thread. A thread that has not run by then counts with this time.
const RUNS_LIMIT: Duration = Duration::from_millis(100);

#[derive(Serialize)]
struct Row {
    what: String,
    /// Time from the choice until the chosen thread runs, microseconds.
    median_us: f64,
    p99_us: f64,
    /// Time of the call itself, microseconds.
    call_us: f64,
    /// CPU time of the thread that waits, of all that the two had, percent.
    waiting_percent: f64,
    /// Share of the CPU that an ordinary program has beside them, percent. It deserves 50 beside one thread
    /// of the VMs.
    other_percent: f64,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: &'a str,
    slice_ms: u128,
    switches: usize,
    rows: &'a [Row],
    /// Ways that this process may not use, with the reason.
    refused: &'a [String],
}

fn run() -> Outcome<()> {
    let options = Options::of_process("bench-gates --out FILE.json --machine TEXT [--switches N]")?;
    let switches: usize = options.get("switches").unwrap_or("300").parse()?;
    let (out, machine) = (options.needed("out")?, options.needed("machine")?);
    // One CPU chooses, and the other one computes.
    let (own, shared) = bench::cpu::two()?;
    let (mut rows, mut refused) = (Vec::new(), Vec::new());
    for gate in Gate::ALL {
        match measure(gate, own, shared, switches) {
            Ok(row) => {
                println!(
                    "{:34} runs after {:8.1} us (p99 {:8.1}), call {:5.1} us, waiting {:5.2}%, other {:5.1}%",
                    row.what, row.median_us, row.p99_us, row.call_us, row.waiting_percent, row.other_percent
                );
                rows.push(row);
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                println!("{gate:34} {error}");
                refused.push(format!("{gate}: {error}"));
            }
            Err(error) => return Err(error.into()),
        }
    }
    let report = Report {
        machine,
        slice_ms: SLICE.as_millis(),
        switches,
        rows: &rows,
        refused: &refused,
    };
    std::fs::write(Path::new(out), serde_json::to_string_pretty(&report)? + "\n")?;
    Ok(())
}

fn measure(gate: Gate, own: usize, shared: usize, switches: usize) -> io::Result<Row> {
    let mut set = CpuSet::new();
    set.set(own)?;
    sched_setaffinity(Pid::from_raw(0), &set)?;
    let pair = [Spinner::start(shared)?, Spinner::start(shared)?];
    let mut runs_after = Vec::with_capacity(switches);
    let (mut calls, mut waiting_time) = (Duration::ZERO, Duration::ZERO);
    let before = pair[0].cpu_time()? + pair[1].cpu_time()?;
    for turn in 0..switches {
        let (chosen, waiting) = (&pair[turn % 2], &pair[(turn + 1) % 2]);
        let (waited_before, progress, begin) = (waiting.cpu_time()?, chosen.progress(), Instant::now());
        gate.choose(chosen, waiting)?;
        calls += begin.elapsed();
        while chosen.progress() == progress && begin.elapsed() < RUNS_LIMIT {
            std::hint::spin_loop();
        }
        runs_after.push(begin.elapsed());
        std::thread::sleep(SLICE.saturating_sub(begin.elapsed()));
        waiting_time += waiting.cpu_time()?.saturating_sub(waited_before);
    }
    let total = pair[0].cpu_time()? + pair[1].cpu_time()? - before;
    // An ordinary program comes to the same CPU.
    let other = Spinner::start(shared)?;
    let (other_before, begin) = (other.cpu_time()?, Instant::now());
    for turn in 0..switches {
        gate.choose(&pair[turn % 2], &pair[(turn + 1) % 2])?;
        std::thread::sleep(SLICE);
    }
    let other_time = other.cpu_time()? - other_before;
    runs_after.sort_unstable();
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let at = |rank: usize| us(runs_after[rank.min(switches - 1)]);
    Ok(Row {
        what: gate.to_string(),
        median_us: at(switches / 2),
        p99_us: at(switches * 99 / 100),
        call_us: us(calls) / switches as f64,
        waiting_percent: 100.0 * waiting_time.as_secs_f64() / total.as_secs_f64(),
        other_percent: 100.0 * other_time.as_secs_f64() / begin.elapsed().as_secs_f64(),
    })
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-gates: {error}");
            ExitCode::FAILURE
        }
    }
}
