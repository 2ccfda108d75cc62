//! The resources that a monitor leaves to its successor.
//!
//! The monitor gives them to the VM's keeper each time that the VM starts. When the monitor is gone, the
//! keeper starts a successor, which takes them back and serves the VM from then on.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use keeper::client::Keeper;
use policy::span::Part;
use registry::monitor::LeaseOrder;
use serde::{Deserialize, Serialize};
use shard_api::launch::{Fd, SandboxLaunch};

use crate::cluster::reservation::{LeftReservation, ReservationHandle};
use crate::handle::VmHandle;
use crate::left::{Leaving, LeftFiles};
use crate::link::ShardLink;
use crate::open::{LeftOpened, VmResources};
use crate::programs::{BuildProgram, Programs};
use crate::secondary_shards;
use crate::shard_log::ShardLog;
use crate::shard_process::{self, ShardProcess};

/// Maximum number of requests that a monitor sends to a keeper.
const REQUESTS_MAX: u64 = 1 << 32;

/// The purpose of each descriptor that a monitor leaves.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AdoptionRecord {
    pub(crate) monitor: LeftMonitor,
    pub(crate) places: Places<LeftReservation>,
    pub(crate) opened: LeftOpened,
    /// The boot that runs; none between two boots, and before the first.
    pub(crate) boot: Option<LeftBoot>,
    /// The steps before the first boot, if the VM has not been started yet.
    pub(crate) first: Option<FirstBoot>,
}

/// A VM that has not been started yet.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FirstBoot {
    /// Time for which the VM that it resumes from was paused, in microseconds.
    pub(crate) paused_us: Option<u64>,
    /// The snapshot's directory, in which the pages that a restored VM touches are recorded.
    pub(crate) record_in: Option<PathBuf>,
    /// Whether a process has begun it, and may have ended during it.
    pub(crate) has_begun: bool,
}

/// Descriptors of the monitor's own, in addition to the VM's files.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LeftMonitor {
    /// The VM's directory.
    pub(crate) folder: PathBuf,
    /// The lock of the VM's entry.
    pub(crate) entry: Fd,
    /// The listening socket of the console.
    pub(crate) console: Fd,
    /// The bytes of the console.
    pub(crate) kept: Fd,
    /// The listening socket of the controls.
    pub(crate) control: Fd,
    /// The socket to the client that started the VM.
    pub(crate) lease: Fd,
    /// The programs of shards and of keepers, each by the path that it was opened by.
    pub(crate) programs: [(PathBuf, Fd); 2],
    /// The keeper watches the lease. One of the release before does not.
    #[serde(default)]
    pub(crate) keeper_watches_lease: bool,
}

/// The places of a VM.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Places<T> {
    /// The place of a VM in one cell.
    pub(crate) own: Option<T>,
    /// The places of a VM that spans cells, the home's first.
    pub(crate) span: Vec<(T, Part)>,
}

impl Places<ReservationHandle> {
    fn leave(&self, leaving: &mut Leaving) -> io::Result<Places<LeftReservation>> {
        let mut span = Vec::new();
        for (place, part) in &self.span {
            span.push((place.leave(leaving)?, part.clone()));
        }
        let own = self.own.as_ref().map(|place| place.leave(leaving));
        Ok(Places {
            own: own.transpose()?,
            span,
        })
    }
}

/// The boot that runs.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LeftBoot {
    /// The home's shard, which every VM has.
    pub(crate) home: LeftShard,
    /// The other shards, if the VM spans cells.
    pub(crate) parts: Vec<LeftPart>,
    /// Processes of the VM that were killed for memory before this boot.
    pub(crate) killed_before: u64,
    /// The monitor's end of the socket for freezes.
    pub(crate) handover: Fd,
    /// The monitor's end of the socket by which the guest requests ports of the host.
    pub(crate) ports: Fd,
}

/// A running shard.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LeftShard {
    pid: i32,
    process: Fd,
    /// The monitor's end of the control socket.
    control: Fd,
    /// The incarnation of the monitor's orders.
    incarnation: u64,
    sandbox: SandboxLaunch,
    /// The shard acknowledges the order to quit. A program of the release before does not report this.
    #[serde(default)]
    acknowledges_quit: bool,
}

impl LeftShard {
    fn leave(shard: &ShardProcess, leaving: &mut Leaving) -> io::Result<Self> {
        Ok(Self {
            pid: shard.pid,
            process: leaving.add(shard.pidfd())?,
            control: leaving.add(shard.link.socket())?,
            incarnation: shard.link.incarnation(),
            sandbox: shard.sandbox.clone(),
            acknowledges_quit: shard.acknowledges_quit(),
        })
    }

    /// Takes the shard over. Its orders have a greater incarnation from now on.
    ///
    /// # Errors
    /// If a descriptor is missing.
    pub(crate) fn take(
        self,
        files: &mut LeftFiles,
        keeper: Arc<Keeper>,
        program: Arc<BuildProgram>,
        log: Arc<ShardLog>,
    ) -> io::Result<ShardProcess> {
        let left = shard_process::LeftShard {
            pid: self.pid,
            process: files.take(self.process)?,
            link: ShardLink::adopt(files.take(self.control)?, self.incarnation + 1),
            sandbox: self.sandbox,
            acknowledges_quit: self.acknowledges_quit,
        };
        Ok(ShardProcess::adopt(left, keeper, program, log))
    }
}

/// A running shard beside the home, which has a keeper of its own.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LeftPart {
    cell: u16,
    shard: LeftShard,
    keeper: Fd,
    keeper_pid: i32,
    log: [Fd; 3],
}

impl LeftPart {
    fn leave(cell: u16, shard: &ShardProcess, leaving: &mut Leaving) -> io::Result<Self> {
        let keeper = shard.keeper().ok_or(io::ErrorKind::NotFound)?;
        Ok(Self {
            cell,
            shard: LeftShard::leave(shard, leaving)?,
            keeper: leaving.add(keeper.connection()?)?,
            keeper_pid: keeper.pid(),
            log: shard.log.leave(leaving)?,
        })
    }

    /// Takes the shard over. Returns its log, too.
    ///
    /// # Errors
    /// If a descriptor is missing, or its keeper is gone.
    pub(crate) fn take(
        self,
        files: &mut LeftFiles,
        program: Arc<BuildProgram>,
    ) -> io::Result<(secondary_shards::SecondaryShard, Arc<ShardLog>)> {
        let requests = self.shard.incarnation.saturating_mul(REQUESTS_MAX);
        let keeper = Keeper::resume(files.take(self.keeper)?, self.keeper_pid, requests)?;
        let log = Arc::new(ShardLog::take(self.log, files)?);
        let process = self.shard.take(files, Arc::new(keeper), program, log.clone())?;
        let part = secondary_shards::SecondaryShard::Here {
            cell: self.cell,
            process,
        };
        Ok((part, log))
    }
}

/// Descriptors that a monitor leaves to a successor, in addition to the VM's files.
#[derive(Debug)]
pub struct MonitorFiles {
    /// The VM's directory.
    pub(crate) folder: PathBuf,
    /// The lock of the VM's entry.
    pub(crate) entry: OwnedFd,
    /// The listening sockets of the console and of the controls.
    pub(crate) console: UnixListener,
    pub(crate) control: UnixListener,
    /// The socket to the client that started the VM.
    pub(crate) lease: UnixStream,
    /// The VM's places in cells.
    pub(crate) places: Places<ReservationHandle>,
}

/// A VM at the moment when its monitor leaves it.
pub(crate) struct Leave<'a> {
    pub(crate) handle: &'a VmHandle,
    pub(crate) programs: &'a Programs,
    pub(crate) opened: &'a VmResources,
    /// The boot that runs; none between two boots, and before the first.
    pub(crate) boot: Option<LeaveBoot<'a>>,
    /// The steps before the first boot, if the VM has not been started yet.
    pub(crate) first: Option<FirstBoot>,
}

/// A running boot at the moment when its monitor leaves it.
pub(crate) struct LeaveBoot<'a> {
    pub(crate) home: &'a ShardProcess,
    /// Processes of the VM that were killed for memory before this boot.
    pub(crate) killed_before: u64,
    /// The sockets for freezes and for ports.
    pub(crate) handover: &'a UnixStream,
    pub(crate) ports: &'a OwnedFd,
}

impl LeaveBoot<'_> {
    fn leave(&self, handle: &VmHandle, leaving: &mut Leaving) -> io::Result<LeftBoot> {
        let parts = match &handle.state().parts {
            Some(parts) => {
                let leave = |(cell, shard)| LeftPart::leave(cell, shard, leaving);
                parts.here().map(leave).collect::<io::Result<_>>()?
            }
            None => Vec::new(),
        };
        Ok(LeftBoot {
            home: LeftShard::leave(self.home, leaving)?,
            parts,
            killed_before: self.killed_before,
            handover: leaving.add(self.handover)?,
            ports: leaving.add(self.ports)?,
        })
    }
}

impl MonitorFiles {
    /// Leaves the VM to a successor of this process, in place of the state that it left before.
    ///
    /// # Errors
    /// If the keeper is gone, or there are no descriptors left.
    pub(crate) fn leave(&self, vm: &Leave<'_>, keeper: &Keeper) -> io::Result<()> {
        let mut leaving = Leaving::default();
        let boot = vm.boot.as_ref().map(|boot| boot.leave(vm.handle, &mut leaving));
        let record = AdoptionRecord {
            boot: boot.transpose()?,
            first: vm.first.clone(),
            monitor: self.left(vm, keeper, &mut leaving)?,
            places: self.places.leave(&mut leaving)?,
            opened: vm.opened.leave(&mut leaving)?,
        };
        leaving.put(record, keeper)
    }

    fn left(&self, vm: &Leave<'_>, keeper: &Keeper, leaving: &mut Leaving) -> io::Result<LeftMonitor> {
        let mut program = |program: &BuildProgram| -> io::Result<_> {
            Ok((program.path().to_owned(), leaving.add(program.file())?))
        };
        let programs = [program(&vm.programs.shard)?, program(&vm.programs.keeper)?];
        Ok(LeftMonitor {
            folder: self.folder.clone(),
            entry: leaving.add(&self.entry)?,
            console: leaving.add(&self.console)?,
            kept: leaving.add(vm.handle.console().kept()?)?,
            control: leaving.add(&self.control)?,
            lease: leaving.add(&self.lease)?,
            programs,
            keeper_watches_lease: keeper.watches(),
        })
    }

    /// Has a keeper that this process has started watch the client's lease.
    ///
    /// # Errors
    /// If the keeper is gone.
    pub(crate) fn watch_lease(&self, keeper: &Keeper) -> io::Result<()> {
        let detach = serde_json::to_string(&LeaseOrder::Detach)?;
        keeper.watch(self.lease.as_fd(), &format!("{detach}\n"))
    }

    /// Whether the VM has a place in a cell of its user's, which is to serve it.
    pub(crate) fn is_in_cell(&self) -> bool {
        self.places.own.as_ref().is_some_and(ReservationHandle::is_own) || !self.places.span.is_empty()
    }

    /// Takes over the descriptors of a predecessor. `places` are the VM's from now on.
    ///
    /// # Errors
    /// If a descriptor is missing.
    pub(crate) fn adopt(
        left: &LeftMonitor,
        places: Places<ReservationHandle>,
        files: &mut LeftFiles,
    ) -> io::Result<Self> {
        Ok(Self {
            folder: left.folder.clone(),
            entry: files.take(left.entry)?,
            console: files.take(left.console)?.into(),
            control: files.take(left.control)?.into(),
            lease: files.take(left.lease)?.into(),
            places,
        })
    }
}

/// Takes over the programs of a predecessor.
///
/// # Errors
/// If a descriptor is missing.
pub(crate) fn adopt_programs(left: &LeftMonitor, files: &mut LeftFiles) -> io::Result<Programs> {
    let [shard, keeper] = &left.programs;
    let mut program = |(path, file): &(PathBuf, Fd)| -> io::Result<_> {
        Ok(BuildProgram::of_open(path.clone(), files.take(*file)?.into()))
    };
    Ok(Programs {
        shard: Arc::new(program(shard)?),
        keeper: program(keeper)?,
    })
}
