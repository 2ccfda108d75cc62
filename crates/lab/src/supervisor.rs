//! The process that owns a lab in the background.
//!
//! Its standard input carries the lab's description; its standard output one line of JSON, the answer; then it serves
//! until SIGTERM, a dead host, or, for an automatic lab, until nobody has used it for a while.

use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use std::os::unix::process::CommandExt;

use config::lab::LabSpec;
use nix::fcntl::FlockArg;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use serde::{Deserialize, Serialize};

use crate::host::Lab;
use crate::registry::{self, Entry};
use crate::{LabError, SUPERVISOR_ARGUMENT};

/// What a supervisor is told.
#[derive(Serialize, Deserialize)]
struct Order {
    name: String,
    spec: LabSpec,
    /// End after so many seconds without a session or a VM.
    idle_s: Option<u64>,
}

static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn stop(_: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

/// Starts a lab in the background, and returns when it is up.
pub fn start(name: &str, spec: &LabSpec, idle: Option<Duration>) -> Result<Entry, LabError> {
    let failed = |source| LabError::Io {
        what: "could not start the lab's supervisor".into(),
        source,
    };
    let order = Order {
        name: name.to_string(),
        spec: spec.clone(),
        idle_s: idle.map(|idle| idle.as_secs()),
    };
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(SUPERVISOR_ARGUMENT)
        .arg(name)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .current_dir("/")
        .process_group(0);
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut input) = child.stdin.take() {
        input
            .write_all(&serde_json::to_vec(&order).map_err(|error| failed(error.into()))?)
            .map_err(failed)?;
    }
    let mut answer = String::new();
    if let Some(mut output) = child.stdout.take() {
        output.read_to_string(&mut answer).map_err(failed)?;
    }
    if let Some(reason) = answer.strip_prefix("error: ") {
        return Err(LabError::Supervisor(reason.trim_end().to_string()));
    }
    registry::find(name)?
        .ok_or_else(|| LabError::Supervisor("the lab's supervisor died while starting it".into()))
}

/// The supervisor's own `main`: its exit status.
pub fn main() -> i32 {
    let _ = nix::unistd::setsid();
    let mut text = String::new();
    let order: Order = match std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|error| error.to_string())
        .and_then(|_| serde_json::from_str(&text).map_err(|error| error.to_string()))
    {
        Ok(order) => order,
        Err(error) => return answer(&format!("error: {error}"), 2),
    };
    let action = SigAction::new(SigHandler::Handler(stop), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler only stores to an atomic.
    let _ = unsafe { sigaction(Signal::SIGTERM, &action) };
    match run(&order) {
        Ok(()) => 0,
        Err(error) => answer(&format!("error: {error}"), 1),
    }
}

/// Says it and lets go of the pipe, for which the starter waits.
fn answer(text: &str, status: i32) -> i32 {
    let _ = writeln!(std::io::stdout(), "{text}");
    if let Ok(null) = fs::File::options().write(true).open("/dev/null") {
        let _ = nix::unistd::dup2_stdout(&null);
    }
    status
}

fn run(order: &Order) -> Result<(), LabError> {
    let claim = registry::claim(&order.name)?;
    let mut lab = Lab::start(&order.spec, &claim.directory)?;
    claim.publish(&Entry {
        name: order.name.clone(),
        pid: std::process::id(),
        hosts: lab
            .hosts
            .iter()
            .map(|host| (host.name.clone(), host.door.clone()))
            .collect(),
    })?;
    answer("up", 0);
    let mut used = Instant::now();
    let mut asked = Instant::now();
    while !STOP.load(Ordering::Relaxed) {
        if lab.died().is_some() {
            break;
        }
        if let Some(idle_s) = order.idle_s
            && asked.elapsed() > Duration::from_secs(2)
        {
            asked = Instant::now();
            // Held while deciding: nobody can start a session between the decision and the end.
            let sessions =
                registry::lock(&claim.directory.join("sessions"), FlockArg::LockExclusiveNonblock)?;
            let vms = lab
                .hosts
                .iter()
                .any(|host| host.door.count_vms().unwrap_or(0) > 0);
            if sessions.is_none() || vms {
                used = Instant::now();
            } else if used.elapsed() > Duration::from_secs(idle_s) {
                let _ = fs::remove_file(claim.directory.join("state.json"));
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let _ = fs::remove_file(claim.directory.join("state.json"));
    for host in &lab.hosts {
        let _ = host.door.sync();
    }
    Ok(())
}
