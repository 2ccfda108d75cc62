//! The process of a shard, from its start to its end.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, geteuid};
use shard_api::launch::{Ending, Order, OrderId, SandboxLaunch, SandboxPolicy};

use crate::handle::QUIT_LIMIT;
use crate::identity::Given;
use crate::link::ShardLink;
use crate::shard_limits::ShardLimits;
use crate::shard_log::ShardLog;
use crate::shard_program::{self, ShardProgram};
use crate::spawn::{self, Namespaces};

/// How often a process that is waited for is looked at.
const LOOK: Duration = Duration::from_millis(1);

/// A shard's process, which waits for what it is to run. Killed when this is dropped before it has ended. Several threads may
/// wait for its end, or kill it; each is told how it ended.
#[derive(Debug)]
pub struct ShardProcess {
    /// Its process id, as the monitor sees it.
    pub pid: i32,
    /// The program that it executes.
    pub program: Arc<ShardProgram>,
    /// The control socket.
    pub link: ShardLink,
    /// The sandbox, as far as it is made.
    pub sandbox: SandboxLaunch,
    /// Where it writes what it has to say.
    pub log: Arc<ShardLog>,
    /// It was killed because it left its orders unread.
    is_deaf: AtomicBool,
    /// How it ended, once it was waited for. Its id may be another's from then on: signals are sent under the lock.
    ended: Mutex<Option<nix::Result<WaitStatus>>>,
}

impl ShardProcess {
    /// Starts one for the VM `name`, as the user `given`.
    pub fn start(
        program: &Arc<ShardProgram>,
        name: &str,
        log: Arc<ShardLog>,
        limits: ShardLimits,
        policy: SandboxPolicy,
        namespaces: &Namespaces,
        given: &Given,
    ) -> io::Result<Self> {
        let (link, theirs) = ShardLink::pair()?;
        let spawn = |identity| {
            spawn::spawn(
                program.file().as_fd(),
                [shard_program::NAME, name],
                theirs.as_fd(),
                log.as_fd(),
                namespaces,
                identity,
            )
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
            policy,
            // Root's shard is never root, in a user namespace or not.
            identity: identity.filter(|_| is_root && !spawned.is_mapped),
            missing: spawned.missing,
            notes,
        };
        let process = Self {
            pid: spawned.pid,
            program: program.clone(),
            link,
            sandbox,
            log,
            is_deaf: AtomicBool::new(false),
            ended: Mutex::new(None),
        };
        // It waits for its launch meanwhile. Without its limits it is killed.
        limits.apply(process.pid)?;
        Ok(process)
    }

    /// Gives it an order, and never waits. One that has left so many unread that there is no room for another hangs, or wants
    /// its monitor to wait: it is killed. Returns the order's number.
    pub fn order(&self, order: &Order) -> io::Result<OrderId> {
        let sent = self.link.order(order);
        if sent
            .as_ref()
            .is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        {
            self.is_deaf.store(true, Ordering::Relaxed);
            self.cut_off();
            return Err(io::Error::other(
                "the VM reads no orders any more, so it was killed",
            ));
        }
        sent
    }

    /// Ends it, whatever it does. Returns what is known of its end.
    pub fn kill(&self) -> String {
        self.cut_off();
        self.wait()
    }

    /// Has it killed, and does not wait until it is.
    pub fn cut_off(&self) {
        if self.ended().is_none() {
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(self.pid), Signal::SIGKILL);
        }
        // Readers of its reports come to an end even if it gave its end of the socket away.
        self.link.shut_down();
    }

    /// Waits until it has ended; one that has reported its end and does not go is killed. Returns what is known of its end.
    pub fn wait(&self) -> String {
        let deadline = Instant::now() + QUIT_LIMIT;
        let ended = loop {
            if let Some(ended) = self.look() {
                break ended;
            }
            if Instant::now() > deadline {
                self.cut_off();
            }
            // Without the lock.
            std::thread::sleep(LOOK);
        };
        self.why(ended.ok())
    }

    /// The ending that its exit status names, once it has left by itself: for one without a last report.
    pub fn ending_of_exit(&self, why: &str) -> Option<Ending> {
        match *self.ended() {
            Some(Ok(WaitStatus::Exited(_, status))) => Ending::of_exit_status(status, why),
            _ => None,
        }
    }

    fn why(&self, status: Option<WaitStatus>) -> String {
        let how = match status {
            Some(WaitStatus::Signaled(_, Signal::SIGSYS, _)) => {
                "made a system call that its sandbox forbids".to_owned()
            }
            Some(WaitStatus::Signaled(..)) if self.is_deaf.load(Ordering::Relaxed) => {
                "read no orders any more and was killed".to_owned()
            }
            Some(WaitStatus::Signaled(_, signal, _)) => format!("was ended by {signal}"),
            Some(WaitStatus::Exited(_, spawn::NOT_EXECUTED)) => {
                let path = self.program.path().display();
                format!(
                    "could not execute {path}; help: install it from the same build as `mirrorball`, executable for all users"
                )
            }
            Some(WaitStatus::Exited(_, code)) => format!("left with status {code}"),
            _ => "is gone".to_owned(),
        };
        match self.log.last_line() {
            Some(last) => format!("its process {how}; it said: {last}"),
            None => format!("its process {how}"),
        }
    }

    /// How it ended, if it has.
    fn look(&self) -> Option<nix::Result<WaitStatus>> {
        let mut ended = self.ended();
        if ended.is_none() {
            *ended = match waitpid(Pid::from_raw(self.pid), Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) | Err(nix::Error::EINTR) => None,
                other => Some(other),
            };
        }
        *ended
    }

    fn ended(&self) -> MutexGuard<'_, Option<nix::Result<WaitStatus>>> {
        // Each change is whole, whoever panicked.
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        let log = Arc::new(ShardLog::start(std::path::Path::new("/dev/null")).unwrap());
        let output = || log.as_fd().try_clone_to_owned().unwrap();
        let process = Self {
            // Its handle ends nothing, and waits for nothing.
            pid: program.stdout(output()).stderr(output()).spawn().unwrap().id() as i32,
            program: Arc::new(ShardProgram::open(std::path::Path::new("/bin/true")).unwrap()),
            link,
            sandbox: SandboxLaunch::default(),
            log,
            is_deaf: AtomicBool::new(false),
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
    fn all_who_wait_are_told_how_it_ended_and_not_before() {
        let sleeping = process(Command::new("sleep").arg("100"));
        std::thread::scope(|scope| {
            let waiting = [(); 3].map(|()| scope.spawn(|| sleeping.wait()));
            std::thread::sleep(QUIT_LIMIT / 50);
            assert!(waiting.iter().all(|one| !one.is_finished()), "it runs");
            let killed = "its process was ended by SIGKILL";
            assert_eq!(sleeping.kill(), killed);
            for one in waiting {
                assert_eq!(one.join().unwrap(), killed);
            }
        });
        let left = process(Command::new("sh").args(["-c", "exit 3"]));
        assert_eq!(left.wait(), "its process left with status 3");
        // Its number may be another's by now.
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
        assert_eq!(stays.wait(), "its process was ended by SIGKILL");
    }

    #[test]
    fn what_it_said_last_goes_with_its_end() {
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
