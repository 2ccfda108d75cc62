//! The lab that `mirrorball run` starts automatically where this machine's KVM can't run guests.
//!
//! Each user has one; it is started when first needed and goes away when no session and no VM has used it for
//! a while. A session is a shared lock on one file; the lab ends only under the exclusive one.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use config::lab::LabSpec;
use nix::fcntl::FlockArg;

use crate::registry::{self, Entry};
use crate::{EXIT_LAB_DIED, IN_LAB_VARIABLE, LabError, OWNER_VARIABLE, session, supervisor};

/// Name of the automatic lab.
pub const NAME: &str = "auto";

/// Idle timeout in seconds, unless [`IDLE_VARIABLE`] is set.
const IDLE_S: u64 = 30;

/// Environment variable with another idle timeout, in whole seconds.
const IDLE_VARIABLE: &str = "MIRRORBALL_LAB_IDLE_S";

/// Time limit for another process that starts or ends the lab.
const LOCK_TIMEOUT: Duration = Duration::from_secs(90);

/// Runs `mirrorball ARGV` (without the program's name) in the automatic lab, which is started if necessary,
/// with this process's directory, environment, terminal and standard streams. Returns its exit status; 125 if
/// the lab died.
pub fn enter(argv: &[OsString]) -> Result<ExitCode, LabError> {
    if inside() {
        return Err(LabError::InLab);
    }
    let sessions = registry::sessions(NAME)?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        let _session = registry::lock(&sessions, FlockArg::LockShared)?;
        let lab = match registry::find(NAME)? {
            Some(entry) => Ok(entry),
            None => supervisor::start(NAME, &LabSpec::one_host(), Some(idle()?)),
        };
        match lab {
            Ok(entry) => return run_in(&entry, argv),
            // Another process is about to start or end it.
            Err(LabError::Running(_)) if Instant::now() < deadline => {}
            Err(error) => return Err(error),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn idle() -> Result<Duration, LabError> {
    let Some(text) = std::env::var_os(IDLE_VARIABLE) else {
        return Ok(Duration::from_secs(IDLE_S));
    };
    let seconds = text.to_str().and_then(|text| text.parse().ok());
    seconds.map(Duration::from_secs).ok_or_else(|| LabError::Setting {
        name: IDLE_VARIABLE,
        value: text.to_string_lossy().into_owned(),
    })
}

/// As [`enter`], but does nothing when the automatic lab does not run: for `ps`, `exec` and similar commands,
/// whose VM may be in it.
pub fn enter_running(argv: &[OsString]) -> Result<Option<ExitCode>, LabError> {
    if inside() {
        return Ok(None);
    }
    let _session = registry::lock(&registry::sessions(NAME)?, FlockArg::LockShared)?;
    match registry::find(NAME)? {
        Some(entry) => run_in(&entry, argv).map(Some),
        None => Ok(None),
    }
}

/// The automatic lab of this user, if it runs.
pub fn running() -> Option<Entry> {
    if inside() {
        return None;
    }
    registry::find(NAME).ok().flatten()
}

/// Whether this process runs inside a lab host.
pub fn inside() -> bool {
    std::env::var_os(IN_LAB_VARIABLE).is_some()
}

/// The user outside of the lab host in which this process runs: the owner of that user's files here.
pub fn owner() -> Option<u32> {
    std::env::var(OWNER_VARIABLE)
        .ok()?
        .parse()
        .ok()
        .filter(|_| inside())
}

fn run_in(entry: &Entry, argv: &[OsString]) -> Result<ExitCode, LabError> {
    let Some((_, access)) = entry.hosts.first() else {
        return Err(LabError::NotRunning(entry.name.clone()));
    };
    let result = access
        .exec(&session::program(entry, argv)?)
        .and_then(|status| access.sync().map(|()| ExitCode::from(status.code())));
    match result {
        Err(LabError::Agent(agent::client::ClientError::Io(_))) if gone(&entry.name) => {
            eprintln!("mirrorball: {}", supervisor::ended(&entry.name).chain());
            Ok(ExitCode::from(EXIT_LAB_DIED))
        }
        result => result,
    }
}

/// The lab is not there any more; its supervisor may need a moment to see it.
pub(crate) fn gone(name: &str) -> bool {
    for _ in 0..20 {
        if matches!(registry::find(name), Ok(None)) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    false
}
