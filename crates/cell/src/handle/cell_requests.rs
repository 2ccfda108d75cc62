//! Requests of a VM to cells of its host.

use std::io;
use std::time::Duration;

use registry::cluster::client::Connection;
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse};
use registry::vms::Record;

/// Time limit for a cell's reply: less than a client of the VM waits.
const CELL_LIMIT: Duration = Duration::from_secs(3);

/// The cell of a VM, of its user's cluster.
///
/// # Errors
/// If it is in none.
pub(super) fn own_cell(record: &Record) -> io::Result<u16> {
    record
        .cell
        .ok_or_else(|| io::Error::other("the VM is in no cell of its user's"))
}

/// Sends a cell of this host a request, and returns its answer, unless that is a refusal.
///
/// # Errors
/// If it refuses, or does not answer within [`CELL_LIMIT`].
pub(crate) fn exchange(cell: u16, request: &CellRequest) -> io::Result<CellResponse> {
    let silent = |error| io::Error::other(format!("cell {cell} does not answer: {error}"));
    let answer = Files::open().and_then(|files| {
        let mut connection = Connection::open(&files.cell(cell))?;
        connection.limit_wait(CELL_LIMIT)?;
        connection.ask(request)
    });
    match answer.map_err(silent)? {
        CellResponse::Refused { why } => Err(io::Error::other(why)),
        answer => Ok(answer),
    }
}

/// Sends a cell of this host a request without another answer than that it is done.
///
/// # Errors
/// As [`exchange`].
pub(crate) fn ask(cell: u16, request: &CellRequest) -> io::Result<()> {
    match exchange(cell, request)? {
        CellResponse::Done => Ok(()),
        other => Err(other_answer(&other)),
    }
}

/// The error of an answer to another question.
pub(crate) fn other_answer(answer: &CellResponse) -> io::Error {
    io::Error::other(format!("an answer to another question: {answer:?}"))
}
