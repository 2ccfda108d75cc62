//! The process of a shard, from its start to its end.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::handle::QUIT_LIMIT;
use crate::spawn::{self, Namespaces};

/// A shard's process, which waits for what it is to run. Killed when this is dropped before it has ended.
#[derive(Debug)]
pub struct ShardProcess {
    /// Its process id, as the monitor sees it.
    pub pid: i32,
    /// The control socket.
    pub socket: UnixStream,
    /// The namespaces that the host refused, one line each.
    pub missing: Vec<String>,
    /// Where it writes what it has to say.
    pub log_file: File,
    log: PathBuf,
    /// It has ended, and its id may be another's.
    is_over: AtomicBool,
}

impl ShardProcess {
    /// Starts one for the VM `name`.
    pub fn start(name: &str, log: PathBuf, namespaces: &Namespaces) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let log_file = File::options().create(true).append(true).open(&log)?;
        let program = spawn::this_program()?;
        let spawned = spawn::spawn(
            program.as_fd(),
            name,
            "shard",
            theirs.as_fd(),
            log_file.as_fd(),
            namespaces,
        )?;
        Ok(Self {
            pid: spawned.pid,
            socket,
            missing: spawned.missing,
            log_file,
            log,
            is_over: AtomicBool::new(false),
        })
    }

    /// Ends it, whatever it does. Returns what is known of its end.
    pub fn kill(&self) -> String {
        if !self.is_over.load(Ordering::Relaxed) {
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(self.pid), Signal::SIGKILL);
        }
        self.wait()
    }

    /// Waits until it has ended; one that has reported its end and does not go is killed. Returns what is known of its end.
    pub fn wait(&self) -> String {
        let is_over = self.is_over.swap(true, Ordering::Relaxed);
        let status = if is_over {
            None
        } else {
            wait_for(Pid::from_raw(self.pid))
        };
        why(status, &self.log)
    }
}

impl Drop for ShardProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

fn wait_for(pid: Pid) -> Option<WaitStatus> {
    let deadline = Instant::now() + QUIT_LIMIT;
    loop {
        match waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) if Instant::now() > deadline => {
                let _ = kill(pid, Signal::SIGKILL);
                return waitpid(pid, None).ok();
            }
            Ok(WaitStatus::StillAlive) => std::thread::sleep(Duration::from_millis(1)),
            Err(nix::Error::EINTR) => {}
            other => return other.ok(),
        }
    }
}

fn why(status: Option<WaitStatus>, log: &Path) -> String {
    let how = match status {
        Some(WaitStatus::Signaled(_, Signal::SIGSYS, _)) => {
            "made a system call that its sandbox forbids".to_owned()
        }
        Some(WaitStatus::Signaled(_, signal, _)) => format!("was ended by {signal}"),
        Some(WaitStatus::Exited(_, code)) => format!("left with status {code}"),
        _ => "is gone".to_owned(),
    };
    let text = std::fs::read_to_string(log).unwrap_or_default();
    match text.lines().last() {
        Some(last) => format!("its process {how}; it said: {last}"),
        None => format!("its process {how}"),
    }
}
