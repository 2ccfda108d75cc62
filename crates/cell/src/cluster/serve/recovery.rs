//! The end of the VMs of this host that depend on a failed cell.

use std::io;
use std::time::Duration;

use registry::cluster::files::Files;
use registry::vms::Registry;
use tracing::error;

use crate::cluster::admission;

/// Interval between two checks.
const INTERVAL: Duration = Duration::from_millis(20);

/// Starts a thread that calls `told` once the host has no VM that depends on the cell.
///
/// # Errors
/// If the host has no threads left.
pub(super) fn await_end(files: &Files, failed: u16, told: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let files = files.clone();
    let wait = move || {
        while !has_ended(&files, failed) {
            std::thread::sleep(INTERVAL);
        }
        told();
    };
    std::thread::Builder::new()
        .name("recovery".into())
        .spawn(wait)
        .map(drop)
}

/// Starts a thread that ends a VM of another user, by its name in the cluster. That user's processes are
/// killed, and receive no request.
pub(super) fn end_user_vm(files: &Files, name: String) {
    let files = files.clone();
    let end = move || {
        let vms = files.user_vms().unwrap_or_default();
        if let Some(vm) = vms.iter().find(|vm| vm.owned_name() == name) {
            admission::end(&files, vm);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("end".into()).spawn(end) {
        error!(%error, "a user's VM does not end");
    }
}

/// Whether no VM depends on the cell; false if that can't be found out now.
fn has_ended(files: &Files, cell: u16) -> bool {
    let records = Registry::open().and_then(|registry| registry.list());
    let users = files.user_vms();
    records.is_ok_and(|records| !records.iter().any(|record| record.depends_on(cell)))
        && users.is_ok_and(|vms| !vms.iter().any(|vm| vm.depends_on(cell)))
}
