//! One VM under its monitor: opens its files once, starts its shard, watches it, starts it again after a reboot.
//!
//! The shard dies with the thread that runs [`run`] (parent-death signal) and with the control socket.

use std::cell::RefCell;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use shard_api::launch::{DiskLaunch, Ending, Fd, Launch, Order, Report, SandboxPolicy};
use shard_api::ports;

use crate::cluster::tenure::TenureError;
use crate::coherence;
use crate::console::Console;
use crate::control_group::{ControlGroup, ControlGroupError};
use crate::core_scheduling::{self, CoreSchedulingError};
use crate::ending::{of_gone, of_part};
use crate::frozen::Freezable;
use crate::handle::Handle;
use crate::identity::{Given, Place};
use crate::mapped_files::MappedFiles;
use crate::open::{OpenError, Opened};
use crate::parts::{Part, Parts};
use crate::reboot::{Next, Reboots, starts_again};
use crate::remote::clock::keeper::Keeper;
use crate::shard_limits::ShardLimits;
use crate::shard_log::ShardLog;
use crate::shard_process::ShardProcess;
use crate::shard_program::{ShardProgram, ShardProgramError};
use crate::spanning::{Boot, Span};
use crate::spawn::Namespaces;

/// Why a VM did not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Its files.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its process.
    #[error("the shard cannot be started: {0}{mend}", mend = mend(.0))]
    Start(#[from] io::Error),
    /// The shard's program is of another build.
    #[error(transparent)]
    Program(#[from] ShardProgramError),
    /// The shard says that it can't make this VM.
    #[error("the VM cannot start with the kernel {kernel}: {detail}")]
    Refused {
        /// The kernel's file.
        kernel: std::path::PathBuf,
        /// The shard's words.
        detail: String,
    },
    /// One of its cells.
    #[error(transparent)]
    Tenure(#[from] TenureError),
    /// What it asks for of the host.
    #[error(transparent)]
    ControlGroup(#[from] ControlGroupError),
    /// Cores of its own.
    #[error(transparent)]
    CoreScheduling(#[from] CoreSchedulingError),
    /// The sandbox is required.
    #[error("the sandbox is incomplete ({0}); run with --sandbox=auto to go on without it")]
    Sandbox(String),
}

/// What a person can do about an error of the start, to go behind it.
fn mend(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => {
            "; raise the limit of open files (`ulimit -Hn`), or start fewer VMs with one command"
        }
        _ => "",
    }
}

/// What a VM's shard reports while it runs.
pub enum Progress<'a> {
    /// Its vCPUs are about to run; again after each reboot.
    Booted(Booted<'a>),
    /// The disks whose writes wait for room on the host are these now, by name.
    FullDisks(&'a [String]),
    /// Whether it stands still by order.
    Paused(bool),
    /// It has ended so, and starts again.
    StartsAgain(&'a Ending),
}

/// What a VM's shard told when it started.
pub struct Booted<'a> {
    /// The shard's process.
    pub pid: i32,
    /// Those of its other shards.
    pub parts: &'a [i32],
    /// What of the sandbox could not be applied.
    pub sandbox_missing: &'a [String],
    /// Missing layers that `require` does not insist on.
    pub sandbox_notes: &'a [String],
    /// The kernel's marks of the VM's cores, one for each shard; none without core scheduling.
    pub core_cookies: &'a [u64],
}

/// What shards' processes execute, and in which namespaces.
type Start<'a> = (&'a Arc<ShardProgram>, &'a Namespaces);

/// Runs an opened VM until it ends, in the cells of `span` if it spans several. Its shards execute `program`. `progress` is
/// called with what its shard reports.
pub fn run(
    mut opened: Opened,
    program: &Arc<ShardProgram>,
    name: &str,
    folder: &Path,
    handle: &Handle,
    span: Option<&Span>,
    mut progress: impl FnMut(Progress<'_>),
) -> Result<Ending, RunError> {
    let policy = opened.launch.sandbox.policy;
    let namespaces = if policy == SandboxPolicy::Off {
        Namespaces::none()
    } else {
        Namespaces::probe()
    };
    if policy == SandboxPolicy::Require && !namespaces.missing.is_empty() {
        return Err(RunError::Sandbox(namespaces.missing.join("; ")));
    }
    if opened.spec.core_scheduling && span.is_some_and(Span::has_remote_parts) {
        return Err(CoreSchedulingError::OtherHosts.into());
    }
    let group = ControlGroup::of(name, &opened.spec, opened.disk_files())?;
    handle.state().filtered = opened.filtered();
    handle.state().cells = span.map_or_else(Vec::new, Span::cells);
    handle.state().has_remote_parts = span.is_some_and(Span::has_remote_parts);
    handle.console().set_input(Some(opened.console.try_clone()?));
    let pump = pump(opened.console.try_clone()?, handle.console().clone())?;
    let over = AtomicBool::new(false);
    let mapped = MappedFiles::of(&opened.claims);
    let (stop_watching, watched) = mpsc::channel();
    handle.state().group = group.map(Arc::new);
    let ended = std::thread::scope(|scope| {
        let mapped = &mapped;
        scope.spawn(move || mapped.watch(handle, &watched));
        if let Some(span) = span {
            scope.spawn(|| watch_cells(span, handle, &over));
        }
        let ending = every_boot(
            &mut opened,
            name,
            folder,
            handle,
            ((program, &namespaces), span),
            mapped,
            &mut progress,
        );
        drop(stop_watching);
        over.store(true, Ordering::Relaxed);
        ending
    });
    handle.console().set_input(None);
    let group = handle.state().group.take();
    // With our copies of the guest's end closed, the console ends after its last byte. The processes of cards end too,
    // and only then the group can.
    drop(opened);
    drop(group);
    let _ = pump.join();
    ended
}

/// Boots the VM, again and again while it reboots.
fn every_boot(
    opened: &mut Opened,
    name: &str,
    folder: &Path,
    handle: &Handle,
    (start, span): (Start<'_>, Option<&Span>),
    mapped: &MappedFiles,
    progress: &mut impl FnMut(Progress<'_>),
) -> Result<Ending, RunError> {
    let shards = span.map_or(1, |span| span.cells().len());
    let mut logs = vec![opened.log.clone()];
    for part in 1..shards {
        logs.push(Arc::new(ShardLog::start(&folder.join(log_name(part)))?));
    }
    let mut reboots = Reboots::default();
    loop {
        // They are new after each reboot.
        let helpers: Vec<u32> = opened.helper_pids().collect();
        let group = {
            let mut state = handle.state();
            state.helpers.clone_from(&helpers);
            state.group.clone()
        };
        if let Some(group) = group {
            helpers.iter().try_for_each(|pid| group.add(pid.cast_signed()))?;
        }
        let started = Instant::now();
        opened.launch.mapped = mapped.at_start();
        let ending = one_boot(opened, name, &logs, handle, (start, span), progress)?;
        // A failed VM does not start again when a client wants its end, or a cell that it spans is lost.
        let may_start = || !handle.state().ending && span.and_then(Span::lost).is_none();
        if !starts_again(opened.spec.restart, &ending) || (ending != Ending::Reboot && !may_start()) {
            return Ok(ending);
        }
        let next = reboots.note(started.elapsed());
        if ending != Ending::Reboot && next != Next::End {
            progress(Progress::StartsAgain(&ending));
        }
        match next {
            Next::Boot(pause) => handle.wait_between_boots(pause),
            Next::End if ending == Ending::Reboot => return Ok(Ending::RebootLoop),
            Next::End => return Ok(ending),
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
fn watch_cells(span: &Span, handle: &Handle, over: &AtomicBool) {
    const LOOK: Duration = Duration::from_millis(200);
    while !over.load(Ordering::Relaxed) {
        if let Some(why) = span.lost() {
            handle.state().lost = Some(why);
            // It may be between two boots: the next one's end is looked at too.
            handle.quit();
        }
        std::thread::sleep(LOOK);
    }
}

/// Moves the console's output.
fn pump(mut from: UnixStream, console: Console) -> io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name("pump".into()).spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            console.output(&buffer[..count]);
        }
    })
}

fn one_boot(
    opened: &Opened,
    name: &str,
    logs: &[Arc<ShardLog>],
    handle: &Handle,
    ((program, namespaces), span): (Start<'_>, Option<&Span>),
    progress: &mut impl FnMut(Progress<'_>),
) -> Result<Ending, RunError> {
    let cid = opened.launch.vsock.as_ref().map_or(0, |vsock| vsock.cid);
    let given = Given::of(Place::Vm(cid));
    let policy = opened.launch.sandbox.policy;
    let cookies = RefCell::new(Vec::new());
    let start = |shard: usize| {
        // Only the home has disks.
        let disk_file_bytes = if shard == 0 { opened.disk_file_bytes } else { 0 };
        let limits = ShardLimits::new(opened.launch.memory.bytes, disk_file_bytes);
        let log = logs[shard].clone();
        let process = ShardProcess::start(program, name, log, limits, policy, namespaces, &given)?;
        let group = handle.state().group.clone();
        if let Some(group) = group {
            group.add(process.pid)?;
        }
        if opened.spec.is_coherent() {
            coherence::permit_priority(process.pid);
        }
        if opened.spec.core_scheduling {
            // Its one thread waits for its launch: those that it starts have the cookie too.
            cookies.borrow_mut().push(core_scheduling::isolate(process.pid)?);
        }
        Ok::<_, RunError>(process)
    };
    // The group outlives the boot.
    let killed_before = killed_for_memory(handle);
    let boot = span
        .map(|span| {
            let is_coherent = opened.spec.is_coherent();
            let kernel = is_coherent.then(|| opened.kernel_file()).transpose()?;
            let image = kernel.map(|mut file| span.kernel_image(&mut file));
            Boot::new(span, &opened.launch.memory, image)
        })
        .transpose()?;
    let timed = handle.clone();
    let keep_time = |boot: &Boot| boot.keep_time(move |step| timed.step(step));
    let keeper = boot.as_ref().map(keep_time).transpose()?.flatten();
    let (mut parts, mut missing_elsewhere) = (None, Vec::new());
    if let (Some(span), Some(boot)) = (span, &boot) {
        handle.state().clocks = boot.clocks().cloned();
        let (told, home) = (handle.clone(), handle.clone());
        let (started, missing) = start_parts(opened, start, span, boot)?;
        missing_elsewhere = missing;
        // The home may not be there yet, or no longer.
        let watched = Parts::watch(started, move || told.changed(), move || home.part_ended());
        parts = Some(watched?);
        span.settle(0)?;
    }
    let part_pids = parts.as_ref().map_or_else(Vec::new, Parts::pids);
    let mut files: Vec<_> = opened.files.iter().map(AsFd::as_fd).collect();
    let mut launch = opened.launch.clone();
    let (handover, shards) = UnixStream::pair()?;
    launch.handover = Fd(files.len());
    files.push(shards.as_fd());
    let (connects, asks) = ports::pair()?;
    if let Some(vsock) = &mut launch.vsock {
        vsock.ports = Some(Fd(files.len()));
        files.push(asks.as_fd());
    }
    let _ports = ports::Service::start(connects, opened.ports.try_clone()?)?;
    launch.log = Fd(files.len());
    files.push(logs[0].as_fd());
    launch.span = boot.as_ref().map(|boot| boot.launch(0, &mut files));
    let freezable = boot
        .is_none()
        .then(|| Freezable::new(opened, &launch, handover))
        .transpose()?;
    let home = Arc::new(start(0)?);
    launch.sandbox = home.sandbox.clone();
    let mut reports = home.link.reports()?;
    handle.state().start(home.clone(), parts);
    // One that was made while these started did not find them.
    let group = handle.state().group.clone();
    if let Some(group) = group {
        std::iter::once(home.pid)
            .chain(part_pids.iter().copied())
            .try_for_each(|pid| group.add(pid))?;
    }
    let (mut reported, mut ran, mut refused) = (None, false, None);
    // One that dies at once breaks the socket; its log says why.
    if home.link.launch(&Launch::Vm(Box::new(launch)), &files).is_ok() {
        handle.set_freezable(freezable);
        while let Some(report) = reports.next_report() {
            match report {
                Report::Running {
                    mut sandbox_missing,
                    sandbox_notes,
                } => {
                    ran = true;
                    handle.state().runs = true;
                    handle.pin_again();
                    keeper.iter().for_each(Keeper::begin);
                    sandbox_missing.append(&mut missing_elsewhere);
                    progress(Progress::Booted(Booted {
                        pid: home.pid,
                        parts: &part_pids,
                        sandbox_missing: &sandbox_missing,
                        sandbox_notes: &sandbox_notes,
                        core_cookies: &cookies.borrow(),
                    }));
                    // Who wanted that before could not tell it.
                    if handle.state().is_to_end() {
                        let _ = handle.order(&Order::Quit);
                    }
                }
                Report::Answer { to, answer } => {
                    let paused = handle.state().paused_by(to, &answer);
                    // The client that waits for the answer finds the record true.
                    paused
                        .iter()
                        .for_each(|paused| progress(Progress::Paused(*paused)));
                    handle.state().note_answer(to, answer);
                    handle.changed();
                }
                Report::FullDisks { disks } => {
                    progress(Progress::FullDisks(&names_of_disks(&disks, &opened.launch.disks)));
                }
                Report::Ended(how) => {
                    reported = Some(how);
                    break;
                }
                Report::OtherVersion { version } => {
                    // Later it makes no sense: then the shard is broken.
                    refused = (!ran).then(|| home.program.other_version(&version));
                    break;
                }
            }
        }
    }
    drop(keeper);
    handle.end_freezable();
    handle.end_orders();
    // A broken shard gets no say.
    let gone = if reported.is_none() {
        home.kill()
    } else {
        home.wait()
    };
    // Before it ran its status may be another program's.
    let mut ending = reported.or_else(|| home.ending_of_exit(&gone).filter(|_| ran));
    let is_out_of_memory = killed_for_memory(handle) > killed_before;
    let (parts, was_told) = {
        let mut state = handle.state();
        (state.home, state.runs) = (None, false);
        if ending.is_none() && state.is_cut_off {
            ending = Some(Ending::Quit);
        }
        (state.parts.take(), state.ending)
    };
    let cause = parts.and_then(|parts| parts.end(ending.as_ref()));
    if let Some(detail) = handle.state().lost.clone() {
        return Ok(Ending::ShardFailed { detail });
    }
    if let Some(cause) = of_part(ending.as_ref(), cause, was_told) {
        return Ok(cause);
    }
    if let Some(refused) = refused {
        return Err(refused.into());
    }
    if let (Some(Ending::ShardFailed { detail }), false) = (&ending, ran) {
        return Err(RunError::Refused {
            kernel: opened.kernel.clone(),
            detail: detail.clone(),
        });
    }
    Ok(ending.unwrap_or(if was_told {
        Ending::Quit
    } else {
        of_gone(gone, is_out_of_memory)
    }))
}

/// How many processes of the VM the kernel has killed for the VM's limit of memory.
fn killed_for_memory(handle: &Handle) -> u64 {
    let group = handle.state().group.clone();
    group.map_or(0, |group| group.killed_for_memory())
}

/// The names of the disks with these numbers. A shard in a guest's hands may report any.
fn names_of_disks(numbers: &[u16], disks: &[DiskLaunch]) -> Vec<String> {
    let is_named = |number: &usize| numbers.iter().any(|named| usize::from(*named) == *number);
    let named = disks.iter().enumerate().filter(|(number, _)| is_named(number));
    named.map(|(_, disk)| disk.id.clone()).collect()
}

/// Starts the shards beside the home, each in its cell, and waits until they are ready. And what the sandboxes of those on other
/// hosts lack.
fn start_parts(
    opened: &Opened,
    start: impl Fn(usize) -> Result<ShardProcess, RunError>,
    span: &Span,
    boot: &Boot,
) -> Result<(Vec<Part>, Vec<String>), RunError> {
    let (mut parts, mut missing_elsewhere) = (Vec::new(), Vec::new());
    for (shard, cell) in span.cells().into_iter().enumerate().skip(1) {
        let refused = |detail| RunError::Refused {
            kernel: opened.kernel.clone(),
            detail,
        };
        if let Some(remote) = span.remote(shard) {
            let place = remote.reach().to_string();
            let told = boot.remote(span, shard, &opened.launch);
            let told = told.ok_or_else(|| refused(format!("{place}: it has no coherent memory")))?;
            let started = remote.start(told);
            started.map_err(|error| refused(format!("{place}: {error}")))?;
            let part = Part::There(remote.clone());
            missing_elsewhere.extend(part.wait_until_ready().map_err(refused)?);
            parts.push(part);
            continue;
        }
        span.settle(shard)?;
        let process = start(shard)?;
        let kvm = opened.files[opened.launch.kvm.0].as_fd();
        let sandbox = process.sandbox.clone();
        let (launch, files) = boot.part(shard, &opened.launch, kvm, process.log.as_fd(), sandbox);
        // One that dies at once breaks the socket; its log says why.
        let _ = process.link.launch(&Launch::Part(Box::new(launch)), &files);
        let part = Part::Here { cell, process };
        part.wait_until_ready().map_err(refused)?;
        parts.push(part);
    }
    Ok((parts, missing_elsewhere))
}
