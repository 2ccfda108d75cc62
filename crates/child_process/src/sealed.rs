//! Starts the processes that serve a guest, which seal themselves: the frame filter of a card, the server of
//! a folder.
//!
//! Such a process has a socket of packets as its standard input. No signal ties it to its starter: a VM that
//! outlives its monitor keeps it, and the monitor's successor adopts it. A guest may have compromised the
//! process: its starter reads its exit status, and the last line that it wrote, as text for people.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;

use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use crate::{BoundedLog, ServiceProcess};

/// Program of a sealed process.
#[derive(Clone, Debug)]
pub struct SealedProgram {
    /// The program, open, so that a replacement of the file has no effect.
    pub file: Arc<File>,
    /// First words of its command line: its name, then arguments.
    pub words: Vec<OsString>,
}

impl SealedProgram {
    /// Starts a process with further arguments, a socket as its standard input, and a standard output.
    ///
    /// # Errors
    /// Fails if the host has no processes or files left.
    pub fn start(
        &self,
        arguments: Vec<String>,
        socket: OwnedFd,
        output: Stdio,
    ) -> io::Result<(ServiceProcess, BoundedLog)> {
        let log = BoundedLog::new()?;
        let (name, words) = self.words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        // The child has the descriptor, with the same number, until it executes the program.
        let child = Command::new(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
            .arg0(name)
            .args(words)
            .args(arguments)
            .env_clear()
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::from(socket))
            .stdout(output)
            .stderr(log.writer()?)
            .spawn()?;
        Ok((ServiceProcess::of_child(child)?, log))
    }
}

/// Creates a connected pair of sockets of packets.
///
/// # Errors
/// Fails if this process has no descriptors left.
pub fn packet_sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?)
}

/// Describes the end of a process with this status (unknown for an adopted one). `name` is the process in
/// words.
pub fn describe_end(name: &str, status: Option<ExitStatus>, output: &str) -> String {
    let (code, signal) = status.map_or((None, None), |status| (status.code(), status.signal()));
    let how = match (code, signal) {
        (Some(code), _) => format!("left with status {code}"),
        (None, Some(libc::SIGSYS)) => "made a system call that its seal forbids".to_owned(),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => format!("was ended by {signal}"),
            Err(_) => format!("was ended by signal {signal}"),
        },
        (None, None) => "has ended".to_owned(),
    };
    match last_line(output) {
        Some(last) => format!("{name} {how}; it said: {last}"),
        None => format!("{name} {how}"),
    }
}

/// Returns the last line of a process's output that is not blank.
pub fn last_line(output: &str) -> Option<&str> {
    output.lines().rev().find(|line| !line.trim().is_empty())
}
