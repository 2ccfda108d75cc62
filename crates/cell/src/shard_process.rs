//! The process of a shard, from its start to its end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use keeper::client::{Exit, Keeper, Spawn};
use keeper::spawn::{NOT_EXECUTED, Namespaces};
use locks::IgnorePoison;
use nix::poll::PollTimeout;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use nix::unistd::{Pid, geteuid};
use shard_api::launch::{Ending, Order, OrderId, SandboxLaunch, SandboxPolicy};
use shard_api::version::acknowledges_quit;
use urpc::version::Versions;

use crate::identity::Given;
use crate::link::ShardLink;
use crate::pidfd;
use crate::programs::{self, BuildProgram};
use crate::shard_log::ShardLog;

/// Time limit for a shard to end after it has acknowledged the order to quit: its disks write the data that
/// they have acknowledged to the guest.
pub const QUIT_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for a shard to acknowledge the order to quit, and to exit after its last report. A separate
/// thread acknowledges it, whatever the other threads do.
pub const ACKNOWLEDGEMENT_LIMIT: Duration = Duration::from_millis(500);

/// Time limit for a shard to end after it has closed its control socket.
const SILENCE_LIMIT: Duration = Duration::from_millis(200);
/// Time limit for the keeper to report the exit of a process that has ended. A keeper that never reports is
/// stopped, or was taken over.
const REPORT_LIMIT: Duration = Duration::from_secs(5);
/// Interval between two reads of the keeper's reports about a process that has ended.
const REPORT_POLL_INTERVAL: Duration = Duration::from_micros(100);
/// Interval between two checks of a process that is waited for, in milliseconds.
const LOOK_MS: u8 = 5;

/// A shard's process, which waits for its launch. It is killed when this is dropped before it has ended.
/// Several threads may wait for its end, or kill it; each receives how it ended.
#[derive(Debug)]
pub struct ShardProcess {
    /// Its process id, as the monitor sees it.
    pub pid: i32,
    /// The program that it executes.
    pub program: Arc<BuildProgram>,
    /// The control socket.
    pub link: ShardLink,
    /// The sandbox, as far as it is made.
    pub sandbox: SandboxLaunch,
    /// The log of its output.
    pub log: Arc<ShardLog>,
    process: OwnedFd,
    parent: Parent,
    /// The fault for which it was killed, if any: a predicate.
    fault: OnceLock<&'static str>,
    /// The shard acknowledges the order to quit. Known once the shard runs.
    acknowledges_quit: AtomicBool,
    /// How it ended, once it was waited for. Its id may be another's from then on.
    ended: Mutex<Option<End>>,
}

/// The process that waits for the shard's end.
#[derive(Debug)]
enum Parent {
    /// The VM's keeper: the shard is its child.
    Keeper(Arc<Keeper>),
    /// The process of a test.
    #[cfg(test)]
    This,
}

/// The way in which a process ended.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The process ended with this status.
    Status(WaitStatus),
    /// Its keeper, which had the status, ended too.
    WithKeeper,
    /// Its keeper has not reported the status.
    Unreported,
}

impl Parent {
    /// The way in which the child `pid` ended, if it has.
    fn end_of(&self, pid: i32) -> Option<End> {
        let status = match self {
            Self::Keeper(keeper) => match keeper.exit_of(pid)? {
                // The report is acknowledged with the next boot: until then a successor of this process has
                // to receive it.
                Exit::Status(status) => WaitStatus::from_raw(Pid::from_raw(pid), status),
                Exit::KeeperGone => return Some(End::WithKeeper),
            },
            #[cfg(test)]
            Self::This => {
                use nix::sys::wait::{WaitPidFlag, waitpid};
                match waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)) {
                    Ok(WaitStatus::StillAlive) | Err(nix::Error::EINTR) => return None,
                    other => other,
                }
            }
        };
        // A status that this library does not know is a signal's.
        Some(End::Status(status.unwrap_or(WaitStatus::Signaled(
            Pid::from_raw(pid),
            Signal::SIGKILL,
            false,
        ))))
    }
}

/// The settings of a shard's start.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    /// The process that becomes its parent.
    pub keeper: &'a Arc<Keeper>,
    /// Program of the shard, which the VM keeps through reboots.
    pub program: &'a Arc<BuildProgram>,
    /// The VM's name.
    pub name: &'a str,
    /// Maximum length of a file that it writes, bytes.
    pub file_bytes: u64,
    /// Strictness of its sandbox.
    pub policy: SandboxPolicy,
    /// The namespaces that it gets.
    pub namespaces: &'a Namespaces,
    /// The user that it becomes.
    pub given: &'a Given,
}

impl ShardProcess {
    /// Starts a shard, which logs to `log`.
    pub fn start(start: Start<'_>, log: Arc<ShardLog>) -> io::Result<Self> {
        let (link, theirs) = ShardLink::pair()?;
        let Start {
            keeper,
            program,
            given,
            ..
        } = start;
        // A shard gets no environment.
        let log_words = process_log::Settings::of_environment()?.to_args();
        let words: Vec<&str> = [programs::SHARD, start.name]
            .into_iter()
            .chain(log_words.iter().map(String::as_str))
            .collect();
        let spawn = |identity: Option<shard_api::launch::Identity>| {
            keeper.spawn(&Spawn {
                program: program.file().as_fd(),
                control: theirs.as_fd(),
                log: log.as_fd(),
                words: &words,
                flags: start.namespaces.flags(),
                identity: identity.map(|given| keeper::spawn::Identity {
                    uid: given.uid,
                    gid: given.gid,
                }),
                file_bytes: start.file_bytes,
            })
        };
        let is_root = geteuid().is_root();
        let mut notes: Vec<String> = given.note.iter().cloned().collect();
        let mut identity = given.identity;
        if identity.is_some() && !is_root && !program.is_executable_by_others() {
            let path = program.path().display();
            notes.push(format!(
                "user id of its own: other users may not execute {path}; `chmod o+x` it"
            ));
            identity = None;
        }
        let spawned = match spawn(identity) {
            // The host's helpers refuse: the shard is this user's, as without a range.
            Err(error) if identity.is_some() && !is_root => {
                notes.push(format!("user id of its own: {error}"));
                spawn(None)?
            }
            spawned => spawned?,
        };
        if !is_root && identity.is_some() && notes.is_empty() && !spawned.is_mapped {
            notes.push("user id of its own: it takes a user namespace".to_owned());
        }
        let sandbox = SandboxLaunch {
            policy: start.policy,
            // Root's shard is never root, in a user namespace or not.
            identity: identity.filter(|_| is_root && !spawned.is_mapped),
            missing: start.namespaces.missing.clone(),
            notes,
        };
        Ok(Self {
            pid: spawned.pid,
            program: program.clone(),
            link,
            sandbox,
            log,
            process: spawned.pidfd,
            parent: Parent::Keeper(keeper.clone()),
            fault: OnceLock::new(),
            acknowledges_quit: AtomicBool::new(false),
            ended: Mutex::new(None),
        })
    }

    /// Takes over a shard that a predecessor of this process started.
    pub fn adopt(
        left: LeftShard,
        keeper: Arc<Keeper>,
        program: Arc<BuildProgram>,
        log: Arc<ShardLog>,
    ) -> Self {
        Self {
            pid: left.pid,
            program,
            link: left.link,
            sandbox: left.sandbox,
            log,
            process: left.process,
            parent: Parent::Keeper(keeper),
            fault: OnceLock::new(),
            acknowledges_quit: AtomicBool::new(left.acknowledges_quit),
            ended: Mutex::new(None),
        }
    }

    /// The VM's keeper, which waits for the shard's end. Tests may be the parent themselves.
    pub(crate) fn keeper(&self) -> Option<&Arc<Keeper>> {
        match &self.parent {
            Parent::Keeper(keeper) => Some(keeper),
            #[cfg(test)]
            Parent::This => None,
        }
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        pidfd::has_ended(self.pidfd())
    }

    /// The descriptor of the process.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// Notes the versions that it names in the report that it runs.
    pub(crate) fn note_versions(&self, versions: Versions) {
        let acknowledges = acknowledges_quit(versions);
        self.acknowledges_quit.store(acknowledges, Ordering::Relaxed);
    }

    /// Whether it acknowledges the order to quit at once. A shard of the release before does not.
    pub(crate) fn acknowledges_quit(&self) -> bool {
        self.acknowledges_quit.load(Ordering::Relaxed)
    }

    /// Gives it an order, and never waits. One that has left so many unread that there is no room for another
    /// hangs, or wants its monitor to wait: it is killed. Returns the order's number.
    pub fn order(&self, order: &Order) -> io::Result<OrderId> {
        let sent = self.link.order(order);
        if sent
            .as_ref()
            .is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        {
            let _ = self.fault.set("read no orders any more");
            self.cut_off();
            return Err(io::Error::other(
                "the VM reads no orders any more, so it was killed",
            ));
        }
        sent
    }

    /// Kills it, whatever its state is. Returns the known cause of its end.
    pub fn kill(&self) -> String {
        self.cut_off();
        self.wait()
    }

    /// Ends a process whose reports ended without a last one. It has a moment to end by itself, and is killed
    /// then. Returns the known cause of its end. `is_broken`: it sent a message that is no report.
    pub fn end_without_report(&self, is_broken: bool) -> String {
        let deadline = Instant::now() + SILENCE_LIMIT;
        // A process that dies closes its socket first.
        while !is_broken && !self.has_ended() && Instant::now() < deadline {
            pidfd::ends_within(self.pidfd(), PollTimeout::from(LOOK_MS));
        }
        if !self.has_ended() {
            // The first fault is the reason for which it is killed.
            let _ = self.fault.set(match is_broken {
                true => "sent what is no report",
                false => "closed its control socket",
            });
        }
        self.kill()
    }

    /// Kills it without waiting for its end.
    pub fn cut_off(&self) {
        pidfd::kill(self.pidfd());
        // Readers of its reports come to an end even if it gave its end of the socket away.
        self.link.shut_down();
    }

    /// Waits until it has ended; one that has reported its end, after which it has nothing to write, and does
    /// not exit within [`ACKNOWLEDGEMENT_LIMIT`] is killed. Returns what is known of its end.
    pub fn wait(&self) -> String {
        let deadline = Instant::now() + ACKNOWLEDGEMENT_LIMIT;
        let mut report_by = None;
        let ended = loop {
            if let Some(ended) = self.look() {
                break ended;
            }
            if self.has_ended() && Instant::now() > *report_by.get_or_insert(Instant::now() + REPORT_LIMIT) {
                break *self.ended().get_or_insert(End::Unreported);
            }
            if Instant::now() > deadline {
                self.cut_off();
            }
            // Without the lock. The report follows the end at once.
            if pidfd::ends_within(self.pidfd(), PollTimeout::from(LOOK_MS)) {
                std::thread::sleep(REPORT_POLL_INTERVAL);
            }
        };
        self.why(ended)
    }

    /// The ending that its exit status names, once it has ended by itself: for one without a last report.
    pub fn ending_of_exit(&self, why: &str) -> Option<Ending> {
        match *self.ended() {
            Some(End::Status(WaitStatus::Exited(_, status))) => Ending::of_exit_status(status, why),
            _ => None,
        }
    }

    fn why(&self, end: End) -> String {
        let how = match end {
            End::WithKeeper => "ended with its keeper, which was killed".to_owned(),
            End::Unreported => "has ended, which its keeper does not report".to_owned(),
            End::Status(WaitStatus::Signaled(_, Signal::SIGSYS, _)) => {
                "made a system call that its sandbox forbids".to_owned()
            }
            End::Status(WaitStatus::Signaled(_, signal, _)) => match self.fault.get() {
                Some(fault) if signal == Signal::SIGKILL => format!("{fault} and was killed"),
                _ => format!("was ended by {signal}"),
            },
            End::Status(WaitStatus::Exited(_, NOT_EXECUTED)) => {
                let path = self.program.path().display();
                format!(
                    "could not execute {path}; help: install it from the same build as `mirrorball`, \
                     executable for all users"
                )
            }
            End::Status(WaitStatus::Exited(_, code)) => format!("left with status {code}"),
            End::Status(_) => "is gone".to_owned(),
        };
        match self.log.last_line() {
            Some(last) => format!("its process {how}; it said: {last}"),
            None => format!("its process {how}"),
        }
    }

    /// The way in which it ended, if it has.
    fn look(&self) -> Option<End> {
        let mut ended = self.ended();
        if ended.is_none() {
            *ended = self.parent.end_of(self.pid);
        }
        // The kernel kills it with its keeper, which takes a moment.
        if matches!(*ended, Some(End::WithKeeper)) && !pidfd::has_ended(self.pidfd()) {
            pidfd::kill(self.pidfd());
            return None;
        }
        *ended
    }

    fn ended(&self) -> MutexGuard<'_, Option<End>> {
        // Each change is whole, whichever thread panicked.
        self.ended.lock().ignore_poison()
    }
}

/// A running shard that a monitor leaves to its successor.
#[derive(Debug)]
pub struct LeftShard {
    /// Its process id.
    pub pid: i32,
    /// The descriptor of the process.
    pub process: OwnedFd,
    /// The control socket.
    pub link: ShardLink,
    /// The sandbox, as far as it is made.
    pub sandbox: SandboxLaunch,
    /// The shard acknowledges the order to quit.
    pub acknowledges_quit: bool,
}

impl Drop for ShardProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
use shard_api::control::ControlSocket;

#[cfg(test)]
impl ShardProcess {
    /// This program as a shard, and its end of the socket, for tests.
    pub fn of(program: &mut std::process::Command) -> (Self, ControlSocket) {
        let (link, theirs) = ShardLink::of_launched().unwrap();
        let log = Arc::new(ShardLog::create(std::path::Path::new("/dev/null")).unwrap());
        let output = || log.as_fd().try_clone_to_owned().unwrap();
        // Its handle ends nothing, and waits for nothing.
        #[expect(
            clippy::zombie_processes,
            reason = "the shard process waits for it by its process id"
        )]
        let child = program.stdout(output()).stderr(output()).spawn().unwrap();
        let process = Self {
            pid: child.id() as i32,
            process: pidfd::of_child(&child).unwrap(),
            parent: Parent::This,
            program: Arc::new(BuildProgram::open(std::path::Path::new("/bin/true")).unwrap()),
            link,
            sandbox: SandboxLaunch::default(),
            log,
            fault: OnceLock::new(),
            acknowledges_quit: AtomicBool::new(false),
            ended: Mutex::new(None),
        };
        (process, theirs)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn process(program: &mut Command) -> ShardProcess {
        ShardProcess::of(program).0
    }

    #[test]
    fn each_waiter_receives_the_ending_and_not_before_the_end() {
        let sleeping = process(Command::new("sleep").arg("100"));
        std::thread::scope(|scope| {
            let waiting = [(); 3].map(|()| scope.spawn(|| sleeping.wait()));
            std::thread::sleep(ACKNOWLEDGEMENT_LIMIT / 5);
            assert!(waiting.iter().all(|one| !one.is_finished()), "it runs");
            let killed = "its process was ended by SIGKILL";
            assert_eq!(sleeping.kill(), killed);
            for one in waiting {
                assert_eq!(one.join().unwrap(), killed);
            }
        });
        let left = process(Command::new("sh").args(["-c", "exit 3"]));
        assert_eq!(left.wait(), "its process left with status 3");
        // Its number may be another process's by now.
        assert_eq!(left.kill(), "its process left with status 3");
        let unable = process(Command::new("sh").args(["-c", "exit 127"]));
        assert!(
            unable
                .wait()
                .starts_with("its process could not execute /bin/true; help: "),
            "{}",
            unable.wait()
        );
    }

    #[test]
    fn exit_status_names_the_ending_of_a_shard_that_reported_none() {
        let ending = |script: &str| {
            let left = process(Command::new("sh").args(["-c", script]));
            let why = left.wait();
            left.ending_of_exit(&why)
        };
        assert_eq!(ending("exit 0"), Some(Ending::PowerOff));
        assert_eq!(ending("exit 32"), Some(Ending::Reboot));
        let detail = "its process left with status 73; it said: no memory".to_owned();
        assert_eq!(
            ending("echo no memory; exit 73"),
            Some(Ending::ShardFailed { detail })
        );
        for nameless in ["exit 1", "exit 127", "kill -KILL $$"] {
            assert_eq!(ending(nameless), None, "{nameless}");
        }
    }

    #[test]
    fn one_that_does_not_go_is_killed() {
        let stays = process(Command::new("sleep").arg("100"));
        let begun = Instant::now();
        assert_eq!(stays.wait(), "its process was ended by SIGKILL");
        let took = begun.elapsed();
        assert!((ACKNOWLEDGEMENT_LIMIT..QUIT_LIMIT).contains(&took), "{took:?}");
    }

    #[test]
    fn last_lines_of_a_shard_are_part_of_its_ending() {
        let said = process(Command::new("sh").args(["-c", "echo one; printf '\\033[31mtwo\\n' >&2; exit 3"]));
        assert_eq!(said.wait(), "its process left with status 3; it said:  [31mtwo");
    }

    #[test]
    fn one_that_reads_no_orders_is_killed_by_the_order_that_finds_no_room() {
        let (hung, _unread) = ShardProcess::of(Command::new("sleep").arg("100"));
        let started = Instant::now();
        let refused = loop {
            if let Err(error) = hung.order(&Order::Status) {
                break error;
            }
        };
        assert!(refused.to_string().contains("reads no orders"), "{refused}");
        assert_eq!(hung.wait(), "its process read no orders any more and was killed");
        assert!(started.elapsed() < QUIT_LIMIT);
    }
}
