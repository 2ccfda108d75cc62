//! The programs that `bench-cluster` runs in guests.
//! `bench-cluster-guest --program calibrate` prints how much of each a CPU does in a second, as JSON.
//! `bench-cluster-guest --program rows --mib N --operations N --hot-percent N --passes N [--rounds N]` is
//! like a database: it reads and updates pages of a table in a random order.
//! `bench-cluster-guest --program rays --threads N --lines N` computes an image by tracing rays.
//! Each prepares its work, and prints `READY`. After a line of input it works, prints its times as JSON,
//! and ends with its input.

mod rays;
mod rows;

use std::io::{BufRead, Read};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::options::Options;
use serde_json::{Value, json};

use rays::trace_lines;
use rows::{Access, Table};

const USAGE: &str = "bench-cluster-guest --program calibrate|rows|rays [--mib N --operations N \
                     --hot-percent N --passes N --rounds N] [--threads N --lines N]";
/// Least time of a calibration.
const CALIBRATION: Duration = Duration::from_secs(1);
/// Table of a calibration, MiB: more than caches have.
const CALIBRATION_MIB: usize = 16;

fn run() -> Outcome<()> {
    let options = Options::of_process(USAGE)?;
    let number = |name: &str| -> Outcome<usize> { Ok(options.needed(name)?.parse()?) };
    match options.needed("program")? {
        "calibrate" => {
            println!("{}", calibrate(number("passes")?)?);
            Ok(())
        }
        "rows" => {
            let mut table = Table::new(number("mib")? << 20);
            let access = Access {
                hot_percent: number("hot-percent")?,
                passes: number("passes")?,
            };
            let (operations, rounds) = (number("operations")?, number("rounds").unwrap_or(1));
            work(|| {
                let mut seconds = Vec::new();
                for _ in 0..rounds {
                    let start = Instant::now();
                    table.work(operations, access)?;
                    seconds.push(start.elapsed().as_secs_f64());
                }
                table.check()?;
                Ok(json!({ "seconds": seconds }))
            })
        }
        "rays" => {
            let (threads, lines) = (number("threads")?, number("lines")?);
            work(|| {
                let start = Instant::now();
                let image = trace_lines(lines, threads);
                Ok(json!({ "seconds": [start.elapsed().as_secs_f64()], "image": image }))
            })
        }
        _ => Err(USAGE.into()),
    }
}

/// Waits for the start, prints the result of `program`, and waits for the end.
fn work(program: impl FnOnce() -> Outcome<Value>) -> Outcome<()> {
    let mut input = std::io::stdin().lock();
    println!("READY");
    if input.read_line(&mut String::new())? == 0 {
        return Err("the input ended before the start".into());
    }
    println!("{}", program()?);
    input.read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The work of one CPU in a second.
fn calibrate(passes: usize) -> Outcome<Value> {
    let mut table = Table::new(CALIBRATION_MIB << 20);
    let access = Access {
        hot_percent: 50,
        passes,
    };
    let operations = rate(|amount| Ok(table.work(amount, access)?))?;
    let lines = rate(|amount| {
        std::hint::black_box(trace_lines(amount, 1));
        Ok(())
    })?;
    Ok(json!({ "operations_each_second": operations, "lines_each_second": lines }))
}

/// The amount of `work` that takes a second; at least 1.
fn rate(mut work: impl FnMut(usize) -> Outcome<()>) -> Outcome<usize> {
    let mut amount = 1;
    loop {
        let start = Instant::now();
        work(amount)?;
        let time = start.elapsed();
        if time >= CALIBRATION {
            return Ok(((amount as f64 / time.as_secs_f64()) as usize).max(1));
        }
        amount = amount.saturating_mul(2);
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-cluster-guest: {error}");
            ExitCode::FAILURE
        }
    }
}
