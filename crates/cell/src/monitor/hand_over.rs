//! Transfers a VM from its monitor to its cell, whose process serves it from then on.

use std::io;
use std::time::{Duration, Instant};

use registry::cluster::client::Connection;
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse};

use super::failed_cell;
use crate::cluster::limits::RETRY;
use crate::ending::of_failed_cell;
use crate::handle::VmHandle;

/// Time limit for a cell to take a VM that is to start.
const LIMIT: Duration = Duration::from_secs(20);
/// Interval between two attempts, while a cell's process does not run or does not take the VM.
const INTERVAL: Duration = Duration::from_millis(500);

/// Orders the cell to connect to the keeper of a VM that was left to it, and to start the VM. `may_start` is
/// checked before each attempt.
///
/// # Errors
/// If the VM may not start, or the cell refuses it or does not answer for [`LIMIT`]. An error is one line.
pub(super) fn to_cell(
    name: &str,
    cell: u16,
    may_start: impl Fn() -> Result<(), String>,
) -> Result<(), String> {
    let deadline = Instant::now() + LIMIT;
    loop {
        may_start()?;
        let why = match ask(name, cell) {
            Ok(CellResponse::Done) => return Ok(()),
            Ok(CellResponse::Refused { why }) => why,
            Ok(other) => format!("an answer to another question: {other:?}"),
            Err(error) => error.to_string(),
        };
        // Its process may have died since it gave the VM a place, and may be restarting.
        if Instant::now() > deadline {
            return Err(format!(
                "cell {cell} does not take the VM: {why}; see `mirrorball cluster status`"
            ));
        }
        std::thread::sleep(RETRY);
    }
}

/// Starts a thread that transfers the VM to its cell once it runs. This process ends then, as if it were
/// killed: the keeper has all that the cell needs.
pub(super) fn begin(vm: VmHandle) -> io::Result<()> {
    let hand_over = move || {
        if !vm.wait_until_left() {
            return;
        }
        // A VM outside a cluster stays here.
        while let Some((name, Some(cell))) = vm.recorder().read(|record| (record.name.clone(), record.cell)) {
            if matches!(ask(&name, cell), Ok(CellResponse::Done)) {
                // Otherwise the VM is ending, and this process reports how.
                // SAFETY: ends the process; no destructor runs, so that nothing of the VM ends.
                vm.if_left(|| unsafe { libc::_exit(0) });
            } else if let Ok(Some(failed)) = failed_cell(&vm) {
                return vm.end_as_lost(of_failed_cell(failed));
            }
            std::thread::sleep(INTERVAL);
        }
    };
    std::thread::Builder::new()
        .name("hand-over".into())
        .spawn(hand_over)
        .map(drop)
}

/// Requests that a cell serve a VM from the time on when this process does not any more.
fn ask(name: &str, cell: u16) -> io::Result<CellResponse> {
    let name = name.to_owned();
    Connection::open(&Files::open()?.cell(cell))?.ask(&CellRequest::Adopt { name, again: false })
}
