//! The process that owns a lab in the background.
//!
//! Its standard input carries the lab's description, and its standard output one line of JSON, the report. It
//! then serves until SIGTERM, a dead host, or, for an automatic lab, the idle timeout.

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
use crate::registry::{self, Claim, Entry, ProgramId};
use crate::{LabError, SUPERVISOR_ARGUMENT, control, kernel};

/// Launch configuration of a supervisor.
#[derive(Serialize, Deserialize)]
struct Launch {
    name: String,
    spec: LabSpec,
    /// Number of seconds without a session or a VM after which the lab ends.
    idle_s: Option<u64>,
}

/// Report of a supervisor to its starter.
#[derive(Serialize, Deserialize)]
enum Report {
    /// The lab is up; the reasons of its restarts before.
    Up(Vec<String>),
    /// Another supervisor has the name.
    Running,
    /// The lab could not be started: the reason.
    Failed(String),
}

/// Interval at which an automatic lab checks whether it is in use.
const USE_POLL_INTERVAL: Duration = Duration::from_secs(2);

static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn stop(_: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

/// Starts a lab in the background, and returns when it is up.
pub fn start(name: &str, spec: &LabSpec, idle: Option<Duration>) -> Result<Entry, LabError> {
    // In this process, because it may take long and print.
    kernel::find(&registry::cache()?)?;
    let failed = |source| LabError::Io {
        what: "could not start the lab's supervisor".into(),
        source,
    };
    let begun = Instant::now();
    let launch = Launch {
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
            .write_all(&serde_json::to_vec(&launch).map_err(|error| failed(error.into()))?)
            .map_err(failed)?;
    }
    let mut text = String::new();
    if let Some(mut output) = child.stdout.take() {
        output.read_to_string(&mut text).map_err(failed)?;
    }
    match serde_json::from_str(&text) {
        Ok(Report::Up(false_starts)) => false_starts.iter().for_each(|why| eprintln!("mirrorball: {why}")),
        Ok(Report::Running) => return Err(LabError::Running(name.into())),
        Ok(Report::Failed(reason)) => return Err(LabError::Supervisor(reason)),
        Err(_) => {
            return Err(LabError::Supervisor(
                "the lab's supervisor died while starting it".into(),
            ));
        }
    }
    let entry = registry::find(name)?.ok_or_else(|| ended(name))?;
    eprintln!(
        "mirrorball: lab {name} is up after {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    Ok(entry)
}

/// Why the lab `name`, which was running, is not there any more.
pub fn ended(name: &str) -> LabError {
    match registry::last_words(name) {
        Some(why) => LabError::Supervisor(why),
        None => LabError::NotRunning(name.into()),
    }
}

/// The supervisor's own `main`: its exit status.
pub fn main() -> i32 {
    let _ = nix::unistd::setsid();
    let mut text = String::new();
    let launch: Launch = match std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|error| error.to_string())
        .and_then(|_| serde_json::from_str(&text).map_err(|error| error.to_string()))
    {
        Ok(launch) => launch,
        Err(error) => {
            tell(&Report::Failed(error));
            return 2;
        }
    };
    let action = SigAction::new(SigHandler::Handler(stop), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler only stores to an atomic.
    let _ = unsafe { sigaction(Signal::SIGTERM, &action) };
    let claim = match registry::claim(&launch.name) {
        Ok(claim) => claim,
        Err(error) => {
            tell(&match error {
                LabError::Running(_) => Report::Running,
                error => Report::Failed(error.chain()),
            });
            return 1;
        }
    };
    match run(&launch, &claim) {
        Ok(()) => 0,
        Err(error) => {
            claim.keep(&error.chain());
            tell(&Report::Failed(error.chain()));
            1
        }
    }
}

/// Sends the report and closes the pipe, on which the starter waits. Returns false if the starter is gone.
fn tell(answer: &Report) -> bool {
    let text = serde_json::to_string(answer).unwrap_or_default();
    let heard = writeln!(std::io::stdout(), "{text}").is_ok();
    if let Ok(null) = fs::File::options().write(true).open("/dev/null") {
        let _ = nix::unistd::dup2_stdout(&null);
    }
    heard
}

fn run(launch: &Launch, claim: &Claim) -> Result<(), LabError> {
    let mut lab = Lab::start(&launch.spec, claim)?;
    control::serve(&claim.directory, lab.links.clone())?;
    claim.publish(&Entry {
        name: launch.name.clone(),
        pid: std::process::id(),
        hosts: lab
            .hosts
            .iter()
            .map(|host| (host.name.clone(), host.access.clone()))
            .collect(),
        program: ProgramId::own()?,
    })?;
    // A lab whose start was interrupted has no user: an automatic one ends by its idle timeout, any other
    // now.
    if !tell(&Report::Up(lab.false_starts.clone())) && launch.idle_s.is_none() {
        return Ok(());
    }
    let sessions = registry::sessions(&launch.name)?;
    let mut used = Instant::now();
    let mut asked = Instant::now();
    while !STOP.load(Ordering::Relaxed) {
        if let Some(error) = lab.died() {
            return Err(error);
        }
        if let Some(idle_s) = launch.idle_s
            && asked.elapsed() > USE_POLL_INTERVAL
        {
            asked = Instant::now();
            // Held during the decision: no session can start between the decision and the end.
            let alone = registry::lock(&sessions, FlockArg::LockExclusiveNonblock)?;
            if alone.is_none()
                || lab
                    .hosts
                    .iter()
                    .any(|host| host.access.count_vms().unwrap_or(0) > 0)
            {
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
        let _ = host.access.sync();
    }
    Ok(())
}
