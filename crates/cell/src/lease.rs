//! The lease on a monitor: starts it, hears its events, and ends its VMs by being dropped. The other end of [`crate::monitor`].

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::monitor::{Batch, Event, LeaseOrder};

/// The running program, for `mirrorball` itself.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// A monitor that works for this process.
#[derive(Debug)]
pub struct Lease {
    socket: UnixStream,
}

impl Lease {
    /// Starts the monitor of `batch` by `program`, which is `mirrorball`, in a session of its own: the terminal's signals are
    /// not for it.
    pub fn start(program: &Path, batch: &Batch) -> std::io::Result<Self> {
        keep_stacks_small();
        let (socket, theirs) = UnixStream::pair()?;
        let mut command = Command::new(program);
        command
            .arg0("mirrorball")
            .arg("monitor")
            .stdin(Stdio::from(OwnedFd::from(theirs)));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: setsid is async-signal-safe and touches no memory.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                Ok(())
            })
        };
        // Not waited for: it outlives this command when detached, and this command is short-lived otherwise.
        command.spawn()?;
        let mut line = serde_json::to_vec(batch)?;
        line.push(b'\n');
        (&socket).write_all(&line)?;
        Ok(Self { socket })
    }

    /// The monitor's events until it ends.
    pub fn events(&self) -> std::io::Result<impl Iterator<Item = Event> + use<>> {
        let lines = BufReader::new(self.socket.try_clone()?).lines();
        Ok(lines
            .map_while(Result::ok)
            .filter_map(|line| serde_json::from_str(&line).ok()))
    }

    /// Lets the VMs outlive this command.
    pub fn detach(&self) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(&LeaseOrder::Detach)?;
        line.push(b'\n');
        (&self.socket).write_all(&line)
    }

    /// Ends the VMs; the events go on until they have ended.
    pub fn end(&self) {
        // A monitor that is gone has no VMs.
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
    }
}

/// Keeps this process and the monitor it starts out of huge pages: now and then a thread's stack would lie so that its
/// first 12 KiB cost 2 MiB. The shard takes this back for itself, as its guest's memory profits.
fn keep_stacks_small() {
    // SAFETY: sets a flag of this process's memory; with a kernel that refuses it, more memory is used.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
}
