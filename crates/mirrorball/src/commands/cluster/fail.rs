//! `mirrorball cluster fail`: makes a cell count as lost, as if its CPUs and memory were gone.

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cell::cluster::admission;
use miette::{IntoDiagnostic, Result, miette};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use registry::cluster::client::Connection;
use registry::cluster::files::{CellFiles, Files};
use registry::cluster::interface::CellRequest;
use registry::cluster::user_vms::UserVm;
use registry::control::{Request, ask};
use registry::journal::{self, Change};
use registry::vms::{Record, Registry};

use super::cells::{cells_here, check_is_here, repeat_until_done};
use super::users;

/// Time limit for the VMs that depend on the cell to end.
const LIMIT: Duration = Duration::from_secs(60);
/// Interval between two requests to a cell that has not yet detected the failure.
const INTERVAL: Duration = Duration::from_millis(5);

/// Makes a cell of this host fail, and returns when the VMs that depended on the cell have ended.
pub(super) fn fail(number: u16) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    let plan = match cells_here(&files)? {
        ControlFlow::Continue(plan) => plan,
        ControlFlow::Break(code) => return Ok(code),
    };
    check_is_here(&plan, number, "a cell fails by a command on its own host")?;
    let cell = files.cell(number);
    if cell.has_failed() {
        return Err(miette!(
            help = "`mirrorball cluster down` and `mirrorball cluster up` begin it anew",
            "cell {number} has failed already"
        ));
    }
    let (dependents, users_vms) = (dependents(number)?, users_vms(&files, number)?);
    let begun = Instant::now();
    // From here on no process of the cell starts again, and its guard treats the end of the last one as a
    // failure.
    cell.fail().into_diagnostic()?;
    journal::note(Change::CellFailed { cell: number });
    if !end_process(&cell) {
        return Err(miette!(
            help = "its process runs on, and does not answer: see `mirrorball cluster status`, and end it",
            "cell {number} can't be ended"
        ));
    }
    let survivors: Vec<u16> = plan
        .iter()
        .map(|cell| cell.number)
        .filter(|survivor| *survivor != number && files.cell(*survivor).runs())
        .collect();
    for survivor in &survivors {
        recovered(&files.cell(*survivor), number).map_err(|error| {
            miette!(
                help = "see `mirrorball cluster status`",
                "cell {survivor} does not recover from the failure of cell {number}: {error}"
            )
        })?;
    }
    if survivors.is_empty() {
        end_all(number)?;
        for vm in &users_vms {
            admission::end(&files, vm);
        }
    }
    let mut names: Vec<String> = dependents.iter().map(|record| record.name.clone()).collect();
    names.extend(users_vms.iter().map(UserVm::owned_name));
    let users = files.users().into_diagnostic()?;
    let ended = match users::names(&names, &users)[..] {
        [] => "no VM depended on it".to_owned(),
        ref names => format!("{} ended with it", names.join(", ")),
    };
    println!(
        "cell {number} has failed: {ended}; recovery took {} ms",
        begun.elapsed().as_millis()
    );
    Ok(ExitCode::SUCCESS)
}

fn dependents(cell: u16) -> Result<Vec<Record>> {
    let records = Registry::open().into_diagnostic()?.list().into_diagnostic()?;
    Ok(records
        .into_iter()
        .filter(|record| record.depends_on(cell))
        .collect())
}

/// Returns the VMs of other users that depend on the cell.
fn users_vms(files: &Files, cell: u16) -> Result<Vec<UserVm>> {
    let mut vms = files.user_vms().into_diagnostic()?;
    vms.retain(|vm| vm.depends_on(cell));
    Ok(vms)
}

/// Kills the cell's process, if there is one. Returns whether none is left.
fn end_process(cell: &CellFiles) -> bool {
    let deadline = Instant::now() + LIMIT;
    // Its guard may be starting one now, which will find that the cell has failed.
    while cell.runs() && Instant::now() < deadline {
        let pid = Connection::open(cell).and_then(|connection| connection.peer());
        // Not this process's own group.
        if let Ok(pid @ 1..) = pid
            && cell.runs()
        {
            // A process that has ended since needs no signal.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        std::thread::sleep(INTERVAL);
    }
    !cell.runs()
}

/// Waits until a survivor has recovered from the failure.
fn recovered(survivor: &CellFiles, failed: u16) -> std::io::Result<()> {
    let request = CellRequest::Recover { cell: failed };
    // A survivor that fails meanwhile recovers nothing.
    repeat_until_done(survivor, &request, LIMIT, INTERVAL, CellFiles::has_failed)
}

/// Ends the VMs that depend on the cell when no other cell can.
fn end_all(cell: u16) -> Result<()> {
    for record in dependents(cell)? {
        let folder = Registry::open()
            .and_then(|registry| registry.folder_of(&record.name))
            .into_diagnostic()?;
        ask(&folder, &Request::Kill, Some(LIMIT)).map_err(|error| miette!("{}: {error}", record.name))?;
    }
    Ok(())
}
