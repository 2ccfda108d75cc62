//! The client's end of a lease: receives the events of the monitors of a batch of VMs, and ends the VMs when
//! dropped.
//!
//! The lease is a socket pair; the monitors have its other end. [`crate::monitor`] defines the messages. When
//! the client ends in any way, the kernel closes its end, and each monitor ends its VM unless the client sent
//! [`LeaseOrder::Detach`]. `run` and `clone` fork the monitors (`cell::monitor::start`). The API and the
//! foreground process of a cluster have another process do that ([`Lease::by_program`]), since a process with
//! threads that work can't fork safely.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::monitor::{Batch, Event, LeaseOrder};

/// The program that this process executes, to execute it again.
pub const OWN_PROGRAM: &str = "/proc/self/exe";
/// Stack size of a thread that only waits for a process.
const REAPER_STACK_BYTES: usize = 64 << 10;

/// A client's end of a lease. Dropping it ends the VMs.
#[derive(Debug)]
pub struct Lease {
    socket: UnixStream,
    /// VMs whose monitor has ended; none if another process started the monitors. Successors of a monitor may
    /// have the socket.
    without_monitor: Option<EndedMonitors>,
}

/// The names of the VMs whose monitor, a child of this process, has ended.
#[derive(Clone, Debug, Default)]
pub struct EndedMonitors(Arc<Mutex<BTreeSet<String>>>);

impl EndedMonitors {
    /// Records that the monitor of the VM `name` has ended.
    pub fn add(&self, name: String) {
        self.names().insert(name);
    }

    /// Whether the monitor of the VM `name` has ended.
    pub fn has(&self, name: &str) -> bool {
        self.names().contains(name)
    }

    fn names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// The lease of monitors that have the other end of `socket`. The caller adds each monitor that has ended
    /// to `ended`.
    pub fn of_monitors(socket: UnixStream, ended: EndedMonitors) -> Self {
        Self {
            socket,
            without_monitor: Some(ended),
        }
    }

    /// Has `program`, which is `mirrorball`, start the monitors of `batch`. It has its own session, so the
    /// terminal's signals don't reach it.
    ///
    /// # Errors
    /// If the program can't be started, or ends before it has read the batch.
    pub fn by_program(program: &Path, batch: &Batch) -> std::io::Result<Self> {
        keep_stacks_small();
        let (socket, theirs) = UnixStream::pair()?;
        let mut command = Command::new(program);
        command
            .arg0("mirrorball")
            .arg("monitors")
            .stdin(Stdio::from(OwnedFd::from(theirs)));
        // Monitors write a log only on request, because they may outlive the terminal.
        let stderr = match std::env::var_os(process_log::LEVEL) {
            Some(_) => Stdio::inherit(),
            None => Stdio::null(),
        };
        command.stdout(Stdio::null()).stderr(stderr);
        // SAFETY: setsid is async-signal-safe and touches no memory.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                Ok(())
            })
        };
        let mut starter = command.spawn()?;
        // Without a wait, a server would collect zombies for days.
        std::thread::Builder::new()
            .name("reaper".into())
            .stack_size(REAPER_STACK_BYTES)
            .spawn(move || {
                // A process that can't be waited for no longer exists.
                let _ = starter.wait();
            })?;
        // The command keeps a copy of the program's end: with it, a write to a program that has ended blocks.
        drop(command);
        let mut line = serde_json::to_vec(batch)?;
        line.push(b'\n');
        (&socket).write_all(&line)?;
        Ok(Self {
            socket,
            without_monitor: None,
        })
    }

    /// Whether the monitor of the VM `name` may have ended. A VM without a successor of its monitor has ended
    /// with it; no event reports that while another VM runs.
    pub fn has_lost_monitor(&self, name: &str) -> bool {
        self.without_monitor.as_ref().is_none_or(|ended| ended.has(name))
    }

    /// Sets a time limit for an event. [`Lease::events`] ends when none has come for that long.
    pub fn limit_wait(&self, limit: Duration) -> std::io::Result<()> {
        self.socket.set_read_timeout(Some(limit))
    }

    /// Returns the monitors' events until all monitors have ended.
    pub fn events(&self) -> std::io::Result<impl Iterator<Item = Event> + use<>> {
        let lines = BufReader::new(self.socket.try_clone()?).lines();
        Ok(lines
            .map_while(Result::ok)
            .filter_map(|line| serde_json::from_str(&line).ok()))
    }

    /// Lets the VMs outlive this process.
    pub fn detach(&self) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(&LeaseOrder::Detach)?;
        line.push(b'\n');
        (&self.socket).write_all(&line)
    }

    /// Ends the VMs. Events continue until all have ended.
    pub fn end(&self) {
        // Without a monitor there is no VM.
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
    }
}

/// Disables transparent huge pages for this process and the monitors that it starts. A huge page under a
/// thread's stack may turn its first 12 KiB into 2 MiB. The shard enables them again for itself, because its
/// guest's memory profits.
pub fn keep_stacks_small() {
    // SAFETY: sets a flag of this process's memory. If a kernel refuses it, more memory is used.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use config::VmSpec;
    use config::settings::ShareBetween;

    use super::*;
    use crate::vms::BOOT_LIMIT_S;

    /// Counts the child processes that run, or ran, this program.
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

    fn batch(vms: Vec<(String, VmSpec)>) -> Batch {
        Batch {
            vms,
            source: None,
            share_between: ShareBetween::Group,
            member: None,
            names: None,
            boot_limit_s: BOOT_LIMIT_S,
        }
    }

    /// Promise HOSTILE-53.
    #[test]
    fn program_that_ends_without_reading_a_long_batch_is_an_error() {
        let spec = config::parse("vm.toml", "[kernel]\npath = \"k\"\n").unwrap();
        // More than a socket's buffer holds.
        let batch = batch(vec![("x".repeat(8 << 20), spec)]);
        let (sender, started) = mpsc::channel();
        std::thread::spawn(move || sender.send(Lease::by_program(Path::new("/bin/true"), &batch).is_ok()));
        assert_eq!(started.recv_timeout(Duration::from_secs(30)), Ok(false));
    }

    /// Promise HOSTILE-50.
    #[test]
    fn process_that_started_monitors_leaves_no_zombie() {
        let batch = batch(Vec::new());
        // Ends at once with an error: there is no file called `monitors`.
        let program = Path::new("/bin/cat");
        let leases: Vec<_> = (0..5).map(|_| Lease::by_program(program, &batch)).collect();
        let deadline = Instant::now() + Duration::from_secs(5);
        while children("cat") > 0 {
            assert!(Instant::now() < deadline, "{} are left", children("cat"));
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(leases);
    }
}
