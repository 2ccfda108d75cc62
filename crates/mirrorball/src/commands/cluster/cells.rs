//! The cells of this host, as subcommands find them.

use std::io;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use config::cluster::CellPlan;
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client::Connection;
use registry::cluster::files::{CellFiles, Files};
use registry::cluster::interface::{CellRequest, CellResponse};

use crate::commands::execution_site::in_lab;

/// Changes a cell's loans.
pub(super) fn loan(act: impl FnOnce() -> std::result::Result<(), operations::Failure>) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    if let ControlFlow::Break(code) = cells_here(&files)? {
        return Ok(code);
    }
    act().map(|()| ExitCode::SUCCESS).map_err(crate::failed)
}

/// Moves the memory of a shared region to that of a cell of this host.
pub fn move_region(region: &str, to: u16) -> Result<ExitCode> {
    loan(|| {
        let moved = operations::regions::move_region(region, to)?;
        println!("{}", moved_line(region, to, moved.moved_bytes));
        for (vm, why) in moved.not_recorded {
            eprintln!(
                "mirrorball: VM {vm} still counts as depending on the region's former cells: {why}; help: \
                 give the command again"
            );
        }
        Ok(())
    })
}

fn moved_line(region: &str, to: u16, moved_bytes: u64) -> String {
    let moved = match moved_bytes {
        0 => "no page had to move".to_owned(),
        _ => format!("{} of pages moved", config::Size(moved_bytes)),
    };
    format!("shared region {region} has the memory of cell {to}; {moved}")
}

/// Returns the cells of this host. Without a cluster here, the same command runs in the lab, if one is up;
/// returns its exit status then.
pub(super) fn cells_here(files: &Files) -> Result<ControlFlow<ExitCode, Vec<CellPlan>>> {
    let plan = files.plan().into_diagnostic()?;
    if !plan.is_empty() {
        return Ok(ControlFlow::Continue(plan));
    }
    in_lab()?.map_or_else(|| Err(no_cluster()), |code| Ok(ControlFlow::Break(code)))
}

/// Repeats a request until the cell has carried it out, or no longer needs to (`is_over`).
///
/// # Errors
/// The reason of the last attempt, after `limit`.
pub(super) fn repeat_until_done(
    cell: &CellFiles,
    request: &CellRequest,
    limit: Duration,
    interval: Duration,
    is_over: impl Fn(&CellFiles) -> bool,
) -> io::Result<()> {
    let deadline = Instant::now() + limit;
    while !is_over(cell) {
        let answer = Connection::open(cell).and_then(|mut connection| {
            connection.limit_wait(deadline.saturating_duration_since(Instant::now()))?;
            connection.ask(request)
        });
        let why = match answer {
            Ok(CellResponse::Done) => return Ok(()),
            Ok(CellResponse::Refused { why }) => io::Error::other(why),
            Ok(other) => io::Error::other(other.unexpected()),
            Err(error) => error,
        };
        // The next attempt would have no time, and its error would hide this one.
        if Instant::now() + interval >= deadline {
            return Err(why);
        }
        std::thread::sleep(interval);
    }
    Ok(())
}

/// Refuses a cell that is not in this host's `plan`.
pub(super) fn check_is_here(plan: &[CellPlan], number: u16, help: &str) -> Result<()> {
    if plan.iter().any(|cell| cell.number == number) {
        return Ok(());
    }
    let numbers: Vec<String> = plan.iter().map(|cell| cell.number.to_string()).collect();
    Err(miette!(
        help = help,
        "this host has no cell {number}; it has {}",
        numbers.join(", ")
    ))
}

pub(super) fn no_cluster() -> miette::Report {
    miette!(
        help = "start one with `mirrorball cluster up`",
        "no cluster is up here"
    )
}

pub(super) fn one_host() -> miette::Report {
    miette!(
        help = "name the hosts in the cluster's file, each a [[hosts]] table",
        "the cluster has this host only"
    )
}

pub(super) fn cells(count: usize) -> String {
    if count == 1 {
        "one cell".to_owned()
    } else {
        format!("{count} cells")
    }
}
