//! The lease on a monitor: starts it, hears its events, and ends its VMs by being dropped. The other end of [`crate::monitor`].

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::monitor::{Batch, Event, LeaseOrder};

/// The running program, for `mirrorball` itself.
pub const OWN_PROGRAM: &str = "/proc/self/exe";
/// Stack of a thread that only waits for a process.
const REAPER_STACK_BYTES: usize = 64 << 10;

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
        let mut monitor = command.spawn()?;
        // It may outlive this process, or end long before: one that serves others for days would collect its dead.
        std::thread::Builder::new()
            .name("reaper".into())
            .stack_size(REAPER_STACK_BYTES)
            .spawn(move || monitor.wait())?;
        let mut line = serde_json::to_vec(batch)?;
        line.push(b'\n');
        (&socket).write_all(&line)?;
        Ok(Self { socket })
    }

    /// Limits how long an event is waited for: events end when none has come for so long.
    pub fn limit_wait(&self, limit: Duration) -> std::io::Result<()> {
        self.socket.set_read_timeout(Some(limit))
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

#[cfg(test)]
mod tests {
    use config::settings::ShareBetween;

    use std::time::Instant;

    use super::*;
    use crate::registry::BOOT_LIMIT_S;

    /// The processes of this one that are, or were, this program.
    fn children(program: &str) -> usize {
        let (program, own) = (format!("({program})"), std::process::id().to_string());
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let stats = processes.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
        stats
            .filter(|stat| {
                let words: Vec<_> = stat.split_whitespace().collect();
                words[1] == program && words[3] == own
            })
            .count()
    }

    #[test]
    fn a_monitor_that_has_ended_leaves_no_zombie() {
        let batch = Batch {
            vms: Vec::new(),
            source: None,
            share_between: ShareBetween::Group,
            member: None,
            boot_limit_s: BOOT_LIMIT_S,
        };
        // Ends at once, with an error: there is no file called `monitor`.
        let program = Path::new("/bin/cat");
        let leases: Vec<_> = (0..5).map(|_| Lease::start(program, &batch)).collect();
        let deadline = Instant::now() + Duration::from_secs(5);
        while children("cat") > 0 {
            assert!(Instant::now() < deadline, "{} are left", children("cat"));
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(leases);
    }
}
