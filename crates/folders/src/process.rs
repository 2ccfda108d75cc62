//! The process of a shared folder, from the starter's side.
//!
//! Its standard input is a socket of packets, whose other end the VM's shard has; its standard output is the
//! folder. It ends when the other end of the socket closes. No signal ties it to its starter: a VM that
//! outlives its monitor keeps its folders, and the monitor's successor adopts the process.
//!
//! A guest may have compromised the process. The starter reads its exit status, and the last line that it
//! wrote, as text for people.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use subnet::card_process::{CardProcess, LeftProcess};

use crate::arguments::Arguments;

/// Argument that makes the program of shards run as a folder's process. No VM has such a name, which is a
/// shard's argument.
pub const FLAG: &str = "--folder-server";
/// Exit status of a process whose socket was closed.
pub const ENDED_WITH_SOCKET: u8 = 0;
/// Length of the file in memory for the process's output, bytes. It cannot grow.
const LOG_BYTES: u64 = 4096;

/// One folder, and how its process is started.
#[derive(Clone)]
pub struct FolderSpec {
    /// Program of the process, open, so that a replacement of the file has no effect.
    pub program: Arc<File>,
    /// First words of its command line: its name, then arguments.
    pub words: Vec<OsString>,
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
            .field("words", &self.words)
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
    process: CardProcess,
    log: File,
    /// Whether the end of the process is intended.
    is_ending: AtomicBool,
}

impl FolderProcess {
    /// Starts the process. Returns the shard's end of its socket, too.
    ///
    /// # Errors
    /// Fails if the host has no processes, threads or files left.
    pub fn start(spec: &FolderSpec) -> io::Result<(OwnedFd, Self)> {
        let (socket, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )?;
        let log = bounded_log()?;
        let (name, words) = spec.words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        // The child has the descriptor, with the same number, until it executes the program.
        let child = Command::new(format!("/proc/self/fd/{}", spec.program.as_raw_fd()))
            .arg0(name)
            .args(words)
            .args(spec.arguments.words())
            .env_clear()
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::from(spec.folder.try_clone()?))
            .stderr(log.try_clone()?)
            .spawn()?;
        let process = CardProcess::of_child(child)?;
        Ok((socket, Self::watch(process, log, spec)?))
    }

    /// Adopts a process that a predecessor started.
    ///
    /// # Errors
    /// Fails if the host has no threads left. The process is ended then.
    pub fn adopt(left: LeftFolder, spec: &FolderSpec) -> io::Result<Self> {
        Self::watch(CardProcess::adopt(left.process), left.log.into(), spec)
    }

    fn watch(process: CardProcess, log: File, spec: &FolderSpec) -> io::Result<Self> {
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
            if let Some(why) = describe(status, &shared.output()) {
                report(&why);
            }
        })?);
        Ok(folder)
    }

    /// Returns the process itself.
    pub fn process(&self) -> &CardProcess {
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

impl Shared {
    fn output(&self) -> String {
        let mut bytes = [0; LOG_BYTES as usize];
        let count = self.log.read_at(&mut bytes, 0).unwrap_or(0);
        let text = bytes[..count].split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    }
}

/// A file in memory that keeps its length, whatever the process writes.
fn bounded_log() -> io::Result<File> {
    let log = File::from(memfd_create(
        c"folder",
        MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING,
    )?);
    log.set_len(LOG_BYTES)?;
    let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
    fcntl(&log, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(log)
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
    let (code, signal) = status.map_or((None, None), |status| (status.code(), status.signal()));
    let how = match (code, signal) {
        (Some(code), _) if code == i32::from(ENDED_WITH_SOCKET) => return None,
        (Some(code), _) => format!("left with status {code}"),
        (None, Some(libc::SIGSYS)) => "made a system call that its seal forbids".to_owned(),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => format!("was ended by {signal}"),
            Err(_) => format!("was ended by signal {signal}"),
        },
        (None, None) => "has ended".to_owned(),
    };
    let last = output.lines().rev().find(|line| !line.trim().is_empty());
    Some(match last {
        Some(last) => format!("the folder's server {how}; it said: {last}"),
        None => format!("the folder's server {how}"),
    })
}

#[cfg(test)]
mod tests;
