//! The end of the VMs of this host that depend on a failed cell.

use std::io;
use std::time::Duration;

use registry::vms::Registry;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_millis(20);

/// Has a thread call `told` once the host's registry has no VM that depends on the cell.
///
/// # Errors
/// If the host has no threads left.
pub(super) fn await_end(failed: u16, told: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let wait = move || {
        while !has_ended(failed) {
            std::thread::sleep(INTERVAL);
        }
        told();
    };
    std::thread::Builder::new()
        .name("recovery".into())
        .spawn(wait)
        .map(drop)
}

/// Whether no VM depends on the cell; not if the registry can't be read now.
fn has_ended(cell: u16) -> bool {
    let records = Registry::open().and_then(|registry| registry.list());
    records.is_ok_and(|records| !records.iter().any(|record| record.depends_on(cell)))
}
