//! One VM under this process: opens it, starts its shard, watches it, starts it again after a reboot.
//!
//! The shard dies with the thread that runs this (parent-death signal) and with the control socket.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use config::VmSpec;
use shard::launch::{Ending, Order, Report, SandboxPolicy};

use crate::console::Console;
use crate::link::{Reports, send_launch, send_order};
use crate::open::{self, OpenError};
use crate::spawn::{self, Namespaces};

/// What others may reach of a running VM.
#[derive(Debug, Default)]
pub struct Handle {
    /// Its console.
    pub console: Mutex<Console>,
    /// Where orders go; absent while no shard runs.
    pub orders: Mutex<Option<UnixStream>>,
    /// Where the console's input goes.
    pub input: Mutex<Option<UnixStream>>,
    /// The shard's process, 0 while there is none.
    pub pid: std::sync::atomic::AtomicI32,
}

/// Why a VM did not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Its files.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its process.
    #[error("starting the shard failed: {0}")]
    Start(#[source] io::Error),
    /// The sandbox is required.
    #[error("the sandbox is incomplete ({0}); run with --sandbox=auto to go on without it")]
    Sandbox(String),
}

impl Handle {
    /// Gives an order to the shard, when one runs.
    pub fn order(&self, order: &Order) -> io::Result<()> {
        match &*self.orders.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(socket) => send_order(socket, order),
            None => Err(io::Error::other("the VM is not running")),
        }
    }
}

/// Runs a VM until it ends. `running` is called each time its shard runs, with what its sandbox lacks.
pub fn run(
    spec: &VmSpec,
    name: &str,
    folder: &Path,
    cid: u32,
    handle: &Arc<Handle>,
    mut running: impl FnMut(&[String]),
) -> Result<Ending, RunError> {
    loop {
        // The socket's name is free again after a reboot.
        let _ = std::fs::remove_file(folder.join("vsock.sock"));
        let mut opened = open::open(spec, name, folder, cid)?;
        let namespaces = if opened.launch.sandbox == SandboxPolicy::Off {
            Namespaces::none()
        } else {
            Namespaces::probe()
        };
        if opened.launch.sandbox == SandboxPolicy::Require && !namespaces.missing.is_empty() {
            return Err(RunError::Sandbox(namespaces.missing.join("; ")));
        }
        let ending = one_boot(&mut opened, name, folder, handle, &namespaces, &mut running)
            .map_err(RunError::Start)?;
        if ending != Ending::Reboot {
            return Ok(ending);
        }
    }
}

fn one_boot(
    opened: &mut open::Opened,
    name: &str,
    folder: &Path,
    handle: &Arc<Handle>,
    namespaces: &Namespaces,
    running: &mut impl FnMut(&[String]),
) -> io::Result<Ending> {
    let (ours, theirs) = UnixStream::pair()?;
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("shard.log"))?;
    let program = spawn::this_program()?;
    let spawned = spawn::spawn(
        program.as_fd(),
        name,
        "shard",
        theirs.as_fd(),
        log.as_fd(),
        namespaces,
    )?;
    drop(theirs);
    handle
        .pid
        .store(spawned.pid, std::sync::atomic::Ordering::Release);
    opened.launch.sandbox_missing = spawned.missing;
    let sent = send_launch(&ours, &opened.launch, &opened.files);
    // The shard has its own copies; ours would keep its sockets open after its end.
    opened.files.clear();
    *handle.orders.lock().unwrap_or_else(PoisonError::into_inner) = Some(ours.try_clone()?);
    *handle.input.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened.console.try_clone()?);
    let mut output = opened.console.try_clone()?;
    let copy = Arc::clone(handle);
    let pump = std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = output.read(&mut buffer) {
            copy.console
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .output(&buffer[..count]);
        }
    });
    let mut reports = Reports::new(ours.try_clone()?);
    let mut ending = None;
    if sent.is_ok() {
        while let Some(report) = reports.next_report() {
            match report {
                Report::Running { sandbox_missing } => running(&sandbox_missing),
                Report::Status(_) => {}
                Report::Ended(how) => {
                    ending = Some(how);
                    break;
                }
            }
        }
    }
    *handle.orders.lock().unwrap_or_else(PoisonError::into_inner) = None;
    *handle.input.lock().unwrap_or_else(PoisonError::into_inner) = None;
    handle.pid.store(0, std::sync::atomic::Ordering::Release);
    drop(ours);
    // Closing the control socket ends a healthy shard; a broken one gets no say.
    // SAFETY: kill touches no memory; the pid is our child, not yet waited for.
    if ending.is_none() {
        unsafe { libc::kill(spawned.pid, libc::SIGKILL) };
    }
    let end = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(spawned.pid), None);
    let _ = pump.join();
    Ok(ending.unwrap_or_else(|| {
        let log = std::fs::read_to_string(folder.join("shard.log")).unwrap_or_default();
        let last = log.lines().last().unwrap_or("it left no word").to_owned();
        Ending::ShardFailed {
            detail: format!("{last} ({end:?})"),
        }
    }))
}
