//! Processes that outlive the command: guards of cells, and a measurement of costs.

use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use child_process::in_new_session;
use registry::cluster::files::Files;

use super::{notify, scope};

/// Starts a cell's guard.
pub(super) fn start(files: &Files, number: u16) -> std::io::Result<()> {
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(files.cell(number).log())?;
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["cell-guard", &number.to_string()])
        .stdout(log.try_clone()?)
        .stderr(log);
    outlive(command)
}

/// Starts a measurement of message costs on this machine in the background. Nothing waits for it: without it,
/// costs are derived.
pub(super) fn measure_meanwhile() {
    let mut command = Command::new("/proc/self/exe");
    command.arg("measure").stdout(Stdio::null()).stderr(Stdio::null());
    let _ = outlive(command);
}

/// Starts a process of this program that outlives this one, in its own session, so that the terminal's
/// signals don't reach it.
fn outlive(mut command: Command) -> std::io::Result<()> {
    command
        .arg0("mirrorball")
        .stdin(Stdio::null())
        .env_remove(notify::VARIABLE)
        .env_remove(scope::VARIABLE);
    // Not waited for.
    in_new_session(&mut command).spawn()?;
    Ok(())
}
