//! The keeper of a VM as its monitor has it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use keeper::client::Keeper;
use keeper::socket::Socket;

use super::{RunError, Vm};
use crate::adoption::MonitorFiles;

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
        let keeper = start_keeper(vm)?;
        if vm.monitor.is_some() {
            succeed_by_this_program(&keeper)?;
        }
        if vm.monitor.is_some_and(MonitorFiles::is_in_cell) {
            let path = vm.folder.join(KEEPER_SOCKET);
            // That of a keeper that was killed.
            let _ = std::fs::remove_file(&path);
            keeper.listen(Socket::bind(&path)?.as_fd())?;
        }
        Ok(self.0.insert(Arc::new(keeper)).clone())
    }

    /// Empties the keeper's slot, and lets the keeper end.
    pub(super) fn end(&mut self) {
        if let Some(keeper) = self.0.take() {
            // One that was killed has nothing any more.
            let _ = keeper.clear();
        }
    }
}

/// Has the keeper start this process's program when no process serves the VM. The program reads the record
/// that this process leaves; that of a former process may be too old after upgrades.
///
/// # Errors
/// If the keeper is gone, or a process has no descriptors left.
pub(crate) fn succeed_by_this_program(keeper: &Keeper) -> io::Result<()> {
    let command = File::open("/proc/self/exe")?;
    keeper.succeed_by(command.as_fd(), &["mirrorball", "adopt"])
}

/// Starts the keeper of a VM that another process is to start.
pub(crate) fn start_for_another(vm: Vm<'_>) -> Result<Arc<Keeper>, RunError> {
    VmKeeper(None).of_boot(vm)
}

/// Starts a keeper, which has the CPUs and the nodes of this thread.
pub(super) fn start_keeper(vm: Vm<'_>) -> Result<Keeper, RunError> {
    let program = &vm.programs.keeper;
    Keeper::start(program.file().as_fd(), vm.name).map_err(|source| RunError::Keeper {
        path: program.path().to_owned(),
        source,
    })
}
