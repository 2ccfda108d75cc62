//! One VM under its monitor: starts its shard, watches it, starts it again after a reboot.
//!
//! The shard is a child of the VM's keeper ([`::keeper`]), and dies with it. A VM on one host outlives its
//! monitor: each time that the VM starts, the monitor leaves to a successor all that it needs
//! ([`crate::adoption`]).

mod adopted;
mod boot;
mod full_disks;
pub(crate) mod keeper;
mod namespaces;

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use fault_point::fault_point;
use shard_api::launch::Ending;

pub use self::adopted::{Adopted, AdoptedBoot};
use self::boot::NewBoot;
use self::keeper::VmKeeper;
pub use self::keeper::start_keeper;
use crate::adoption::{FirstBoot, MonitorFiles};
use crate::cluster::reservation::ReservationError;
use crate::console::Console;
use crate::control_group::{ControlGroup, ControlGroupError};
use crate::core_scheduling::CoreSchedulingError;
use crate::handle::{CardPidfd, VmHandle};
use crate::mapped_files::MappedFiles;
use crate::memory_nodes::NodesError;
use crate::open::{OpenError, VmResources};
use crate::programs::{ProgramError, Programs};
use crate::reboot::{Next, Reboots, starts_again};
use crate::shard_log::ShardLog;
use crate::spanning::Span;

/// The reason why a VM did not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Its files can't be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its process can't be started.
    #[error("the shard cannot be started: {0}{help}", help = help(.0))]
    Start(#[from] io::Error),
    /// Its keeper can't be started.
    #[error(
        "the VM's keeper {} does not start: {source}; help: install it from the same build as `mirrorball`",
        path.display()
    )]
    Keeper {
        /// The keeper's program.
        path: std::path::PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The shard's program is of another build.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The shard reports that it can't make this VM.
    #[error("the VM cannot start with the kernel {kernel}: {detail}")]
    Refused {
        /// The kernel's file.
        kernel: std::path::PathBuf,
        /// The shard's words.
        detail: String,
    },
    /// One of its cells can't take it.
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    /// A limit or weight of the host's resources can't be set.
    #[error(transparent)]
    ControlGroup(#[from] ControlGroupError),
    /// Its memory can't be bound to its nodes.
    #[error("its memory cannot lie where `memory_nodes` says: {0}")]
    MemoryNodes(NodesError),
    /// The VM can't have cores of its own.
    #[error(transparent)]
    CoreScheduling(#[from] CoreSchedulingError),
    /// The sandbox is incomplete and required.
    #[error("the sandbox is incomplete ({0}); run with --sandbox=auto to go on without it")]
    Sandbox(String),
}

/// The help for an error of the start, appended to it.
fn help(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; raise the limit of open files (`ulimit -Hn`)",
        _ => "",
    }
}

/// A report of a VM's shard while it runs.
pub enum Progress<'a> {
    /// Its vCPUs are about to run; again after each reboot.
    Booted(Booted<'a>),
    /// The names of the disks whose writes wait for room on the host now.
    FullDisks(&'a [String]),
    /// Whether the VM is paused by order.
    Paused(bool),
    /// The VM has ended so, and starts again.
    StartsAgain(&'a Ending),
}

/// The report of a VM's shard when it starts.
pub struct Booted<'a> {
    /// The shard's process.
    pub pid: i32,
    /// The process of its keeper.
    pub keeper: i32,
    /// The processes of its cards.
    pub cards: &'a [u32],
    /// The processes of its other shards.
    pub parts: &'a [i32],
    /// Layers of the sandbox that could not be applied.
    pub sandbox_missing: &'a [String],
    /// Missing layers that `require` does not insist on.
    pub sandbox_notes: &'a [String],
    /// The kernel's cookies of the VM's cores, one for each shard; none without core scheduling.
    pub core_cookies: &'a [u64],
    /// Whether its keeper has all that another process needs to serve the VM.
    pub is_left: bool,
}

/// A VM as its monitor runs it.
#[derive(Clone, Copy, Debug)]
pub struct Vm<'a> {
    /// Unique name in the cluster.
    pub name: &'a str,
    /// Directory of the VM in the registry.
    pub folder: &'a Path,
    /// The programs of its keeper and its shards.
    pub programs: &'a Programs,
    /// Handle by which clients reach it.
    pub handle: &'a VmHandle,
    /// Its cells, if it spans several.
    pub span: Option<&'a Span>,
    /// The descriptors that the monitor leaves to a successor; none for a VM that ends with its monitor.
    pub monitor: Option<&'a MonitorFiles>,
}

/// The action of the next process if this one ends before the next boot runs.
#[derive(Clone, Debug)]
enum IfLost {
    /// There is no next process: the VM ends.
    End,
    /// The VM begins its first boot again.
    FirstBoot(FirstBoot),
    /// The VM has run, and boots again.
    Boot,
}

/// Runs an opened VM until it ends, from its first boot or from where a predecessor of this process left it.
/// `progress` receives the reports of its shard.
pub fn run(
    vm: Vm<'_>,
    mut opened: VmResources,
    adopted: Adopted,
    mut progress: impl FnMut(Progress<'_>),
) -> Result<Ending, RunError> {
    let Vm { handle, span, .. } = vm;
    if opened.spec.core_scheduling && span.is_some_and(Span::has_remote_parts) {
        return Err(CoreSchedulingError::OtherHosts.into());
    }
    let (keeper, adopted, if_lost) = match adopted {
        Adopted::Boot(boot) => (Some(boot.keeper.clone()), Some(boot), IfLost::Boot),
        Adopted::Between(keeper) => {
            opened.renew()?;
            (Some(keeper), None, IfLost::Boot)
        }
        Adopted::Before(keeper, first) => {
            if first.has_begun {
                opened.renew()?;
            }
            // The state from which a VM resumes is read once.
            let if_lost = match opened.launch.resume {
                Some(_) => IfLost::End,
                None => IfLost::FirstBoot(FirstBoot {
                    has_begun: true,
                    ..first
                }),
            };
            (Some(keeper), None, if_lost)
        }
        Adopted::New(keeper) => (Some(Arc::new(keeper::prepare(vm, keeper)?)), None, IfLost::End),
    };
    let mut keeper = VmKeeper(keeper);
    if adopted.is_none() {
        let owner = keeper.of_boot(vm)?.pid().cast_unsigned();
        let group = ControlGroup::of(vm.name, owner, &opened.spec, opened.disk_files())?;
        handle.state().group = group.map(Arc::new);
        begin(handle, &opened, span)?;
    }
    let pump = pump(opened.console.try_clone()?, handle.console().clone())?;
    let over = AtomicBool::new(false);
    let mapped = MappedFiles::of(&opened.claims);
    let (stop_watching, watched) = mpsc::channel();
    let ended = std::thread::scope(|scope| {
        let mapped = &mapped;
        scope.spawn(move || mapped.watch(handle, &watched));
        if let Some(span) = span {
            scope.spawn(|| watch_cells(span, handle, &over));
        }
        let adopted = (adopted, if_lost);
        let ending = every_boot(vm, &mut opened, adopted, &mut keeper, mapped, &mut progress);
        drop(stop_watching);
        over.store(true, Ordering::Relaxed);
        ending
    });
    handle.console().set_input(None);
    fault_point!(vm_ended);
    // From now on this process reports the end of the VM.
    handle.set_left(false);
    // The keeper has copies of the VM's descriptors, with their locks.
    keeper.end();
    let group = handle.state().group.take();
    // With this process's copies of the guest's end closed, the console ends after its last byte. The
    // processes of cards end too, and only then the group can be removed.
    drop(opened);
    drop(group);
    let _ = pump.join();
    ended
}

/// Publishes the parts of the VM in its handle, before clients reach it.
fn begin(handle: &VmHandle, opened: &VmResources, span: Option<&Span>) -> io::Result<()> {
    let cards = opened
        .card_processes()
        .map(CardPidfd::of)
        .collect::<io::Result<_>>()?;
    {
        let mut state = handle.state();
        state.cards = cards;
        state.filtered = opened.filtered();
        state.regions = opened.region_files()?;
        state.cells = span.map_or_else(Vec::new, Span::cells);
        state.has_remote_parts = span.is_some_and(Span::has_remote_parts);
    }
    handle.console().set_input(Some(opened.console.try_clone()?));
    Ok(())
}

/// Boots the VM, again and again while it reboots.
fn every_boot(
    vm: Vm<'_>,
    opened: &mut VmResources,
    (mut adopted, mut if_lost): (Option<AdoptedBoot>, IfLost),
    keeper: &mut VmKeeper,
    mapped: &MappedFiles,
    progress: &mut impl FnMut(Progress<'_>),
) -> Result<Ending, RunError> {
    let Vm { handle, span, .. } = vm;
    let shards = span.map_or(1, |span| span.cells().len());
    let mut logs = vec![opened.log.clone()];
    logs.extend(adopted.iter().flat_map(|boot| boot.part_logs.clone()));
    for part in logs.len()..shards {
        logs.push(Arc::new(ShardLog::create(&vm.folder.join(log_name(part)))?));
    }
    logs.iter().try_for_each(|log| log.begin_to_read())?;
    let mut reboots = Reboots::default();
    loop {
        // The processes of cards are new after each reboot.
        let cards = opened
            .card_processes()
            .map(CardPidfd::of)
            .collect::<io::Result<Vec<_>>>()?;
        let group = {
            let mut state = handle.state();
            state.cards.clone_from(&cards);
            state.group.clone()
        };
        if let Some(group) = group {
            cards.iter().try_for_each(|card| group.add(card.pid()))?;
        }
        let (ending, ran) = match adopted.take() {
            Some(boot) => {
                let (now, ran) = (Instant::now(), boot.ran);
                let ending = boot.go_on(vm, opened, progress)?;
                (ending, ran + now.elapsed())
            }
            None => {
                let started = Instant::now();
                opened.launch.mapped = mapped.at_start();
                let keeper = &keeper.of_boot(vm)?;
                let boot = NewBoot {
                    vm,
                    opened,
                    logs: &logs,
                    keeper,
                    if_lost: std::mem::replace(&mut if_lost, IfLost::Boot),
                };
                (boot.run(progress)?, started.elapsed())
            }
        };
        // A failed VM does not start again when a client wants its end, or a cell that it spans is lost.
        let may_start = || !handle.state().is_to_end() && span.and_then(Span::lost).is_none();
        if !starts_again(opened.spec.restart, &ending) || (ending != Ending::Reboot && !may_start()) {
            return Ok(ending);
        }
        let next = reboots.note(ran);
        if ending != Ending::Reboot && next != Next::End {
            progress(Progress::StartsAgain(&ending));
        }
        match next {
            Next::Boot(pause) => handle.wait_between_boots(pause),
            Next::End if ending == Ending::Reboot => return Ok(Ending::RebootLoop),
            Next::End => return Ok(ending),
        }
        if let Some(detail) = handle.state().lost.clone() {
            return Ok(Ending::ShardFailed { detail });
        }
        if ending == Ending::Reboot && handle.state().ending {
            return Ok(Ending::PowerOff);
        }
        if ending != Ending::Reboot && !may_start() {
            return Ok(ending);
        }
        opened.renew()?;
    }
}

/// The file in the VM's directory that has the log of one of its shards beside the home.
fn log_name(part: usize) -> String {
    format!("shard{part}.log")
}

/// Ends the VM when a cell is lost that it spans, until it is over.
fn watch_cells(span: &Span, handle: &VmHandle, over: &AtomicBool) {
    const LOOK: Duration = Duration::from_millis(200);
    while !over.load(Ordering::Relaxed) {
        if let Some(why) = span.lost() {
            handle.end_as_lost(why);
        }
        std::thread::sleep(LOOK);
    }
}

/// Starts a thread that copies the guest's output to the console.
fn pump(mut from: UnixStream, console: Console) -> io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name("pump".into()).spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            console.output(&buffer[..count]);
        }
    })
}
