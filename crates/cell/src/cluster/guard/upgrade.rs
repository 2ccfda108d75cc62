//! The replacement of a cell's program while its VMs run (`docs/guide/clusters.md`, "Upgrades").
//!
//! The guard itself is not replaced: it starts processes and checks that they live, and its protocol is only
//! extended.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::geteuid;
use registry::cluster::client::Connection;
use registry::cluster::files::CellFiles;
use registry::cluster::guard::{GuardRequest, GuardResponse};
use registry::cluster::interface::{CellRequest, CellResponse};
use shard_api::message::{receive_by, send};
use tracing::warn;

use crate::socket::bind;

/// Time limit for a client's request.
const REQUEST_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for the first process of a new program to adopt the cell's VMs.
const TRIAL_LIMIT: Duration = Duration::from_secs(30);
/// Interval between two attempts to reach it.
const INTERVAL: Duration = Duration::from_millis(5);

/// Listens for requests to replace the program.
///
/// # Errors
/// If the socket can't be made.
pub(super) fn listen(path: &Path) -> io::Result<UnixListener> {
    let _ = std::fs::remove_file(path);
    let listener = bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// A client that requests another program.
#[derive(Debug)]
pub(super) struct Upgrade {
    client: UnixStream,
    /// The new program.
    pub(super) program: File,
}

impl Upgrade {
    /// Accepts the next request, if one waits. An invalid request is answered, and returns none.
    pub(super) fn take(listener: &UnixListener) -> Option<Self> {
        let (mut client, _) = listener.accept().ok()?;
        match received(&mut client) {
            Ok(program) => Some(Self { client, program }),
            Err(error) => {
                warn!(%error, "a request to replace the cell's program is refused");
                let why = error.to_string();
                let _ = answer(&mut client, &GuardResponse::Refused { why });
                None
            }
        }
    }

    /// Answers the client. One that has gone needs no answer.
    pub(super) fn answer(mut self, outcome: Result<(), String>) {
        let outcome = match outcome {
            Ok(()) => GuardResponse::Done,
            Err(why) => GuardResponse::Refused { why },
        };
        let _ = answer(&mut self.client, &outcome);
    }
}

fn answer(client: &mut UnixStream, answer: &GuardResponse) -> io::Result<()> {
    client.set_write_timeout(Some(REQUEST_LIMIT))?;
    send(client, answer, &[]).map_err(io::Error::other)
}

/// The program that a client sends.
fn received(client: &mut UnixStream) -> io::Result<File> {
    client.set_nonblocking(false)?;
    let uid = getsockopt(client, sockopt::PeerCredentials)?.uid();
    if uid != 0 && uid != geteuid().as_raw() {
        return Err(io::Error::other(
            "only the cluster's owner replaces its program; help: run `cluster upgrade` as that user or root",
        ));
    }
    let (GuardRequest::Upgrade { program }, mut files) =
        receive_by(client, Instant::now() + REQUEST_LIMIT).map_err(io::Error::other)?;
    let program = files.take(program).map_err(io::Error::other)?;
    check(&program).map_err(io::Error::other)?;
    Ok(program)
}

const PROGRAM_HELP: &str = "help: run `cluster upgrade` by an installed `mirrorball`";

/// A reason why a descriptor is no program for a cell.
#[derive(Debug, thiserror::Error)]
enum ProgramError {
    #[error("{0}")]
    Metadata(io::Error),
    #[error("the new program is no executable file; {PROGRAM_HELP}")]
    NotExecutable,
    #[error("others may change the file of the new program; {PROGRAM_HELP}")]
    OthersMayChange,
    #[error("{0}")]
    Flags(Errno),
    #[error("the new program is open for writing; {PROGRAM_HELP}")]
    Writable,
}

/// Checks that a descriptor is a program that only root and this user can change.
fn check(program: &File) -> Result<(), ProgramError> {
    let metadata = program.metadata().map_err(ProgramError::Metadata)?;
    if !metadata.is_file() || metadata.mode() & 0o111 == 0 {
        return Err(ProgramError::NotExecutable);
    }
    let may_own = [0, geteuid().as_raw()];
    if !may_own.contains(&metadata.uid()) || metadata.mode() & 0o022 != 0 {
        return Err(ProgramError::OthersMayChange);
    }
    let flags = fcntl(program, FcntlArg::F_GETFL).map_err(ProgramError::Flags)?;
    if OFlag::from_bits_truncate(flags) & OFlag::O_ACCMODE != OFlag::O_RDONLY {
        return Err(ProgramError::Writable);
    }
    Ok(())
}

/// The path by which this process starts the program.
pub(super) fn path_of(program: &OwnedFd) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), program.as_raw_fd())
}

/// A reason why a new program is not kept.
#[derive(Debug, thiserror::Error)]
pub(super) enum TrialError {
    #[error("the new program does not start: {0}")]
    NotStarted(io::Error),
    #[error("the new program ended ({status}) before it had adopted the cell's VMs; help: see {log}")]
    Ended { status: ExitStatus, log: String },
    #[error(
        "the new program had not adopted the cell's VMs within {} s",
        TRIAL_LIMIT.as_secs()
    )]
    Late,
    /// The new program's answer.
    #[error("{0}")]
    Refused(String),
}

/// Waits until the first process of a new program has adopted the VMs of its cell.
///
/// # Errors
/// If it ends, hangs, or can't adopt a VM.
pub(super) fn try_out(cell: &mut Child, files: &CellFiles) -> Result<(), TrialError> {
    let deadline = Instant::now() + TRIAL_LIMIT;
    loop {
        if let Ok(Some(status)) = cell.try_wait() {
            let log = files.log().display().to_string();
            return Err(TrialError::Ended { status, log });
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(TrialError::Late);
        }
        let answer = Connection::open(files).and_then(|mut connection| {
            connection.limit_wait(left)?;
            connection.ask(&CellRequest::Trial)
        });
        match answer {
            Ok(CellResponse::Done) => return Ok(()),
            Ok(CellResponse::Refused { why }) => return Err(TrialError::Refused(why)),
            // The process has just started, or ends.
            Ok(_) | Err(_) => std::thread::sleep(INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn program_that_others_may_change_or_that_is_none_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        std::fs::write(&path, "").unwrap();
        let with_mode = |mode| {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            check(&File::open(&path).unwrap())
        };
        with_mode(0o755).unwrap();
        with_mode(0o500).unwrap();
        for mode in [0o644, 0o775, 0o757, 0o777] {
            let why = with_mode(mode).unwrap_err().to_string();
            assert!(why.contains("; help: "), "{why}");
        }
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        let writable = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        assert!(check(&writable).is_err());
        assert!(check(&File::open(folder.path()).unwrap()).is_err());
        assert!(check(&File::open("/dev/null").unwrap()).is_err());
    }

    #[test]
    fn request_without_a_program_is_refused_and_one_that_never_comes_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("guard.sock");
        let listener = listen(&path).unwrap();
        assert!(Upgrade::take(&listener).is_none());
        for request in ["{}\n", "{\"ask\":\"upgrade\",\"program\":0}\n", "x"] {
            let mut client = UnixStream::connect(&path).unwrap();
            io::Write::write_all(&mut client, request.as_bytes()).unwrap();
            let begun = Instant::now();
            assert!(Upgrade::take(&listener).is_none());
            assert!(begun.elapsed() < Duration::from_secs(10));
            let (answer, _) = shard_api::message::receive::<GuardResponse>(&mut client).unwrap();
            assert!(matches!(answer, GuardResponse::Refused { .. }), "{answer:?}");
        }
    }
}
