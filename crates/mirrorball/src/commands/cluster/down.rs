//! `mirrorball cluster down`: ends the cells of this host.

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use config::cluster::OnLost;
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client::{self, Connection};
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellStatus, SHARD_SEPARATOR};

use super::cells::{cells, cells_here};
use super::{POLL_INTERVAL, leave, users};

/// Time limit for the cells to end.
const DOWN_LIMIT: Duration = Duration::from_secs(10);

pub(super) fn down(leave: bool, stop: bool) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    let plan = match cells_here(&files)? {
        ControlFlow::Continue(plan) => plan,
        ControlFlow::Break(code) => return Ok(code),
    };
    if stop {
        leave::stop_vms(&files, &plan)?;
    }
    end_cluster(&files, leave)?;
    Ok(ExitCode::SUCCESS)
}

/// Ends the cluster on this host. With `leave`, VMs keep running.
pub(super) fn end_cluster(files: &Files, leave: bool) -> Result<()> {
    let status = client::status(files).unwrap_or_default().unwrap_or_default();
    let plan = files.plan().into_diagnostic()?;
    let is_own = |cell: &CellStatus| plan.iter().any(|own| own.number == cell.plan.number);
    let own = status.cells.into_iter().filter(is_own);
    // A spanning VM ends as a whole.
    let is_whole = |name: &String| !name.contains(SHARD_SEPARATOR);
    let vms: Vec<String> = own.flat_map(|cell| cell.vms).filter(is_whole).collect();
    let users = files.users().into_diagnostic()?;
    if !leave && !vms.is_empty() {
        return Err(miette!(
            help = "stop them with --stop, end those of other users with `mirrorball cluster evict USER:VM`, \
                    or add --leave to let them run on alone",
            "VMs run in the cluster: {}",
            users::names(&vms, &users).join(", ")
        ));
    }
    let site = files.site().into_diagnostic()?;
    if !vms.is_empty() && site.is_some_and(|site| site.on_lost == OnLost::Stop) {
        return Err(miette!(
            help = "end them with `mirrorball stop VM`",
            "with `on_lost = \"stop\"` no VM runs on without its cell, since its name is free then: {}",
            vms.join(", ")
        ));
    }
    end_cells(files)?;
    // The guard of a failed cell keeps the server as long as there is a plan.
    files.remove().into_diagnostic()?;
    if !users.is_empty() {
        users::wait_until_closed()?;
    }
    Ok(())
}

/// Ends the cells of this host. VMs keep running.
pub(super) fn end_cells(files: &Files) -> Result<()> {
    let deadline = Instant::now() + DOWN_LIMIT;
    loop {
        // A guard that tries to start its cell ends, too.
        let running = files.occupied().into_diagnostic()?;
        if running.is_empty() {
            return Ok(());
        }
        for cell in &running {
            // A starting cell receives the request in the next round, and one that waits for etcd reads the
            // note.
            let asked =
                Connection::open(&files.cell(cell.number)).and_then(|mut cell| cell.ask(&CellRequest::End));
            if asked.is_err() {
                files.cell(cell.number).end().into_diagnostic()?;
            }
        }
        if Instant::now() > deadline {
            return Err(miette!(
                help = "kill the processes that `mirrorball cluster status` lists",
                "{} did not end within {} s",
                cells(running.len()),
                DOWN_LIMIT.as_secs()
            ));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
