//! One VM under its monitor: opens its files once, starts its shard, watches it, starts it again after a reboot.
//!
//! The shard dies with the thread that runs [`run`] (parent-death signal) and with the control socket.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::Value;
use shard::launch::{Ending, Fd, Order, Report, SandboxPolicy};

use crate::console::Console;
use crate::cpu_group::{CpuGroup, CpuGroupError};
use crate::frozen::Freezable;
use crate::link::{Reports, send_order};
use crate::open::{OpenError, Opened};
use crate::spawn::{self, Namespaces};

/// How long a shard may take to end when it is told to; disks finish what is under way.
const QUIT_LIMIT: Duration = Duration::from_secs(5);
/// How long a shard may take to say what it counted.
const STATUS_LIMIT: Duration = Duration::from_secs(5);
/// How long a client may take to read its answer when the VM has ended.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// What others may do with a running VM. Cheap to clone; all clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Handle(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    console: Console,
    /// Locked while the VM is being frozen.
    freezable: Mutex<Option<Freezable>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Where orders go, while a shard runs.
    orders: Option<UnixStream>,
    pid: Option<i32>,
    status: Option<Value>,
    /// No shard starts any more.
    over: bool,
    /// Somebody wants the end: a reboot ends it too.
    ending: bool,
    /// Clients that wait for an answer.
    asking: usize,
}

/// A client that waits for an answer, until dropped.
pub struct Asking<'a>(&'a Handle);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.state().asking -= 1;
        self.0.0.changed.notify_all();
    }
}

impl Handle {
    /// The console.
    pub fn console(&self) -> &Console {
        &self.0.console
    }

    /// Gives an order to the shard.
    pub fn order(&self, order: &Order) -> io::Result<()> {
        match &self.state().orders {
            Some(socket) => send_order(socket, order),
            None => Err(io::Error::other("the VM is not running just now")),
        }
    }

    /// Freezes the VM for `client`.
    pub fn freeze(&self, client: &mut UnixStream) -> io::Result<()> {
        match &mut *self.freezable() {
            Some(freezable) => freezable.serve(client),
            None => Err(io::Error::other("the VM is not running just now")),
        }
    }

    /// Runs of pages that the VM has touched so far, by their first and their number.
    pub fn touched(&self) -> io::Result<Vec<(u64, u64)>> {
        match &mut *self.freezable() {
            Some(freezable) => freezable.touched(),
            None => Err(io::Error::other("the VM is not running just now")),
        }
    }

    fn set_freezable(&self, freezable: Option<Freezable>) {
        *self.freezable() = freezable;
    }

    fn freezable(&self) -> MutexGuard<'_, Option<Freezable>> {
        self.0.freezable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the shard counted.
    pub fn status(&self) -> io::Result<Value> {
        self.state().status = None;
        self.order(&Order::Status)?;
        let state = self.wait(STATUS_LIMIT, |state| state.status.is_some() || state.over);
        state
            .status
            .clone()
            .ok_or_else(|| io::Error::other("the VM does not answer"))
    }

    /// Presses the power button and waits; kills the VM after `limit`. True when it had to.
    pub fn stop(&self, limit: Duration) -> bool {
        self.state().ending = true;
        // A VM between two boots sees `ending` instead.
        let _ = self.order(&Order::PowerButton);
        if self.wait(limit, |state| state.over).over {
            return false;
        }
        self.kill();
        true
    }

    /// Ends the VM now: by order, and if it does not obey, by force. Returns when it has ended.
    pub fn kill(&self) {
        self.state().ending = true;
        let _ = self.order(&Order::Quit);
        let state = self.wait(QUIT_LIMIT, |state| state.over);
        if let Some(pid) = state.pid {
            // It is our child and not waited for while it is in the state: the number is its own.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        drop(state);
        drop(self.wait(QUIT_LIMIT, |state| state.over));
    }

    /// The VM has ended: nobody waits for it any more.
    pub fn over(&self) {
        self.state().over = true;
        self.0.changed.notify_all();
        self.0.console.close();
    }

    /// Notes that a client waits for an answer.
    pub fn asking(&self) -> Asking<'_> {
        self.state().asking += 1;
        Asking(self)
    }

    /// Waits until nobody waits for an answer: a monitor must not end before it has told how its VM did.
    pub fn all_answered(&self) {
        drop(self.wait(ANSWER_LIMIT, |state| state.asking == 0));
    }

    fn wait(&self, limit: Duration, mut until: impl FnMut(&State) -> bool) -> MutexGuard<'_, State> {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        while !until(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self
                .0
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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
    /// What of the sandbox could not be applied.
    pub sandbox_missing: &'a [String],
}

/// Runs an opened VM until it ends. `booted` is called each time its vCPUs are about to run.
pub fn run(
    mut opened: Opened,
    name: &str,
    folder: &Path,
    handle: &Handle,
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
    handle.console().set_input(Some(opened.console.try_clone()?));
    let pump = pump(opened.console.try_clone()?, handle.console().clone())?;
    let ending = loop {
        let ending = one_boot(
            &opened,
            name,
            folder,
            handle,
            &namespaces,
            group.as_ref(),
            &mut booted,
        )?;
        if ending != Ending::Reboot {
            break ending;
        }
        if handle.state().ending {
            break Ending::PowerOff;
        }
        opened.renew()?;
    };
    handle.console().set_input(None);
    // With our copies of the guest's end closed, the console ends after its last byte.
    drop(opened);
    let _ = pump.join();
    Ok(ending)
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
    namespaces: &Namespaces,
    group: Option<&CpuGroup>,
    booted: &mut impl FnMut(Booted<'_>),
) -> Result<Ending, RunError> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let log = folder.join("shard.log");
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
    let freezable = Freezable::new(opened.spec.clone(), &launch, &opened.files, handover)?;
    let (mut ending, mut ran) = (None, false);
    // A shard that dies at once breaks the socket; its log says why.
    if shard::process::send(&mut ours, &launch, &files).is_ok() {
        handle.set_freezable(Some(freezable));
        let mut reports = Reports::new(ours);
        while let Some(report) = reports.next_report() {
            match report {
                Report::Running { sandbox_missing } => {
                    ran = true;
                    booted(Booted {
                        pid: spawned.pid,
                        sandbox_missing: &sandbox_missing,
                    });
                    if handle.state().ending {
                        let _ = handle.order(&Order::Quit);
                    }
                }
                Report::Status(status) => {
                    handle.state().status = Some(status);
                    handle.0.changed.notify_all();
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

/// Waits for our child; a shard that has reported its end and does not go is killed.
fn wait_for(pid: Pid) -> Option<WaitStatus> {
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
fn why(status: Option<WaitStatus>, log: &Path) -> String {
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
