//! `mirrorball cluster up --foreground`: a process that lives as long as the cluster on this host, for a
//! service manager.
//!
//! The cells are children of their guards, as after any `cluster up`, and not of this process. So its death
//! ends no cell, and its next process continues with them.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use config::cluster::OnLost;
use miette::{IntoDiagnostic, Result, miette};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use registry::cluster::files::Files;

use super::down::end_cluster;
use super::notify;

/// Poll interval for the cluster's state.
const INTERVAL: Duration = Duration::from_millis(200);
/// Time without a running cell after which the cluster is lost. `cluster down` removes the plan sooner after
/// the last cell's end.
const LOST_AFTER: Duration = Duration::from_secs(5);

/// Whether SIGTERM or SIGINT was received.
static IS_TO_END: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: i32) {
    IS_TO_END.store(true, Ordering::Relaxed);
}

/// Whether a signal requests that this foreground process end.
pub(super) fn is_to_end() -> bool {
    IS_TO_END.load(Ordering::Relaxed)
}

/// Records SIGTERM and SIGINT for [`stay`], and for the waits before it ([`is_to_end`]).
///
/// # Errors
/// If the kernel refuses.
pub(super) fn catch_signals() -> Result<()> {
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { sigaction(signal, &action) }.into_diagnostic()?;
    }
    Ok(())
}

/// State of the cluster's files.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Whether a plan exists.
    is_planned: bool,
    /// Whether a cell runs, a guard tries to start one, or one has failed: a failed cell has no process until
    /// the next `cluster up`.
    has_cells: bool,
}

/// Step that the command takes after a look at the cluster.
#[derive(Debug, Eq, PartialEq)]
enum Next {
    /// Continue: cells run, or are expected to.
    Stay,
    /// End: `cluster down` has ended the cluster.
    Down,
    /// Fail: the cells have ended by themselves.
    Lost,
}

/// Decides the next action. `without` is the time without a running cell.
fn next(seen: Seen, without: Duration) -> Next {
    match seen {
        Seen {
            is_planned: false, ..
        } => Next::Down,
        Seen { has_cells: false, .. } if without >= LOST_AFTER => Next::Lost,
        _ => Next::Stay,
    }
}

/// Runs until the cluster is down or lost, or a signal ends this process, which ends the cells; VMs keep
/// running.
///
/// # Errors
/// If all cells have ended by themselves, or do not end.
pub(super) fn stay(files: &Files) -> Result<ExitCode> {
    let mut last_seen = Instant::now();
    loop {
        if is_to_end() {
            return end(files);
        }
        // While `cluster down` removes the files they may be unreadable.
        if let Ok(seen) = observe(files) {
            if seen.has_cells {
                last_seen = Instant::now();
            }
            match next(seen, last_seen.elapsed()) {
                Next::Stay => {}
                Next::Down => {
                    notify::notify("STOPPING=1\nSTATUS=The cluster is down.");
                    return Ok(ExitCode::SUCCESS);
                }
                Next::Lost => {
                    return Err(miette!(
                        help = "read the cells' logs, and start them again with `mirrorball cluster up`; \
                                VMs run on",
                        "no cell of this host runs any more"
                    ));
                }
            }
        }
        std::thread::sleep(INTERVAL);
    }
}

fn observe(files: &Files) -> std::io::Result<Seen> {
    let plan = files.plan()?;
    Ok(Seen {
        is_planned: !plan.is_empty(),
        has_cells: plan
            .iter()
            .map(|cell| files.cell(cell.number))
            .any(|cell| cell.runs() || cell.is_guarded() || cell.has_failed()),
    })
}

/// Ends the cells as `cluster down --leave` does. Where VMs end with their cells, cells with VMs keep
/// running.
pub(super) fn end(files: &Files) -> Result<ExitCode> {
    notify::notify("STOPPING=1\nSTATUS=The cells end; VMs run on.");
    let stops = files
        .site()
        .into_diagnostic()?
        .is_some_and(|site| site.on_lost == OnLost::Stop);
    match end_cluster(files, true) {
        Err(error) if stops => {
            eprintln!("mirrorball: the cells run on: {error}");
            Ok(ExitCode::SUCCESS)
        }
        ended => ended.map(|()| ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_ends_with_the_plan_and_reports_cells_that_are_gone_for_long() {
        let seen = |is_planned, has_cells| Seen {
            is_planned,
            has_cells,
        };
        let long = LOST_AFTER;
        let short = LOST_AFTER - Duration::from_millis(1);
        assert_eq!(next(seen(true, true), short), Next::Stay);
        assert_eq!(next(seen(true, false), short), Next::Stay);
        assert_eq!(next(seen(true, false), long), Next::Lost);
        assert_eq!(next(seen(false, false), short), Next::Down);
        assert_eq!(next(seen(false, false), long), Next::Down);
    }
}
