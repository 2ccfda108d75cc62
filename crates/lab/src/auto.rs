//! The lab that `mirrorball run` uses by itself where this machine's KVM can't run guests.
//!
//! Each user has one; it is started when first needed and goes away when no session and no VM has used it for a while.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use config::lab::LabSpec;
use nix::fcntl::FlockArg;

use crate::registry::{self, Entry};
use crate::{EXIT_LAB_DIED, IN_LAB_VARIABLE, LabError, session, supervisor};

/// Its name.
pub const NAME: &str = "auto";

/// How long it stays without being used.
const IDLE: Duration = Duration::from_secs(30);

/// Runs `mirrorball ARGV` (without the program's name) in the automatic lab, which is started if need be, with this
/// process's directory, environment, terminal and standard streams. Gives its exit status; 125 when the lab died.
pub fn enter(argv: &[OsString]) -> Result<ExitCode, LabError> {
    if inside() {
        return Err(LabError::InLab);
    }
    let directory = registry::cache()?;
    let labs = directory.join("labs").join(NAME);
    std::fs::create_dir_all(&labs).map_err(|source| LabError::Io {
        what: format!("could not make {}", labs.display()),
        source,
    })?;
    let (entry, _session) = {
        // One starter at a time; held until the session's lock is taken.
        let _starting = registry::lock(&directory.join("auto.starting"), FlockArg::LockExclusive)?;
        let session = registry::lock(&labs.join("sessions"), FlockArg::LockShared)?;
        match running() {
            Some(entry) => (entry, session),
            None => (
                start(session.is_some())?,
                registry::lock(&labs.join("sessions"), FlockArg::LockShared)?,
            ),
        }
    };
    run_in(&entry, &session::program(argv))
}

/// A lab that is just ending still has its name for a moment.
fn start(_held: bool) -> Result<Entry, LabError> {
    let mut left = 50;
    loop {
        match supervisor::start(NAME, &LabSpec::one_host(), Some(IDLE)) {
            Err(LabError::Supervisor(reason)) if left > 0 && reason.contains("running already") => {
                left -= 1;
                std::thread::sleep(Duration::from_millis(200));
            }
            result => return result,
        }
    }
}

/// The automatic lab of this user, if it runs: for `ps`, `exec` and the like, which look there too.
pub fn running() -> Option<Entry> {
    if inside() {
        return None;
    }
    registry::find(NAME).ok().flatten()
}

/// This process runs inside a lab host.
pub fn inside() -> bool {
    std::env::var_os(IN_LAB_VARIABLE).is_some()
}

pub(crate) fn run_in(entry: &Entry, argv: &[OsString]) -> Result<ExitCode, LabError> {
    let Some((_, door)) = entry.hosts.first() else {
        return Err(LabError::NotRunning(entry.name.clone()));
    };
    match door.exec(argv) {
        Ok(status) => {
            door.sync()?;
            Ok(ExitCode::from(status.code()))
        }
        Err(LabError::Agent(agent::client::ClientError::Io(_))) if registry::find(&entry.name)?.is_none() => {
            eprintln!("mirrorball: the lab died while the command ran");
            Ok(ExitCode::from(EXIT_LAB_DIED))
        }
        Err(error) => Err(error),
    }
}
