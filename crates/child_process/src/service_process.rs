//! The processes that work for a VM's devices: passt, the frame filter of a card, the server of a folder.
//!
//! A monitor starts them, or adopts them from a predecessor that ended without them. They are ended by a
//! pidfd, which never names another process. Only a child can be reaped, so the exit status of an adopted
//! process stays unknown.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::process::{Child, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use locks::IgnorePoison;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Time limit for an adopted process to end after `SIGKILL`.
pub const END_LIMIT: Duration = Duration::from_secs(2);

/// A process that a predecessor of this monitor started, and that still runs.
#[derive(Debug)]
pub struct LeftProcess {
    /// Process id.
    pub pid: u32,
    /// pidfd of the process, which was opened before the process could be reaped.
    pub pidfd: OwnedFd,
}

/// A process that works for a device of a VM. Dropping it kills the process and waits for its end.
#[derive(Debug)]
pub struct ServiceProcess {
    pid: u32,
    pidfd: OwnedFd,
    origin: Origin,
}

#[derive(Debug)]
enum Origin {
    /// A child of this process, which reaps it.
    Child(Mutex<Child>),
    /// A child of another process.
    Predecessor,
}

impl ServiceProcess {
    /// Takes a child that was not waited for.
    ///
    /// # Errors
    /// Fails if this process has no descriptors left. The child is ended then.
    pub fn of_child(mut child: Child) -> io::Result<Self> {
        let pid = child.id();
        match open(pid) {
            Ok(pidfd) => Ok(Self {
                pid,
                pidfd,
                origin: Origin::Child(Mutex::new(child)),
            }),
            Err(error) => {
                // It may have ended by itself.
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Adopts a process that a predecessor started.
    pub fn adopt(left: LeftProcess) -> Self {
        let LeftProcess { pid, pidfd } = left;
        Self {
            pid,
            pidfd,
            origin: Origin::Predecessor,
        }
    }

    /// Returns the process id. Another process may get the number of an adopted process after its end.
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// Duplicates the handle of the process, for a successor of its starter.
    ///
    /// # Errors
    /// Fails if this process has no descriptors left.
    pub fn handle(&self) -> io::Result<LeftProcess> {
        Ok(LeftProcess {
            pid: self.pid,
            pidfd: self.pidfd.try_clone()?,
        })
    }

    /// Returns the pidfd of the process.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Kills the process unless it has ended, and waits for its end. Returns the exit status of a child; a
    /// child that was ending by itself keeps its own status. The status of an adopted process is unknown.
    ///
    /// # Errors
    /// Fails if an adopted process still runs after [`END_LIMIT`].
    pub fn end(&self) -> io::Result<Option<ExitStatus>> {
        // It may have ended by itself.
        let _ = kill(&self.pidfd);
        match &self.origin {
            Origin::Child(child) => {
                let mut child = child.lock().ignore_poison();
                child.wait().map(Some)
            }
            Origin::Predecessor => wait(self.pidfd(), END_LIMIT).map(|()| None),
        }
    }
}

impl Drop for ServiceProcess {
    fn drop(&mut self) {
        // A process that outlives a SIGKILL waits for the kernel, and has no effects.
        let _ = self.end();
    }
}

/// Opens the pidfd of a child that was not waited for.
fn open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = RawFd::try_from(Errno::result(fd)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn kill(pidfd: &OwnedFd) -> io::Result<()> {
    let info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the kernel reads no memory where the information about the signal is null.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            libc::SIGKILL,
            info,
            0,
        )
    };
    Errno::result(sent)?;
    Ok(())
}

/// Waits until the process has ended, for `limit` at most.
///
/// # Errors
/// Fails with `TimedOut` if the process still runs after the limit.
pub fn wait(pidfd: BorrowedFd<'_>, limit: Duration) -> io::Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).as_millis();
        let timeout = u16::try_from(left).map_or(PollTimeout::MAX, PollTimeout::from);
        let mut files = [PollFd::new(pidfd, PollFlags::POLLIN)];
        match poll(&mut files, timeout) {
            Ok(0) if left == 0 => return Err(io::ErrorKind::TimedOut.into()),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    use super::*;

    fn sleep() -> ServiceProcess {
        ServiceProcess::of_child(Command::new("sleep").arg("1000").spawn().unwrap()).unwrap()
    }

    #[test]
    fn adopted_process_of_another_process_ends_within_the_limit() {
        let mut starter = Command::new("sh")
            .args(["-c", "sleep 1000 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(starter.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let pid = line.trim().parse().unwrap();
        let pidfd = open(pid).unwrap();
        let process = ServiceProcess::adopt(LeftProcess { pid, pidfd });
        assert_eq!(process.id(), pid);
        assert!(wait(process.pidfd(), Duration::ZERO).is_err(), "it runs");
        let begun = Instant::now();
        assert_eq!(process.end().unwrap(), None);
        assert!(begun.elapsed() < END_LIMIT);
        assert!(starter.wait().unwrap().success());
        // Its process id is free by now, and the second end affects no other process.
        assert_eq!(process.end().unwrap(), None);
    }

    #[test]
    fn dropped_adopted_process_ends() {
        let child = sleep();
        drop(ServiceProcess::adopt(child.handle().unwrap()));
        assert_eq!(child.end().unwrap().unwrap().signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn child_that_ended_by_itself_keeps_its_own_status() {
        let child = Command::new("sh").args(["-c", "exit 7"]).spawn().unwrap();
        let child = ServiceProcess::of_child(child).unwrap();
        wait(child.pidfd(), Duration::from_secs(20)).unwrap();
        for _ in 0..2 {
            assert_eq!(child.end().unwrap().unwrap().code(), Some(7));
        }
    }

    #[test]
    fn wait_for_a_process_that_runs_on_is_limited() {
        let error = wait(sleep().pidfd(), Duration::from_millis(10)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
