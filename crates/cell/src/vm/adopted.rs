//! The state of a VM that a process takes over when it begins to serve the VM.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use keeper::client::Keeper;
use shard_api::launch::Ending;

use super::boot::{Prepared, RunningBoot};
use super::{Progress, RunError, Vm, begin};
use crate::adoption::{FirstBoot, Leave, LeaveBoot};
use crate::control_group::ControlGroup;
use crate::frozen::Freezable;
use crate::open::VmResources;
use crate::secondary_shards::{SecondaryShard, SecondaryShards};
use crate::shard_log::ShardLog;
use crate::shard_process::ShardProcess;

/// A VM as this process begins to serve it.
#[derive(Debug)]
pub enum Adopted {
    /// No process has served it. Its keeper has just been started, and has nothing of it.
    New(Keeper),
    /// The VM's guest runs.
    Boot(AdoptedBoot),
    /// The VM was between two boots. Its keeper has no process of it.
    Between(Arc<Keeper>),
    /// The VM has not run yet. Its keeper has no process of it.
    Before(Arc<Keeper>, FirstBoot),
}

/// The running boot of a VM, and its resources in the monitor.
#[derive(Debug)]
pub struct AdoptedBoot {
    /// The VM's keeper.
    pub(crate) keeper: Arc<Keeper>,
    /// Shard that has the VM's devices; the only one, unless the VM spans cells.
    pub(crate) home: Arc<ShardProcess>,
    /// Its shards beside the home, until they are watched.
    pub(crate) parts: Vec<SecondaryShard>,
    /// The logs of these shards.
    pub(crate) part_logs: Vec<Arc<ShardLog>>,
    /// The socket for freezes.
    pub(crate) handover: UnixStream,
    /// The socket by which the guest requests ports of the host.
    pub(crate) ports: OwnedFd,
    /// Number of the VM's processes that were killed for memory before this boot.
    pub(crate) killed_before: u64,
    /// Time since the start of the boot.
    pub(crate) ran: Duration,
    /// Whether the VM is paused by order.
    pub(crate) is_paused: bool,
}

impl AdoptedBoot {
    /// Makes the VM `opened` reachable for clients, and leaves it to a next successor.
    ///
    /// # Errors
    /// If the keeper is gone, or this process has no descriptors left.
    pub(crate) fn begin(&mut self, vm: Vm<'_>, opened: &VmResources) -> io::Result<()> {
        let parts = std::mem::take(&mut self.parts);
        let spans = !parts.is_empty();
        let (told, home) = (vm.handle.clone(), vm.handle.clone());
        let watch = || SecondaryShards::watch(parts, move || told.changed(), move || home.part_ended());
        let parts = spans.then(watch).transpose()?;
        begin(vm.handle, opened, vm.span)?;
        {
            let mut state = vm.handle.state();
            state.group = ControlGroup::of_process(self.home.pid).map(Arc::new);
            state.start(self.home.clone(), parts);
            state.go_on(self.is_paused);
        }
        if spans {
            vm.handle.align_shards(self.is_paused);
        }
        if !spans {
            let freezable = Freezable::adopt(opened, self.handover.try_clone()?)?;
            vm.handle.set_freezable(Some(freezable));
        }
        let boot = LeaveBoot {
            home: &self.home,
            killed_before: self.killed_before,
            handover: &self.handover,
            ports: &self.ports,
        };
        let what = Leave {
            handle: vm.handle,
            programs: vm.programs,
            opened,
            boot: Some(boot),
            first: None,
        };
        vm.monitor
            .map_or(Ok(()), |monitor| monitor.leave(&what, &self.keeper))
    }

    /// Follows the boot to its end.
    pub(super) fn go_on(
        self,
        vm: Vm<'_>,
        opened: &VmResources,
        progress: &mut impl FnMut(Progress<'_>),
    ) -> Result<Ending, RunError> {
        let running = RunningBoot {
            vm,
            opened,
            keeper: &self.keeper,
            reports: self.home.link.reports()?,
            home: self.home,
            handover: self.handover,
            ports: self.ports,
            prepared: Prepared::default(),
            killed_before: self.killed_before,
            ran: true,
        };
        running.follow(progress)
    }
}
