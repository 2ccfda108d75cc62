//! Freezes the VM on a request of the monitor: pauses it, turns its memory into files, saves the rest of its
//! state, and resumes it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diskstore::disk::copy_scratch;

use crate::arch::x86_64::state::{ChipState, StateError, VcpuState};
use crate::chain::chain;
use crate::kind::{PlainMemory, RunningKind, VmKind};
use crate::launch::{Fd, HandoverReply, HandoverRequest, ResumeLaunch};
use crate::machine::{PlainVm, Running};
use crate::memory::MemoryError;
use crate::memory::nodes::MemoryNodes;
use crate::pci::PciBus;
use crate::process::hold::{DRAIN_TIMEOUT, Hold};
use crate::sharing::{seal, sealable_file};
use crate::snapshot::{MachineState, VERSION};
use crate::virtio::block::FullDisks;
use shard_api::message::{self, Files, ReceiveError};

/// Reason why the VM was not frozen.
#[derive(Debug, thiserror::Error)]
enum FreezeError {
    #[error(
        "its memory is in huge pages of the host's pool, which VMs can't share; start it with `pages = \
         \"4K\"`"
    )]
    HugePages,
    #[error(
        "its memory is paged, and pages in a paging file can't be cloned or kept as a snapshot; start it \
         without `resident`"
    )]
    Paged,
    #[error("a VM that spans cells cannot be cloned or kept as a snapshot; start it without `span`")]
    Span,
    #[error("it has persistent memory, which is not cloned; use a disk with `as = \"block\"`")]
    Pmem,
    #[error(
        "its disks take more than {} s to finish the I/O in flight, so that it cannot be paused",
        DRAIN_TIMEOUT.as_secs()
    )]
    NotPaused,
    #[error(
        "a write to its disk{0} waits for room on the host; free some, let the VM run if it is paused, \
         then try again"
    )]
    Full(u16),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("its memory or its disks cannot be frozen")]
    Host(#[from] io::Error),
    #[error(transparent)]
    Message(#[from] ReceiveError),
}

/// Data of the VM that a freeze needs, beside what runs.
pub struct Freezer {
    /// Socket of the monitor's requests.
    pub socket: UnixStream,
    /// Temporary overlay of each disk.
    pub overlays: Vec<Option<File>>,
    /// Nodes of the VM's memory.
    pub nodes: MemoryNodes,
    /// Disks whose writes wait for room on the host. The saved state does not contain such requests.
    pub full: FullDisks,
}

impl AsFd for Freezer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// State of a VM that stands still, ready to be sent to the monitor.
struct FrozenVm {
    state: File,
    memory: Vec<Arc<File>>,
    paused: Duration,
}

impl FrozenVm {
    fn into_reply(self) -> (HandoverReply, Vec<Arc<File>>) {
        let mut files = vec![Arc::new(self.state)];
        files.extend(self.memory);
        let reply = HandoverReply::Frozen {
            resume: ResumeLaunch {
                state: Fd(0),
                memory: (1..files.len()).map(Fd).collect(),
            },
            paused_us: u64::try_from(self.paused.as_micros()).unwrap_or(u64::MAX),
        };
        (reply, files)
    }
}

impl Freezer {
    /// Serves the request that waits in the socket. Another part of the process notices that a monitor is
    /// gone.
    pub fn serve(&mut self, running: &Running, bus: &PciBus, kind: &RunningKind, hold: &Hold<'_>) {
        let request = message::receive::<HandoverRequest>(&mut self.socket);
        let answer = request
            .map_err(FreezeError::from)
            .and_then(|(request, files)| match request {
                HandoverRequest::Freeze { overlays } => {
                    let VmKind::Plain(plain) = kind else {
                        return Err(FreezeError::Span);
                    };
                    self.freeze(&overlays, files, running, bus, (plain, hold))
                        .map(FrozenVm::into_reply)
                }
                HandoverRequest::Touched => {
                    let runs = match kind {
                        VmKind::Plain(PlainVm {
                            memory: PlainMemory::Shared(sharing),
                            ..
                        }) => sharing.mapper.touched()?,
                        VmKind::Plain(_) | VmKind::SharedSpan(_) | VmKind::CoherentSpan(..) => Vec::new(),
                    };
                    Ok((HandoverReply::Touched { runs }, Vec::new()))
                }
            });
        let (reply, files) = answer.unwrap_or_else(|error| {
            let why = chain(&error);
            (HandoverReply::Refused { why }, Vec::new())
        });
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        if message::send(&mut self.socket, &reply, &files).is_err() {
            // No further request can arrive. Without this, the socket would be readable forever.
            self.disconnect();
        }
    }

    fn disconnect(&mut self) {
        if let Ok((socket, other)) = UnixStream::pair() {
            // It is never readable: the other end lives as long as this process.
            std::mem::forget(other);
            self.socket = socket;
        }
    }

    fn freeze(
        &self,
        overlays: &[Option<Fd>],
        mut files: Files,
        running: &Running,
        bus: &PciBus,
        (plain, hold): (&PlainVm, &Hold<'_>),
    ) -> Result<FrozenVm, FreezeError> {
        let mapper = match &plain.memory {
            PlainMemory::Shared(sharing) => &sharing.mapper,
            PlainMemory::Whole => return Err(FreezeError::HugePages),
            PlainMemory::Paged(_) => return Err(FreezeError::Paged),
        };
        if !running.layout.pmem.is_empty() {
            return Err(FreezeError::Pmem);
        }
        let targets = overlays
            .iter()
            .map(|fd| fd.map(|fd| files.take(fd)).transpose())
            .collect::<Result<Vec<_>, _>>()?;
        let mut state_file = sealable_file(c"machine-state")?;

        let still = hold.pause_for_caller().ok_or(FreezeError::NotPaused)?;
        if let Some(disk) = self.full.now().first() {
            return Err(FreezeError::Full(*disk));
        }
        let start = Instant::now();
        let frozen = mapper.freeze(&still)?;
        for (overlay, target) in self.overlays.iter().zip(&targets) {
            if let (Some(overlay), Some(target)) = (overlay, target) {
                copy_scratch(overlay, target)?;
            }
        }
        let state = MachineState {
            version: VERSION,
            vcpus: plain
                .vcpus
                .iter()
                .map(|vcpu| VcpuState::save(vcpu, &running.register_numbers))
                .collect::<Result<_, _>>()?,
            chips: ChipState::save(&running.vm)?,
            console: running.console.save(),
            functions: bus.save()?,
            memory: frozen.map,
        };
        plain.report_pause();
        drop(still);
        let paused = start.elapsed();

        self.nodes.bind(&running.memory, &running.layout)?;
        state.write(&mut state_file)?;
        for file in frozen.files.iter().map(|file| &**file).chain([&state_file]) {
            match seal(file) {
                // One for reading only is a snapshot's, from which this VM was restored. It is no file in
                // memory; the monitor knows it.
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
                sealed => sealed?,
            }
        }
        Ok(FrozenVm {
            state: state_file,
            memory: frozen.files,
            paused,
        })
    }
}
