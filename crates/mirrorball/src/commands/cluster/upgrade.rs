//! `mirrorball cluster upgrade`: replaces the program of this host's cells by this one, while their VMs run.

use std::fs::File;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::Instant;

use cell::cluster::protocols::protocols;
use cell::programs::Programs;
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client::Connection;
use registry::cluster::files::{CellFiles, Files};
use registry::cluster::guard;
use registry::cluster::interface::{CellRequest, CellResponse, Protocols};
use urpc::version::VersionMismatch;

use super::cells::cells_here;

/// Replaces the program of each cell of this host, one after another.
pub(super) fn upgrade() -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    let plan = match cells_here(&files)? {
        ControlFlow::Continue(plan) => plan,
        ControlFlow::Break(code) => return Ok(code),
    };
    Programs::beside_command().map_err(|error| miette!("{error}"))?;
    let program = File::open("/proc/self/exe").into_diagnostic()?;
    let cells: Vec<u16> = plan
        .iter()
        .map(|cell| cell.number)
        .filter(|cell| !files.cell(*cell).has_failed())
        .collect();
    // All cells are checked before one is replaced.
    let mut former = Vec::new();
    for cell in &cells {
        if !files.cell(*cell).runs() && files.cell(*cell).is_guarded() {
            // Its guard tries to start it, and gives the new program a trial as well.
            former.push("that does not start".to_owned());
            continue;
        }
        let theirs = ask(&files.cell(*cell)).map_err(|error| {
            miette!(
                help = "see `mirrorball cluster status`",
                "cell {cell} does not answer: {error}"
            )
        })?;
        agree(&theirs, *cell).map_err(|error| miette!("{error}"))?;
        former.push(theirs.release);
    }
    let ours = protocols().release;
    for (done, (cell, theirs)) in cells.iter().zip(&former).enumerate() {
        let begun = Instant::now();
        guard::upgrade(&files.cell(*cell), &program).map_err(|error| match done {
            0 => miette!("cell {cell} goes on with release {theirs}: {error}"),
            _ => miette!(
                help = "cells one release apart work together; `cluster upgrade` by the former program takes \
                        the others back",
                "cell {cell} goes on with release {theirs}, and the {done} before it with {ours}: {error}"
            ),
        })?;
        println!(
            "cell {cell}: release {theirs} replaced by {ours} in {} ms",
            begun.elapsed().as_millis()
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn ask(cell: &CellFiles) -> std::io::Result<Protocols> {
    match Connection::open(cell)?.ask(&CellRequest::Protocols)? {
        CellResponse::Protocols(protocols) => Ok(protocols),
        CellResponse::Refused { why } => Err(std::io::Error::other(why)),
        other => Err(std::io::Error::other(other.unexpected())),
    }
}

/// Checks that this program is compatible with the state of a cell's program.
fn agree(theirs: &Protocols, cell: u16) -> Result<(), VersionMismatch> {
    let ours = protocols();
    let peer = format!("the program of cell {cell} (release {})", theirs.release);
    for (ours, theirs, protocol) in [
        (ours.cells, theirs.cells, "the cells' protocol"),
        (ours.records, theirs.records, "the record of a running VM"),
        (ours.shards, theirs.shards, "the protocol of shards"),
    ] {
        ours.agree(theirs, protocol, &peer)?;
    }
    Ok(())
}
