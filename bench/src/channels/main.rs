//! Speed of channels, and of their uses by cells, beside common alternatives. `bench-channels --out FILE.json
//! --machine TEXT [--runs N]`.
//!
//! All that is compared runs in turn, `runs` times, in threads or processes that are kept to the first two
//! CPUs; medians are printed. FILE.svg is drawn beside the record. A further table is one more entry of
//! [`TABLES`].

mod cells;
mod idle;
mod messages;
mod patience;
mod pinned;
mod process;
mod shootdown;

use std::path::PathBuf;
use std::process::ExitCode;

use bench::Outcome;
use bench::options::Options;
use bench::tables::{Report, Table};

const TABLES: &[Table] = &[messages::TABLE, cells::CALLS, cells::AGREEMENT, idle::TABLE];

/// Runs the other process of a measurement.
fn act(role: &str, words: &[String]) -> Outcome<()> {
    process::begin()?;
    match role {
        "ring-echo" => messages::ring::echo_role(words),
        "ring-flood" => messages::ring::flood_role(words),
        "waiting-echo" => messages::waiting::echo_role(words),
        "iceoryx-echo" => messages::iceoryx::echo_role(words),
        "iceoryx-flood" => messages::iceoryx::flood_role(words),
        "iceoryx-events" => messages::iceoryx::events_role(words),
        "socket-echo" => messages::socket::echo_role(),
        "socket-flood" => messages::socket::flood_role(),
        "callee" => cells::call::callee_role(words),
        "cell" => cells::agreement::role(words),
        "idler" => idle::role(words),
        _ => Err(format!("no role is called {role}").into()),
    }
}

fn run() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [word, role, rest @ ..] = &words[..]
        && word == process::ROLE
    {
        return act(role, rest).map_err(|error| format!("{role}: {error}").into());
    }
    let options = Options::of_process("bench-channels --out FILE.json --machine TEXT [--runs N]")?;
    let runs: usize = options.get("runs").unwrap_or("7").parse()?;
    let out = PathBuf::from(options.needed("out")?);
    let machine = options.needed("machine")?;
    let mut report = Report::new(machine, TABLES);
    for run in 1..=runs {
        eprintln!("bench-channels: run {run} of {runs}");
        report.run()?;
    }
    std::fs::write(&out, serde_json::to_string_pretty(&report)? + "\n")?;
    std::fs::write(out.with_extension("svg"), report.svg())?;
    print!("{}", report.markdown());
    Ok(())
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
