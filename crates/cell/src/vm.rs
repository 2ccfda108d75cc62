//! One VM under its monitor: opens its files once, starts its shard, watches it, starts it again after a reboot.
//!
//! The shard dies with the thread that runs [`run`] (parent-death signal) and with the control socket.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use shard::launch::{Ending, Fd, Launch, Order, Report, SandboxPolicy};

use crate::cluster::tenure::TenureError;
use crate::console::Console;
use crate::cpu_group::{CpuGroup, CpuGroupError};
use crate::frozen::Freezable;
use crate::handle::{Handle, QUIT_LIMIT};
use crate::link::Reports;
use crate::open::{OpenError, Opened};
use crate::parts::{Part, Parts};
use crate::spanning::{Boot, Span};
use crate::spawn::{self, Namespaces};

/// Why a VM did not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Its files.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its process.
    #[error("the shard cannot be started: {0}{mend}", mend = mend(.0))]
    Start(#[from] io::Error),
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
    /// What it asks for of the CPUs.
    #[error(transparent)]
    CpuGroup(#[from] CpuGroupError),
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

/// What a VM's shard told when it started.
pub struct Booted<'a> {
    /// The shard's process.
    pub pid: i32,
    /// Those of its other shards.
    pub parts: &'a [i32],
    /// What of the sandbox could not be applied.
    pub sandbox_missing: &'a [String],
}

/// Runs an opened VM until it ends, in the cells of `span` if it spans several. `booted` is called each time its vCPUs are about to run.
pub fn run(
    mut opened: Opened,
    name: &str,
    folder: &Path,
    handle: &Handle,
    span: Option<&Span>,
    mut booted: impl FnMut(Booted<'_>),
) -> Result<Ending, RunError> {
    let policy = opened.launch.sandbox;
    let namespaces = if policy == SandboxPolicy::Off {
        Namespaces::none()
    } else {
        Namespaces::probe()
    };
    if policy == SandboxPolicy::Require && !namespaces.missing.is_empty() {
        return Err(RunError::Sandbox(namespaces.missing.join("; ")));
    }
    let group = CpuGroup::of(name, &opened.spec)?;
    handle.state().cells = span.map_or_else(Vec::new, Span::cells);
    handle.console().set_input(Some(opened.console.try_clone()?));
    let pump = pump(opened.console.try_clone()?, handle.console().clone())?;
    let over = AtomicBool::new(false);
    let ending = std::thread::scope(|scope| {
        if let Some(span) = span {
            scope.spawn(|| watch_cells(span, handle, &over));
        }
        let group = group.as_ref();
        let ending = every_boot(
            &mut opened,
            name,
            folder,
            handle,
            (&namespaces, group, span),
            &mut booted,
        );
        over.store(true, Ordering::Relaxed);
        ending
    })?;
    handle.console().set_input(None);
    // With our copies of the guest's end closed, the console ends after its last byte.
    drop(opened);
    let _ = pump.join();
    Ok(ending)
}

/// Boots the VM, again and again while it reboots.
fn every_boot(
    opened: &mut Opened,
    name: &str,
    folder: &Path,
    handle: &Handle,
    (namespaces, group, span): (&Namespaces, Option<&CpuGroup>, Option<&Span>),
    booted: &mut impl FnMut(Booted<'_>),
) -> Result<Ending, RunError> {
    loop {
        let ending = one_boot(opened, name, folder, handle, (namespaces, group, span), booted)?;
        if ending != Ending::Reboot {
            return Ok(ending);
        }
        if handle.state().ending {
            return Ok(Ending::PowerOff);
        }
        opened.renew()?;
    }
}

/// Ends the VM when a cell is lost that it spans, until it is over.
fn watch_cells(span: &Span, handle: &Handle, over: &AtomicBool) {
    const LOOK: Duration = Duration::from_millis(200);
    while !over.load(Ordering::Relaxed) {
        if let Some(cell) = span.lost() {
            handle.state().lost = Some(cell);
            // It may be between two boots: the next one's end is looked at too.
            let _ = handle.order(&Order::Quit);
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
    folder: &Path,
    handle: &Handle,
    (namespaces, group, span): (&Namespaces, Option<&CpuGroup>, Option<&Span>),
    booted: &mut impl FnMut(Booted<'_>),
) -> Result<Ending, RunError> {
    let log = folder.join("shard.log");
    let log_file = std::fs::OpenOptions::new().create(true).append(true).open(&log)?;
    let program = spawn::this_program()?;
    let boot = span
        .map(|span| Boot::new(span, &opened.launch.memory))
        .transpose()?;
    let mut parts = Vec::new();
    if let (Some(span), Some(boot)) = (span, &boot) {
        for (shard, cell) in span.cells().into_iter().enumerate().skip(1) {
            span.settle(shard)?;
            let part = start_part(opened, name, folder, namespaces, group, (boot, shard, cell));
            parts.push(part.inspect_err(|_| end_all(&parts))?);
        }
        span.settle(0)?;
    }
    let part_pids: Vec<i32> = parts.iter().map(|part| part.pid).collect();
    let (mut ours, theirs) = UnixStream::pair()?;
    let spawned = spawn::spawn(
        program.as_fd(),
        name,
        "shard",
        theirs.as_fd(),
        log_file.as_fd(),
        namespaces,
    )?;
    drop(theirs);
    // It waits for what it is to run.
    if let Some(Err(error)) = group.map(|group| group.add(spawned.pid)) {
        let pid = Pid::from_raw(spawned.pid);
        let _ = kill(pid, Signal::SIGKILL);
        wait_for(pid);
        return Err(error.into());
    }
    {
        let mut state = handle.state();
        state.pid = Some(spawned.pid);
        state.orders = Some(ours.try_clone()?);
    }
    let mut launch = opened.launch.clone();
    launch.sandbox_missing = spawned.missing;
    let (handover, shards) = UnixStream::pair()?;
    let mut files: Vec<_> = opened.files.iter().map(AsFd::as_fd).collect();
    launch.handover = Fd(files.len());
    files.push(shards.as_fd());
    launch.span = boot.as_ref().map(|boot| boot.launch(0, &mut files));
    let freezable = Freezable::new(opened.spec.clone(), &launch, &opened.files, handover)?;
    if boot.is_some() {
        let (told, home) = (handle.clone(), handle.clone());
        // The home may be gone itself.
        let parts = Parts::watch(
            parts,
            move || told.changed(),
            move || drop(home.order(&Order::Quit)),
        )?;
        handle.state().parts = Some(parts);
    }
    let launch = Launch::Vm(Box::new(launch));
    let (mut ending, mut ran) = (None, false);
    // A shard that dies at once breaks the socket; its log says why.
    if shard::process::send(&mut ours, &launch, &files).is_ok() {
        handle.set_freezable(span.is_none().then_some(freezable));
        let mut reports = Reports::new(ours);
        while let Some(report) = reports.next_report() {
            match report {
                Report::Running { sandbox_missing } => {
                    ran = true;
                    booted(Booted {
                        pid: spawned.pid,
                        parts: &part_pids,
                        sandbox_missing: &sandbox_missing,
                    });
                    if handle.state().ending {
                        let _ = handle.order(&Order::Quit);
                    }
                }
                Report::Status(status) => {
                    handle.state().status = Some(status);
                    handle.changed();
                }
                Report::Moved(how) => {
                    handle.state().moved = Some(how);
                    handle.changed();
                }
                Report::Ended(how) => {
                    ending = Some(how);
                    break;
                }
            }
        }
    }
    let pid = Pid::from_raw(spawned.pid);
    if ending.is_none() {
        // A broken shard gets no say. It may be gone already.
        let _ = kill(pid, Signal::SIGKILL);
    }
    handle.set_freezable(None);
    handle.state().orders = None;
    let status = wait_for(pid);
    handle.state().pid = None;
    let parts = handle.state().parts.take();
    let cause = parts.and_then(Parts::end);
    if let Some(cell) = handle.state().lost {
        return Ok(Ending::ShardFailed {
            detail: format!("cell {cell}, which it spans, is lost; see `mirrorball cluster status`"),
        });
    }
    if let Some(cause) = cause {
        return Ok(cause);
    }
    if let (Some(Ending::ShardFailed { detail }), false) = (&ending, ran) {
        return Err(RunError::Refused {
            kernel: opened.kernel.clone(),
            detail: detail.clone(),
        });
    }
    let killed = handle.state().ending;
    Ok(ending.unwrap_or_else(|| {
        if killed {
            Ending::Quit
        } else {
            Ending::ShardFailed {
                detail: why(status, &log),
            }
        }
    }))
}

/// Starts a shard that is not the home, and waits until it is ready.
fn start_part(
    opened: &Opened,
    name: &str,
    folder: &Path,
    namespaces: &Namespaces,
    group: Option<&CpuGroup>,
    (boot, shard, cell): (&Boot, usize, u16),
) -> Result<Part, RunError> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let log = folder.join(format!("shard{shard}.log"));
    let log_file = std::fs::OpenOptions::new().create(true).append(true).open(&log)?;
    let program = spawn::this_program()?;
    let spawned = spawn::spawn(
        program.as_fd(),
        name,
        "shard",
        theirs.as_fd(),
        log_file.as_fd(),
        namespaces,
    )?;
    drop(theirs);
    let part = Part {
        cell,
        pid: spawned.pid,
        socket: ours.try_clone()?,
        log,
    };
    let started = || -> Result<(), RunError> {
        if let Some(group) = group {
            group.add(part.pid)?;
        }
        let kvm = opened.files[opened.launch.kvm.0].as_fd();
        let (launch, files) = boot.part(shard, &opened.launch, kvm, log_file.as_fd(), spawned.missing);
        // One that dies at once breaks the socket; its log says why.
        let _ = shard::process::send(&mut ours, &Launch::Part(Box::new(launch)), &files);
        part.wait_until_ready().map_err(|detail| RunError::Refused {
            kernel: opened.kernel.clone(),
            detail,
        })
    };
    started().inspect_err(|_| end_all(std::slice::from_ref(&part)))?;
    Ok(part)
}

/// Ends shards of a VM that does not start.
fn end_all(parts: &[Part]) {
    for part in parts {
        let pid = Pid::from_raw(part.pid);
        let _ = kill(pid, Signal::SIGKILL);
        wait_for(pid);
    }
}

/// Waits for our child; a shard that has reported its end and does not go is killed.
pub(crate) fn wait_for(pid: Pid) -> Option<WaitStatus> {
    let deadline = Instant::now() + QUIT_LIMIT;
    loop {
        match waitpid(pid, Some(nix::sys::wait::WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) if Instant::now() > deadline => {
                let _ = kill(pid, Signal::SIGKILL);
                return waitpid(pid, None).ok();
            }
            Ok(WaitStatus::StillAlive) => std::thread::sleep(Duration::from_millis(1)),
            Err(nix::Error::EINTR) => {}
            other => return other.ok(),
        }
    }
}

/// What is known of a shard that left no ending.
pub(crate) fn why(status: Option<WaitStatus>, log: &Path) -> String {
    let how = match status {
        Some(WaitStatus::Signaled(_, Signal::SIGSYS, _)) => {
            "made a system call that its sandbox forbids".to_owned()
        }
        Some(WaitStatus::Signaled(_, signal, _)) => format!("was ended by {signal}"),
        Some(WaitStatus::Exited(_, code)) => format!("left with status {code}"),
        _ => "is gone".to_owned(),
    };
    let text = std::fs::read_to_string(log).unwrap_or_default();
    match text.lines().last() {
        Some(last) => format!("its process {how}; it said: {last}"),
        None => format!("its process {how}"),
    }
}
