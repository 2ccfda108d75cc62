//! Start of a program with pipes or with a terminal.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use child_process::in_new_session;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::pty::{Winsize, openpty};

use super::Session;
use crate::protocol::{ExecRequest, WindowSize};
use crate::server::affinity;

/// Search path for programs if the agent itself was started without a PATH.
const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Reason why a program is not started, as its client receives it.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("no program given")]
    NoProgram,
    #[error("{0}: no such directory")]
    NoDirectory(String),
    #[error("{0:?} can't be an environment variable")]
    Variable(String),
    #[error("{0}: command not found")]
    NotFound(String),
    #[error("{program}: {error}")]
    Spawn { program: String, error: io::Error },
}

impl Session {
    /// Starts the program of a request, with pipes or with a terminal.
    pub(super) fn start(request: &ExecRequest) -> Result<Self, StartError> {
        let [program, arguments @ ..] = request.argv.as_slice() else {
            return Err(StartError::NoProgram);
        };
        let cwd = request.cwd.as_deref().unwrap_or("/");
        if !std::path::Path::new(cwd).is_dir() {
            return Err(StartError::NoDirectory(cwd.to_owned()));
        }
        let mut command = Command::new(program);
        command.args(arguments).current_dir(cwd);
        for (name, default) in [("PATH", PATH_DEFAULT), ("HOME", "/root")] {
            // Set even if inherited: with PATH set, the program is looked up on the PATH that it will see.
            let value = std::env::var_os(name).unwrap_or_else(|| OsStr::new(default).to_owned());
            command.env(name, value);
        }
        for (name, value) in &request.env {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                return Err(StartError::Variable(name.clone()));
            }
            command.env(name, value);
        }
        let started = match request.tty {
            Some(size) => Self::spawn_tty(command, size),
            None => Self::spawn_pipes(command),
        };
        started.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => StartError::NotFound(program.clone()),
            _ => StartError::Spawn {
                program: program.clone(),
                error,
            },
        })
    }

    fn spawn_pipes(mut command: Command) -> io::Result<Self> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        in_new_session(&mut command);
        // SAFETY: restore is async-signal-safe and touches no memory.
        unsafe {
            command.pre_exec(affinity::restore);
        }
        let mut child = command.spawn()?;
        let stdin = child.stdin.take().map(|pipe| File::from(OwnedFd::from(pipe)));
        let stdout = child.stdout.take().map(|pipe| File::from(OwnedFd::from(pipe)));
        let stderr = child.stderr.take().map(|pipe| File::from(OwnedFd::from(pipe)));
        Self::new(child, stdin, stdout, stderr, false)
    }

    fn spawn_tty(mut command: Command, size: WindowSize) -> io::Result<Self> {
        let pty = openpty(Some(&winsize(size)), None)?;
        for fd in [&pty.master, &pty.slave] {
            fcntl(fd, FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
        }
        command
            .stdin(pty.slave.try_clone()?)
            .stdout(pty.slave.try_clone()?)
            .stderr(pty.slave);
        in_new_session(&mut command);
        // SAFETY: restore and ioctl are async-signal-safe; fd 0 is the terminal, put there by Command before
        // this runs.
        unsafe {
            command.pre_exec(|| {
                affinity::restore()?;
                Errno::result(libc::ioctl(0, libc::TIOCSCTTY, 0))
                    .map(drop)
                    .map_err(io::Error::from)
            });
        }
        let child = command.spawn()?;
        // The command holds the terminal's other side, which would never see its end.
        drop(command);
        let master = File::from(pty.master);
        Self::new(child, Some(master.try_clone()?), Some(master), None, true)
    }
}

/// The size of a terminal as the kernel has it.
pub(super) fn winsize(size: WindowSize) -> Winsize {
    Winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}
