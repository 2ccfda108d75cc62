//! Starts the monitors of a client's VMs: a process each, forked from the client.
//!
//! The client's process opens what the VMs have in common: the programs, and the state that clones resume
//! from. Each monitor has its copy, since a fork copies all descriptors. The monitors run no other program
//! first, so a start costs one execution less.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use config::VmSpec;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, dup2_stderr, dup2_stdin, dup2_stdout, fork, setsid};
use registry::lease::{EndedMonitors, Lease as ClientLease, keep_stacks_small};
use registry::monitor::{Batch, Event, Source};
use shard_api::Platform;

use super::lease::{Lease, first_line, try_tell};
use super::{Terms, events, fail, serve_new};
use crate::frozen::FrozenVm;
use crate::pidfd;
use crate::process_title;
use crate::programs::Programs;
use crate::snapshot;
use crate::snapshot::directory::Directory;

/// Stack size of a thread that only waits for processes.
const REAPER_STACK_BYTES: usize = 64 << 10;
/// Exit status of a monitor that panicked, as of any Rust program.
const PANICKED: i32 = 101;
/// Reason for a failure of VMs that would boot, though they are to start warm.
const NO_TEMPLATE: &str = "`warm` needs a template, which `mirrorball run` finds or makes; start it by that, \
                           or leave out `warm`";
/// Highest descriptor of the standard streams.
const STANDARD_FDS: RawFd = 2;

/// Starts a monitor for each VM of `batch`. `platform` answers what only KVM can.
///
/// Each monitor has a session of its own, so the terminal's signals don't reach it. Other threads of the
/// caller may only wait: a lock that they hold stays held forever in a monitor.
///
/// # Errors
/// If the host is out of descriptors, threads or processes. Resources that single VMs lack are reported as
/// events.
pub fn start(batch: Batch, platform: Platform) -> io::Result<ClientLease> {
    keep_stacks_small();
    let of_client = open_descriptors()?;
    let (socket, theirs) = UnixStream::pair()?;
    let foreign = of_client.into_iter().chain([socket.as_raw_fd()]).collect();
    let monitors = fork_monitors(batch, theirs, platform, foreign)?;
    let ended = EndedMonitors::default();
    reap(monitors, ended.clone())?;
    Ok(ClientLease::of_monitors(socket, ended))
}

/// The same in a process that a client started for this, and whose standard input is the lease; the batch
/// comes over it first.
///
/// # Errors
/// As for [`start`].
pub fn start_over(lease: UnixStream, platform: Platform) -> io::Result<()> {
    let batch = serde_json::from_str(&first_line(&lease)?)?;
    fork_monitors(batch, lease, platform, Vec::new()).map(drop)
}

/// Forks the monitors, and returns them with the names of their VMs. They close the descriptors `foreign`.
fn fork_monitors(
    mut batch: Batch,
    lease: UnixStream,
    platform: Platform,
    foreign: Vec<RawFd>,
) -> io::Result<Vec<(String, Pid)>> {
    let vms = std::mem::take(&mut batch.vms);
    let lease: Lease = Arc::new(Mutex::new(lease));
    let fail_all = |why: &str| vms.iter().for_each(|(name, _)| fail_at_once(&lease, name, why));
    if let Some((name, _)) = cold_start(&batch, &vms) {
        fail_all(&format!("{name}: {NO_TEMPLATE}"));
        return Ok(Vec::new());
    }
    let terms = match Programs::beside_command() {
        Ok(programs) => Terms::of(&batch, platform, programs)?,
        Err(error) => {
            fail_all(&error.to_string());
            return Ok(Vec::new());
        }
    };
    let frozen = match batch.source.as_ref().map(open_source).transpose() {
        Ok(frozen) => frozen,
        Err(error) => {
            fail_all(&error.to_string());
            return Ok(Vec::new());
        }
    };
    // One of several VMs that start alike records its pages for all.
    let mut record_in = batch.source.as_ref().and_then(Source::directory);
    let mut monitors = Vec::new();
    for (name, spec) in &vms {
        let record_in = record_in.take();
        let serve = || {
            let source = frozen.as_ref().map(|frozen| (frozen, record_in));
            serve_new(name, spec, source, &terms, &lease)
        };
        let report = |error: &io::Error| fail(&lease, name.clone(), not_started(error));
        match fork_monitor(name, &foreign, serve, report) {
            Ok(monitor) => monitors.push((name.clone(), monitor)),
            Err(error) => fail_at_once(&lease, name, &not_started(&error)),
        }
    }
    Ok(monitors)
}

/// A VM that is to start warm, in a batch that boots its VMs.
fn cold_start<'a>(batch: &Batch, vms: &'a [(String, VmSpec)]) -> Option<&'a (String, VmSpec)> {
    let boots = batch.source.is_none();
    vms.iter().find(|(_, spec)| boots && spec.warm)
}

/// Reports that a VM has not started. Never blocks: the client may read no event before all monitors are
/// forked. It stops at the first failure, so it misses nothing if the socket is full of failures.
fn fail_at_once(lease: &Lease, name: &str, why: &str) {
    events::failed(name, why);
    let (name, why) = (name.to_owned(), why.to_owned());
    try_tell(lease, &Event::Failed { name, why });
}

fn not_started(error: &io::Error) -> String {
    format!("the monitor does not start: {error}")
}

/// Opens the state from which VMs resume.
fn open_source(source: &Source) -> io::Result<FrozenVm> {
    match source {
        Source::Running(folder) => FrozenVm::of(folder),
        Source::Snapshot { directory, owners } => Directory::open(directory, owners)
            .and_then(|directory| snapshot::open(&directory))
            .map_err(io::Error::other),
    }
}

/// Forks a process that becomes the monitor of the VM `name`, closes the descriptors `foreign`, runs `serve`,
/// and ends. There `report` gets an error: the client has no other way to learn the reason.
fn fork_monitor(
    name: &str,
    foreign: &[RawFd],
    serve: impl FnOnce() -> io::Result<()>,
    report: impl FnOnce(&io::Error),
) -> io::Result<Pid> {
    // SAFETY: other threads of this process only wait for processes (`reap`) or have not begun: they hold no
    // lock that the child needs, and glibc makes its allocator usable in the child.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            let serve = || become_monitor(name, foreign).and_then(|()| serve());
            let run = || match serve() {
                Ok(()) => 0,
                Err(error) => {
                    report(&error);
                    1
                }
            };
            // No code of the client's runs on here, not even after a panic.
            let status = catch_unwind(AssertUnwindSafe(run)).unwrap_or(PANICKED);
            // SAFETY: ends the process. The client's destructors and exit handlers are not this process's.
            unsafe { libc::_exit(status) }
        }
    }
}

/// Leaves the client's session, descriptors and name.
fn become_monitor(name: &str, foreign: &[RawFd]) -> io::Result<()> {
    setsid()?;
    for fd in foreign.iter().filter(|fd| **fd > STANDARD_FDS) {
        // SAFETY: the values that own these descriptors belong to the client's part of this process's memory,
        // which is not used or dropped any more.
        unsafe { libc::close(*fd) };
    }
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    // A monitor logs only if a level is set, since it may outlive the terminal.
    if std::env::var_os(process_log::LEVEL).is_none() {
        dup2_stderr(&null)?;
    }
    process_title::set(&CString::new(format!("mirrorball monitor {name}"))?)?;
    if std::env::var_os(process_log::LEVEL).is_some() {
        process_log::Settings::of_environment().and_then(process_log::Settings::begin)?;
    }
    Ok(())
}

/// Lists the open descriptors of this process.
fn open_descriptors() -> io::Result<Vec<RawFd>> {
    let mut fds = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        fds.extend(
            entry?
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<RawFd>().ok()),
        );
    }
    // The listing's own descriptor is among them, and closed by now; its number may be another's later.
    fds.retain(|fd| is_open(*fd));
    Ok(fds)
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: reads a flag of the descriptor; a closed one is an error.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

/// Starts a thread that waits for the monitors, and adds the VM of each that has ended to `without_monitor`.
/// Without a wait, a long-lived client would collect zombies.
fn reap(monitors: Vec<(String, Pid)>, without_monitor: EndedMonitors) -> io::Result<()> {
    let open = |(name, pid): (String, Pid)| Ok((name, pid, pidfd::open(pid.as_raw())?));
    let mut running: Vec<(String, Pid, OwnedFd)> =
        monitors.into_iter().map(open).collect::<io::Result<_>>()?;
    let wait = move || {
        while !running.is_empty() {
            let mut fds: Vec<_> = running
                .iter()
                .map(|(_, _, process)| PollFd::new(process.as_fd(), PollFlags::POLLIN))
                .collect();
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                // A kernel that does not let this thread wait leaves zombies until this process ends.
                Err(_) => return,
            }
            let ended: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
            let mut ended = ended.into_iter();
            running.retain(|(name, pid, _)| {
                let has_ended_now = ended.next() == Some(true);
                if has_ended_now {
                    // A process that can't be waited for no longer exists.
                    let _ = waitpid(*pid, None);
                    without_monitor.add(name.clone());
                }
                !has_ended_now
            });
        }
    };
    std::thread::Builder::new()
        .name("reaper".into())
        .stack_size(REAPER_STACK_BYTES)
        .spawn(wait)
        .map(drop)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::super::lease::tell;
    use super::*;

    #[test]
    fn failures_of_many_vms_never_block_a_client_that_reads_none_of_them_yet() {
        let (client, lease) = UnixStream::pair().unwrap();
        let lease: Lease = Arc::new(Mutex::new(lease));
        let starter = std::thread::spawn(move || {
            for number in 0..5000 {
                let (name, why) = (format!("vm-{number}"), "no program".to_owned());
                try_tell(&lease, &Event::Failed { name, why });
            }
        });
        let deadline = Instant::now() + Duration::from_secs(30);
        while !starter.is_finished() {
            assert!(Instant::now() < deadline, "the starter waits for its client");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut first = String::new();
        BufReader::new(client).read_line(&mut first).unwrap();
        match serde_json::from_str(&first).unwrap() {
            Event::Failed { name, why } => assert_eq!((&*name, &*why), ("vm-0", "no program")),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn vm_that_is_to_start_warm_never_boots_instead() {
        let spec = |text: &str| config::parse("vm.toml", text).unwrap();
        let mut batch = Batch {
            vms: Vec::new(),
            source: None,
            share_between: config::settings::ShareBetween::All,
            member: None,
            names: None,
            boot_limit_s: 1,
        };
        let vms = [
            ("cold".to_owned(), spec("image = \"tiny\"")),
            ("warm".to_owned(), spec("image = \"tiny\"\nwarm = true")),
        ];
        let found = cold_start(&batch, &vms).map(|(name, _)| name.as_str());
        assert_eq!(found, Some("warm"));
        assert!(cold_start(&batch, &vms[..1]).is_none());
        batch.source = Some(Source::Running("/run/vm".into()));
        assert!(cold_start(&batch, &vms).is_none());
    }

    #[test]
    fn monitor_that_fails_before_it_serves_reports_the_reason() {
        let (client, lease) = UnixStream::pair().unwrap();
        let lease: Lease = Arc::new(Mutex::new(lease));
        let serve = || Err(io::Error::other("no descriptors are left"));
        let report = |error: &io::Error| {
            let (name, why) = ("web".to_owned(), not_started(error));
            tell(&lease, &Event::Failed { name, why });
        };
        let monitor = fork_monitor("web", &[], serve, report).unwrap();
        waitpid(monitor, None).unwrap();
        drop(lease);
        let events: Vec<String> = BufReader::new(client).lines().map(Result::unwrap).collect();
        assert_eq!(events.len(), 1, "{events:?}");
        match serde_json::from_str(&events[0]).unwrap() {
            Event::Failed { name, why } => {
                assert_eq!(name, "web");
                assert!(why.ends_with("no descriptors are left"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn ended_monitor_is_recorded_for_its_own_vm_alone() {
        let mut sleeps = Command::new("sleep").arg("60").spawn().unwrap();
        let mut ends = Command::new("true").spawn().unwrap();
        let pid = |id: u32| Pid::from_raw(id.cast_signed());
        let monitors = vec![
            ("a".to_owned(), pid(sleeps.id())),
            ("b".to_owned(), pid(ends.id())),
        ];
        let ended = EndedMonitors::default();
        reap(monitors, ended.clone()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while !ended.has("b") {
            assert!(Instant::now() < deadline, "the end is not noticed");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!ended.has("a"));
        sleeps.kill().unwrap();
        // The thread may have waited for both.
        let _ = (sleeps.wait(), ends.wait());
    }
}
