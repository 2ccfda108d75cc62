//! How fast channels are, beside what people use instead: one message there and one back between two CPUs, and messages one
//! way as fast as they go. `bench-channels --out FILE.json --machine TEXT [--runs N]`.
//!
//! All run in turn, `runs` times; medians are printed. The measure of all is two CPUs that hand one cache line to and fro.

mod peers;
mod pinned;

use std::collections::HashMap;
use std::process::ExitCode;

use serde::Serialize;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

#[derive(Serialize)]
struct Row {
    what: &'static str,
    /// A message there and one back, nanoseconds, each run.
    round_trip_ns: Vec<f64>,
    /// Messages one way per second, each run. None where that makes no sense.
    per_second: Vec<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: &'a str,
    rows: &'a [Row],
}

fn run() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == "echo") {
        return peers::echo();
    }
    let mut values: HashMap<&str, &str> = HashMap::new();
    for pair in words.chunks(2) {
        let [name, value] = pair else {
            return Err("bench-channels --out FILE.json --machine TEXT [--runs N]".into());
        };
        values.insert(name.trim_start_matches('-'), value);
    }
    let runs: usize = values.get("runs").unwrap_or(&"7").parse()?;
    let out = values.get("out").ok_or("--out is missing")?;
    let machine = values.get("machine").ok_or("--machine is missing")?;
    let mut rows: Vec<Row> = peers::ALL
        .iter()
        .map(|peer| Row {
            what: peer.what,
            round_trip_ns: Vec::new(),
            per_second: Vec::new(),
        })
        .collect();
    for _ in 0..runs {
        for (peer, row) in peers::ALL.iter().zip(&mut rows) {
            row.round_trip_ns.push((peer.round_trip)()?);
            if let Some(one_way) = peer.one_way {
                row.per_second.push(one_way()?);
            }
        }
    }
    std::fs::write(
        out,
        serde_json::to_string_pretty(&Report { machine, rows: &rows })? + "\n",
    )?;
    print(machine, &rows);
    Ok(())
}

fn print(machine: &str, rows: &[Row]) {
    let bare = rows.first().map_or(f64::NAN, |row| median(&row.round_trip_ns));
    println!(
        "{machine}\n\n| | round trip, ns | of bare | messages per second, million |\n| --- | --- | --- | --- |"
    );
    for row in rows {
        let trip = median(&row.round_trip_ns);
        let flow = if row.per_second.is_empty() {
            String::new()
        } else {
            format!("{:.1}", median(&row.per_second) / 1e6)
        };
        println!("| {} | {trip:.0} | {:.2} | {flow} |", row.what, trip / bare);
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-channels: {error}");
            ExitCode::FAILURE
        }
    }
}
