//! Freezes of a VM, for clones and snapshots.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::MutexGuard;

use fault_point::fault_point;
use locks::IgnorePoison;

use super::VmHandle;
use crate::frozen::Freezable;
use crate::link::not_running;

impl VmHandle {
    /// Freezes the VM for `client`.
    pub fn freeze(&self, client: &mut UnixStream) -> io::Result<()> {
        if !self.state().cells.is_empty() {
            return Err(io::Error::other(
                "a VM that spans cells cannot be cloned or kept as a snapshot; start it without `span`",
            ));
        }
        let spec = self.recorder().read(|record| record.spec.clone());
        match &mut *self.freezable() {
            Some(freezable) => {
                // With the limits that were changed since the start.
                spec.into_iter().for_each(|spec| freezable.set_spec(spec));
                fault_point!(freeze_begun);
                let served = freezable.serve(client);
                fault_point!(freeze_served);
                served
            }
            None => Err(not_running()),
        }
    }

    /// Runs of pages that the VM has touched so far, by their first and their number.
    pub fn touched(&self) -> io::Result<Vec<(u64, u64)>> {
        match &mut *self.freezable() {
            Some(freezable) => freezable.touched(),
            None => Err(not_running()),
        }
    }

    /// Sets the way to freeze the VM from now on.
    pub(crate) fn set_freezable(&self, freezable: Option<Freezable>) {
        let socket = freezable.as_ref().and_then(|freezable| freezable.socket().ok());
        // A freeze that can't be ended would delay the VM's end.
        *self.freezable() = freezable.filter(|_| socket.is_some());
        *self.freezing() = socket;
    }

    /// The VM can't be frozen any more. A freeze that is under way fails now, whatever the shard does.
    pub(crate) fn end_freezable(&self) {
        if let Some(socket) = self.freezing().take() {
            let _ = socket.shutdown(Shutdown::Both);
        }
        *self.freezable() = None;
    }

    fn freezing(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.0.freezing.lock().ignore_poison()
    }

    fn freezable(&self) -> MutexGuard<'_, Option<Freezable>> {
        self.0.freezable.lock().ignore_poison()
    }
}
