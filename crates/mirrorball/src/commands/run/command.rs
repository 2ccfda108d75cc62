//! Runs a command in a guest until it ends or fails.

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use hostinfo::memory_use::{VmMemory, read_one};
use miette::Report;
use registry::vms::Registry;

use crate::{exit, guest, progress};

/// A command that ran in a guest.
pub(super) struct CommandOutcome {
    pub status: u8,
    pub seconds: f64,
    pub last_line: String,
    /// Host memory of its VM at that time.
    pub memory: Option<Box<VmMemory>>,
}

/// Reason why a command did not finish.
pub(super) struct CommandFailure {
    /// Resulting exit status.
    pub status: u8,
    pub report: Report,
}

/// Runs a command in a guest: with this process's terminal when it is the only VM, else with its output in
/// lines that start with the VM's name.
pub(super) fn command(
    name: &str,
    folder: &Path,
    argv: &[String],
    limit: Duration,
    alone: bool,
) -> Result<CommandOutcome, CommandFailure> {
    // Several VMs report by their lines.
    let bar = (alone && std::io::stderr().is_terminal()).then(|| progress::spinner("the guest starts"));
    let connected = guest::connect(name, folder, limit);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let stream = connected.map_err(|report| CommandFailure {
        status: exit::LIMIT,
        report,
    })?;
    let start = Instant::now();
    let request = guest::request(argv, alone && std::io::stdin().is_terminal());
    let explain = |error| CommandFailure {
        status: exit::FAILED,
        report: guest::explain(name, error),
    };
    if alone {
        let status = agent::client::exec(stream, &request).map_err(explain)?.code();
        return Ok(CommandOutcome {
            status,
            seconds: start.elapsed().as_secs_f64(),
            last_line: String::new(),
            memory: None,
        });
    }
    let (status, out, err) = agent::client::output(stream, &request, &[]).map_err(explain)?;
    let seconds = start.elapsed().as_secs_f64();
    let (out, err) = (printable(&out), printable(&err));
    out.lines().for_each(|line| println!("{name} | {line}"));
    err.lines().for_each(|line| eprintln!("{name} | {line}"));
    let last_line = out.lines().last().unwrap_or_default().to_owned();
    Ok(CommandOutcome {
        status: status.code(),
        seconds,
        last_line,
        memory: memory(name),
    })
}

/// Returns the host memory that a running VM uses; none when this user may not read it.
fn memory(name: &str) -> Option<Box<VmMemory>> {
    let running = Registry::open().and_then(|registry| registry.list()).ok()?;
    let record = running.iter().find(|record| record.name == name)?;
    read_one(record, &running).map(Box::new)
}

/// Returns a guest's text without terminal control characters.
fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .filter(|&c| c == '\n' || c == '\t' || !c.is_control())
        .collect()
}
