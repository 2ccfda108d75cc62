//! `mirrorball cluster cordon` and `uncordon`: stops and resumes a cell's admission of VMs.

use std::ops::ControlFlow;
use std::process::ExitCode;

use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client::Connection;
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse};

use super::cells::{cells_here, check_is_here};
use crate::commands::hosts;

/// Cordons a cell, or ends its cordon. Returns when all cells have applied it; for a cell of another host the
/// command runs there.
pub(super) fn cordon(number: u16, cordoned: bool) -> Result<ExitCode> {
    if let Some(code) = hosts::at_cell(number)? {
        return Ok(code);
    }
    let files = Files::open().into_diagnostic()?;
    let plan = match cells_here(&files)? {
        ControlFlow::Continue(plan) => plan,
        ControlFlow::Break(code) => return Ok(code),
    };
    check_is_here(&plan, number, "`mirrorball cluster status` lists all cells")?;
    let cell = files.cell(number);
    if cell.has_failed() {
        return Err(miette!(
            help = "`mirrorball cluster down` and `mirrorball cluster up` begin it anew",
            "cell {number} has failed, and takes no VM"
        ));
    }
    let answer = Connection::open(&cell).and_then(|mut cell| cell.ask(&CellRequest::Cordon { cordoned }));
    match answer.map_err(|error| {
        miette!(
            help = "try again when `mirrorball cluster status` shows that it runs",
            "cell {number} does not answer: {error}"
        )
    })? {
        CellResponse::Done => Ok(ExitCode::SUCCESS),
        CellResponse::Refused { why } => Err(miette!("{why}")),
        other => Err(miette!("{}", other.unexpected())),
    }
}
