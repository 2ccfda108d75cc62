//! The process of a shared folder, from the starter's side.
//!
//! Its standard input is a socket of packets, whose other end the VM's shard has; its standard output is the
//! folder. It ends when the other end of the socket closes. No signal ties it to its starter: a VM that
//! outlives its monitor keeps its folders, and the monitor's successor adopts the process.
//!
//! A guest may have compromised the process. The starter reads its exit status, and the last line that it
//! wrote, as text for people.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use child_process::sealed::{SealedProgram, describe_end, packet_sockets};
use child_process::{BoundedLog, LeftProcess, ServiceProcess};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::arguments::Arguments;

/// Argument that makes the program of shards run as a folder's process. No VM has such a name, which is a
/// shard's argument.
pub const FLAG: &str = "--folder-server";
/// Exit status of a process whose socket was closed.
pub const ENDED_WITH_SOCKET: u8 = 0;

/// One folder, and how its process is started.
#[derive(Clone)]
pub struct FolderSpec {
    /// Program of the process.
    pub program: SealedProgram,
    /// The open directory.
    pub folder: Arc<OwnedFd>,
    /// Further arguments.
    pub arguments: Arguments,
    /// Receives a line if the process ends before its VM.
    pub ended: Arc<dyn Fn(&str) + Send + Sync>,
}

impl fmt::Debug for FolderSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("FolderSpec");
        shown
            .field("words", &self.program.words)
            .field("arguments", &self.arguments);
        shown.finish_non_exhaustive()
    }
}

/// A folder's process that a predecessor of this monitor started.
#[derive(Debug)]
pub struct LeftFolder {
    /// The process, which is no child of this one.
    pub process: LeftProcess,
    /// File in memory with its output.
    pub log: OwnedFd,
}

/// A running process. Dropping it ends the process.
#[derive(Debug)]
pub struct FolderProcess {
    shared: Arc<Shared>,
    /// Thread that waits for the end of the process.
    watcher: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    process: ServiceProcess,
    log: BoundedLog,
    /// Whether the end of the process is intended.
    is_ending: AtomicBool,
}

impl FolderProcess {
    /// Starts the process. Returns the shard's end of its socket, too.
    ///
    /// # Errors
    /// Fails if the host has no processes, threads or files left.
    pub fn start(spec: &FolderSpec) -> io::Result<(OwnedFd, Self)> {
        let (socket, theirs) = packet_sockets()?;
        let folder = Stdio::from(spec.folder.try_clone()?);
        let (process, log) = spec.program.start(spec.arguments.words(), theirs, folder)?;
        Ok((socket, Self::watch(process, log, spec)?))
    }

    /// Adopts a process that a predecessor started.
    ///
    /// # Errors
    /// Fails if the host has no threads left. The process is ended then.
    pub fn adopt(left: LeftFolder, spec: &FolderSpec) -> io::Result<Self> {
        Self::watch(
            ServiceProcess::adopt(left.process),
            BoundedLog::adopt(left.log),
            spec,
        )
    }

    fn watch(process: ServiceProcess, log: BoundedLog, spec: &FolderSpec) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            process,
            log,
            is_ending: AtomicBool::new(false),
        });
        let mut folder = Self {
            shared: shared.clone(),
            watcher: None,
        };
        let report = spec.ended.clone();
        let watcher = std::thread::Builder::new().name("folder-end".into());
        folder.watcher = Some(watcher.spawn(move || {
            wait_for_end(shared.process.pidfd());
            if shared.is_ending.load(Ordering::Acquire) {
                return;
            }
            let status = shared.process.end().ok().flatten();
            if let Some(why) = describe(status, &shared.log.text()) {
                report(&why);
            }
        })?);
        Ok(folder)
    }

    /// Returns the process itself.
    pub fn process(&self) -> &ServiceProcess {
        &self.shared.process
    }

    /// Returns the file in memory with the output of the process.
    pub fn log(&self) -> BorrowedFd<'_> {
        self.shared.log.as_fd()
    }
}

impl Drop for FolderProcess {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Release);
        // A process that outlives a SIGKILL waits for the kernel, and has no effects.
        let _ = self.shared.process.end();
        if let Some(watcher) = self.watcher.take() {
            // A thread that panicked does not watch any longer.
            let _ = watcher.join();
        }
    }
}

/// Waits until the process has ended.
fn wait_for_end(pidfd: BorrowedFd<'_>) {
    let mut files = [PollFd::new(pidfd, PollFlags::POLLIN)];
    // Another error than a signal can't happen with one open descriptor.
    while poll(&mut files, PollTimeout::NONE) == Err(Errno::EINTR) {}
}

/// Returns why a process with this status (unknown for an adopted one) has ended; none if its VM's shard had
/// ended before.
fn describe(status: Option<ExitStatus>, output: &str) -> Option<String> {
    let code = status.and_then(|status| status.code());
    (code != Some(i32::from(ENDED_WITH_SOCKET))).then(|| describe_end("the folder's server", status, output))
}

#[cfg(test)]
mod tests;
