//! The keeper of a VM as its monitor has it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use keeper::client::Keeper;
use keeper::socket::Socket;

use super::{RunError, Vm};
use crate::adoption::MonitorFiles;
use crate::programs::Programs;

/// The socket in a VM's directory that its cell connects to.
pub(crate) const KEEPER_SOCKET: &str = "keeper.sock";

/// The keeper of a VM, through its reboots.
pub(super) struct VmKeeper(pub(super) Option<Arc<Keeper>>);

impl VmKeeper {
    /// The keeper for the next boot: the last one's, unless it was killed.
    pub(super) fn of_boot(&mut self, vm: Vm<'_>) -> Result<Arc<Keeper>, RunError> {
        if let Some(keeper) = self.0.take().filter(|keeper| keeper.is_alive()) {
            return Ok(self.0.insert(keeper).clone());
        }
        let keeper = prepare(vm, start_keeper(vm.programs, vm.name)?)?;
        Ok(self.0.insert(Arc::new(keeper)).clone())
    }

    /// Empties the keeper's slot, and lets the keeper end.
    pub(super) fn end(&mut self) {
        if let Some(keeper) = self.0.take() {
            // A keeper that was killed has nothing any more.
            let _ = keeper.clear();
        }
    }
}

/// Orders the keeper to start this process's program when no process serves the VM. The program reads the
/// record that this process leaves; that of a former process may be too old after upgrades.
///
/// # Errors
/// If the keeper is gone, or a process has no descriptors left.
pub(crate) fn succeed_by_this_program(keeper: &Keeper) -> io::Result<()> {
    let command = File::open("/proc/self/exe")?;
    keeper.succeed_by(command.as_fd(), &["mirrorball", "adopt"])
}

/// Prepares a new keeper of the VM for the end of this process: the keeper knows which process serves the VM
/// then.
///
/// # Errors
/// If the keeper is gone, or its socket can't be made.
pub(crate) fn prepare(vm: Vm<'_>, keeper: Keeper) -> Result<Keeper, RunError> {
    if let Some(monitor) = vm.monitor {
        succeed_by_this_program(&keeper)?;
        monitor.watch_lease(&keeper)?;
    }
    if vm.monitor.is_some_and(MonitorFiles::is_in_cell) {
        let path = vm.folder.join(KEEPER_SOCKET);
        // The socket of a keeper that was killed.
        let _ = std::fs::remove_file(&path);
        keeper.listen(Socket::bind(&path)?.as_fd())?;
    }
    Ok(keeper)
}

/// Starts the keeper of the VM `name`. It has the CPUs and the nodes of this thread.
///
/// # Errors
/// If its program can't be executed.
pub fn start_keeper(programs: &Programs, name: &str) -> Result<Keeper, RunError> {
    let program = &programs.keeper;
    Keeper::start(program.file().as_fd(), name).map_err(|source| RunError::Keeper {
        path: program.path().to_owned(),
        source,
    })
}
