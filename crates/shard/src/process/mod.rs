//! The shard's process, from the first message of its monitor to the last report.
//!
//! Order matters: receive the spec and the files; make the machine and every device; close the sandbox before
//! any thread serves the guest; start the threads; report; seal the first thread; run the vCPUs; wait.

mod control;
mod freeze;
mod hold;
mod log;
mod open;
mod opened_vm;
pub(crate) mod order_reader;
mod orders;
mod secondary;
mod status;
mod vcpus;

use std::io;
use std::os::fd::IntoRawFd;
use std::process::ExitCode;

use kvm_ioctls::Kvm;
use nix::sys::signal::{SigHandler, Signal, signal};
use shard_api::control::ControlSocket;
use tracing::error;

use crate::chain::chain;
use crate::devices::DevicesError;
use crate::kind::ResumedSpan;
use crate::launch::{Ending, Fd, Launch, LaunchSpec, Report};
use crate::machine::MachineError;
use crate::sandbox::{self, SandboxError};
use control::Control;
use opened_vm::OpenedVm;
pub use shard_api::message::{FILES_MAX, Files, ReceiveError, receive, receive_by, send};
pub use shard_api::version::{LaunchError, VERSIONS, receive_launch};

/// Reason why a shard could not start.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The first message is invalid.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A file of the first message is missing.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// The kind of VM is contradictory.
    #[error(transparent)]
    Kind(#[from] ResumedSpan),
    /// The machine can't be created.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// A device can't be created.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// The sandbox can't be closed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The host refused a resource of the process itself.
    #[error("the shard's process cannot start")]
    Host(#[from] io::Error),
}

/// Runs the VM whose spec arrives over `control`. Returns once the VM has ended and the end was reported to
/// the monitor. The exit status reports the end, too ([`Ending::exit_status`]).
pub fn run(control: &ControlSocket) -> ExitCode {
    allow_huge_pages();
    ignore_file_limit();
    let launch = receive_launch(control);
    if let Err(LaunchError::VersionMismatch(error)) = &launch {
        error!("{error}");
        // The log receives the error, too.
        let versions = VERSIONS;
        let _ = control.send(&Report::Unlike { versions }, &[]);
        return ExitCode::FAILURE;
    }
    let ended = launch
        .map_err(ProcessError::from)
        .and_then(|(launch, files)| match launch {
            Launch::Vm(spec) => start(control, &spec, files).map(Control::wait),
            Launch::Secondary(launch) => {
                secondary::start(control, *launch, files).map(secondary::SecondaryShard::wait)
            }
        });
    let ending = ended.unwrap_or_else(|error| Ending::ShardFailed {
        detail: chain(&error),
    });
    let status = ending.exit_status();
    // The monitor may be gone; then there is no receiver.
    let _ = control.send(&Report::Ended(ending), &[]);
    ExitCode::from(status)
}

/// Allows huge pages for guest memory. The command forbids them for itself and the processes that it starts.
fn allow_huge_pages() {
    // SAFETY: clears a flag of this process's memory.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 0, 0, 0, 0) };
}

/// Makes a write beyond the file size limit of this process fail, instead of ending the process.
fn ignore_file_limit() {
    // SAFETY: no handler is installed.
    let _ = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
}

fn start(control: &ControlSocket, spec: &LaunchSpec, files: Files) -> Result<Control, ProcessError> {
    let opened = OpenedVm::open(spec, files)?;
    // The sandbox is closed here and nowhere else: every file is open, and no thread serves the guest yet.
    let closed = sandbox::close(spec.sandbox.clone())?;
    opened.start(control, spec, closed)
}

fn kvm_of(kvm: Fd, files: &mut Files) -> Result<Kvm, ProcessError> {
    use std::os::fd::FromRawFd;
    let file = files.take(kvm)?;
    // SAFETY: the descriptor is open and ours alone. That it is KVM shows at the first call.
    Ok(unsafe { Kvm::from_raw_fd(file.into_raw_fd()) })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use urpc::version::Versions;

    use super::*;

    /// Returns the exit code of a shard that is launched by `message`, and all its reports.
    fn launched(message: &Value) -> (ExitCode, Vec<Value>) {
        let (monitor, control) = ControlSocket::pair().unwrap();
        monitor.send(message, &[]).unwrap();
        let code = run(&control);
        drop(control);
        let mut reports = Vec::new();
        while let Ok((report, _)) = monitor.receive_with_files() {
            reports.push(serde_json::from_slice(&report).unwrap());
        }
        (code, reports)
    }

    /// Promise HOSTILE-08.
    #[test]
    fn launch_of_an_unlike_version_is_answered_with_ours_and_nothing_else() {
        let theirs = Versions::up_to(VERSIONS.newest + 2);
        let launch = json!({ "versions": theirs, "launch": [] });
        let (code, reports) = launched(&launch);
        assert_eq!(code, ExitCode::FAILURE);
        assert_eq!(reports, [json!({ "unlike": { "versions": VERSIONS } })]);
    }

    /// Promise HOSTILE-43.
    #[test]
    fn shard_that_cannot_start_reports_the_reason_and_exits_with_the_status_of_a_failure() {
        let (code, reports) = launched(&json!({ "versions": VERSIONS, "launch": [] }));
        assert_eq!(code, ExitCode::from(73));
        assert_eq!(reports.len(), 1);
        assert_eq!(reports[0]["ended"]["how"], "shard-failed");
    }
}
