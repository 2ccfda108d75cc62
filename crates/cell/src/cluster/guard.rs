//! Starts a cell's process, and starts it again when it dies. A process that does not answer is killed. The
//! guard of the cell on whose host the cluster's own etcd runs starts that, too, and the guard of a host's
//! first cell the admission server.
//!
//! A host that can't start a process, as without memory, may do so later: the guard tries again ([`lives`]).

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use config::cluster::{OnLost, Site};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use registry::cluster::client::Connection;
use registry::cluster::files::{CellFiles, Files};
use registry::cluster::interface::CellRequest;
use registry::journal::{self, Change};
use tracing::{error, info, warn};

use self::last_error::last_error;
use self::lives::{Lives, RETRY_PAUSE, SHORT, SHORT_LIVES_MAX};
use self::trials::Trials;
use self::upgrade::Upgrade;
use super::lost;
use super::membership::server::{self, Ended, RevocationWatch};
use crate::pidfd;

pub mod last_error;
pub mod lives;
pub mod trials;
mod upgrade;

/// Pause before etcd is started again.
const ETCD_PAUSE: Duration = Duration::from_secs(1);
/// Pause before the admission server is started again.
const ADMISSION_PAUSE: Duration = Duration::from_millis(200);
/// Interval between two requests to the cell. Each has 10 s for its answer ([`Connection::ask`]).
const PING_INTERVAL_MS: u16 = 2000;
/// Pause before another attempt to watch a process.
const WATCH_PAUSE: Duration = Duration::from_millis(100);

/// Guards the cell. Returns when the cell has ended by order, or is given up.
pub fn guard(number: u16) -> io::Result<()> {
    let files = Files::open()?;
    let is_first = |site: &Site| {
        site.host_of(number)
            .is_some_and(|host| host.cells.first() == Some(&number))
    };
    let site = files.site()?.filter(|site| site.runs_etcd && is_first(site));
    let keeps_etcd = site.is_some();
    if let Some(site) = site {
        std::thread::Builder::new().name("etcd".into()).spawn({
            let files = files.clone();
            move || keep_etcd(&files, &site)
        })?;
    }
    let own = files.cell(number);
    // Before the socket, which a second guard would take away.
    let lock = own.claim_guard(number)?;
    let upgrades = upgrade::listen(&own.guard_socket())?;
    let mut program = Program::default();
    // It goes on when this cell is given up: its VMs run on, and may lose their names later.
    let lost = std::thread::Builder::new().name("lost".into()).spawn({
        let files = files.clone();
        move || lost::watch(&files, number)
    })?;
    let stops = || {
        files
            .site()
            .is_ok_and(|site| site.is_some_and(|site| site.on_lost == OnLost::Stop))
    };
    let first = files.plan()?.first().map(|cell| cell.number);
    let keeps_admission = first == Some(number) && !files.users()?.is_empty();
    if keeps_admission {
        std::thread::Builder::new().name("admission".into()).spawn({
            let files = files.clone();
            move || keep_admission(&files)
        })?;
    }
    let mut lives = Lives::default();
    // A request to replace the program of a process that did not start.
    let mut request = None;
    loop {
        if own.has_failed() {
            warn!("the cell has failed, and does not start again");
            // The cluster's etcd and the admission server would end with this process.
            while (keeps_etcd || keeps_admission) && lock.is_current() {
                std::thread::sleep(ETCD_PAUSE);
            }
            return Ok(());
        }
        let start = Instant::now();
        let status = match live(&mut program, &own, number, &upgrades, request.take())? {
            Life::Ended => return Ok(()),
            Life::NotStarted(error) => {
                let pause = lives.not_started();
                error!(%error, ?pause, "the cell's process does not start, and is started again");
                request = wait_for_request(&upgrades, pause);
                // The cluster may have ended meanwhile.
                if own.is_to_end() || !lock.is_current() {
                    request
                        .into_iter()
                        .for_each(|request| request.answer(Err("the cell has ended by order".to_owned())));
                    return Ok(());
                }
                continue;
            }
            Life::Died(status) => status,
        };
        let reason = last_error(&own.log());
        warn!("the cell's process died: {status}");
        journal::note(Change::CellDied {
            cell: number,
            why: status.to_string(),
        });
        if let Some(pause) = lives.died(start.elapsed()) {
            std::thread::sleep(pause);
            continue;
        }
        let reason = reason.map_or_else(String::new, |reason| format!("; the last time: {reason}"));
        let why = format!(
            "cell {number} died {SHORT_LIVES_MAX} times within {} s of its start{reason}",
            SHORT.as_secs()
        );
        if keeps_etcd || keeps_admission {
            // The cluster's etcd and the admission server would end with this process.
            error!("{why}; it starts again after {} s", RETRY_PAUSE.as_secs());
            let is_over = || own.is_to_end() || !lock.is_current();
            match wait_to_retry(RETRY_PAUSE, is_over, &upgrades) {
                Paused::Over => return Ok(()),
                Paused::GoOn(asked) => request = asked,
            }
            continue;
        }
        if stops() {
            error!("{why}; it does not start again");
            let _ = lost.join();
        }
        return Err(io::Error::other(why));
    }
}

/// The end of a pause.
enum Paused {
    /// The cell is over.
    Over,
    /// The cell starts again, by another program if a client requests that.
    GoOn(Option<Upgrade>),
}

/// Waits for `limit`, until the cell is over, or for a request to replace its program.
fn wait_to_retry(limit: Duration, is_over: impl Fn() -> bool, upgrades: &UnixListener) -> Paused {
    let end = Instant::now() + limit;
    while !is_over() {
        let request = wait_for_request(upgrades, ETCD_PAUSE);
        if request.is_some() || Instant::now() >= end {
            return Paused::GoOn(request);
        }
    }
    Paused::Over
}

/// The life of a cell's process, and of those that replaced it by request.
#[derive(Debug)]
enum Life {
    /// The cell's process has ended by order.
    Ended,
    /// The cell's process has died, with this status.
    Died(ExitStatus),
    /// No process has begun, or a process was ended and no other one started.
    NotStarted(io::Error),
}

/// Waits for a request to replace the program, for `limit` at most. One that makes no sense is answered, and
/// ends the wait.
fn wait_for_request(upgrades: &UnixListener, limit: Duration) -> Option<Upgrade> {
    let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    // A signal to this process shortens the wait.
    let count = poll(&mut [PollFd::new(upgrades.as_fd(), PollFlags::POLLIN)], limit);
    count
        .is_ok_and(|count| count > 0)
        .then(|| Upgrade::take(upgrades))?
}

/// Starts a process of the cell, of the program that `request` names, if it names one. Returns when none
/// runs any more.
fn live(
    program: &mut Program,
    own: &CellFiles,
    number: u16,
    upgrades: &UnixListener,
    request: Option<Upgrade>,
) -> io::Result<Life> {
    let started = match request {
        Some(request) => program.replace(None, own, number, request)?,
        None => match program.start(number, false) {
            Ok(cell) => Replaced::Runs(cell),
            Err(error) => Replaced::Over(Life::NotStarted(error)),
        },
    };
    let mut cell = match started {
        Replaced::Runs(cell) => cell,
        Replaced::Over(life) => return Ok(life),
    };
    loop {
        match wait(&mut cell, own, upgrades)? {
            Happened::Ended(status) if status.success() => return Ok(Life::Ended),
            Happened::Ended(status) => return Ok(Life::Died(status)),
            Happened::Asked(upgrade) => match program.replace(Some(cell), own, number, upgrade)? {
                Replaced::Runs(next) => cell = next,
                Replaced::Over(life) => return Ok(life),
            },
        }
    }
}

/// The result of a request to replace the program.
#[derive(Debug)]
enum Replaced {
    /// This process of the new program or of the former one runs.
    Runs(Child),
    /// No process runs.
    Over(Life),
}

/// The program of the cell's processes: this one, until another takes its place.
#[derive(Debug, Default)]
struct Program(Trials<Option<OwnedFd>>);

impl Program {
    /// Starts a process of the cell. A process on trial reports whether it has adopted the VMs of the last
    /// process.
    fn start(&self, number: u16, is_on_trial: bool) -> io::Result<Child> {
        let path = self.0.program().as_ref().map(upgrade::path_of);
        let mut command = Command::new(path.as_deref().unwrap_or("/proc/self/exe"));
        command
            .arg0("mirrorball")
            .args(["cell", &number.to_string()])
            .args(is_on_trial.then_some("trial"))
            .stdin(Stdio::null())
            .spawn()
    }

    /// Ends the process `cell`, if one runs, and starts one of a new program, or of the former one if the new
    /// one does not adopt the VMs.
    fn replace(
        &mut self,
        cell: Option<Child>,
        own: &CellFiles,
        number: u16,
        upgrade: Upgrade,
    ) -> io::Result<Replaced> {
        let new = match upgrade.program.as_fd().try_clone_to_owned() {
            Ok(new) => new,
            Err(error) => {
                error!(%error, "the cell's program is not replaced");
                upgrade.answer(Err(format!("the guard can't keep the new program: {error}")));
                return Ok(match cell {
                    Some(cell) => Replaced::Runs(cell),
                    None => Replaced::Over(Life::NotStarted(error)),
                });
            }
        };
        info!("the cell's program is replaced");
        if let Some(mut cell) = cell {
            cell.kill()?;
            if cell.wait()?.success() {
                // The process was ordered to end just before.
                upgrade.answer(Err("the cell has ended by order".to_owned()));
                return Ok(Replaced::Over(Life::Ended));
            }
        }
        self.0.begin(Some(new));
        let tried = self.start(number, true).map_err(upgrade::TrialError::NotStarted);
        let tried = tried.and_then(|mut cell| match upgrade::try_out(&mut cell, own) {
            Ok(()) => Ok(cell),
            Err(why) => {
                // A process that has ended needs no signal.
                let _ = cell.kill();
                let _ = cell.wait();
                Err(why)
            }
        });
        self.0.end(tried.is_ok());
        match tried {
            Ok(cell) => {
                info!("the new program has adopted the cell's VMs");
                upgrade.answer(Ok(()));
                Ok(Replaced::Runs(cell))
            }
            Err(why) => {
                error!(%why, "the cell goes on with its former program");
                let started = self.start(number, false);
                upgrade.answer(Err(why.to_string()));
                Ok(match started {
                    Ok(cell) => Replaced::Runs(cell),
                    Err(error) => Replaced::Over(Life::NotStarted(error)),
                })
            }
        }
    }
}

/// The event that ends a wait for a cell's process.
enum Happened {
    /// The process has ended.
    Ended(ExitStatus),
    /// A client requests another program.
    Asked(Upgrade),
}

/// Waits for the end of the cell's process, or a request; kills the process if it hangs. Until it accepts
/// requests it may wait for other cells without a limit.
fn wait(cell: &mut Child, files: &CellFiles, upgrades: &UnixListener) -> io::Result<Happened> {
    let process = loop {
        match pidfd::of_child(cell) {
            Ok(process) => break process,
            Err(error) => warn!(%error, "the cell's process is not watched yet"),
        }
        if let Some(status) = cell.try_wait()? {
            return Ok(Happened::Ended(status));
        }
        std::thread::sleep(WATCH_PAUSE);
    };
    loop {
        let mut ready = [process.as_fd(), upgrades.as_fd()].map(|file| PollFd::new(file, PollFlags::POLLIN));
        // A signal to this process shortens the wait.
        let count = poll(&mut ready, PollTimeout::from(PING_INTERVAL_MS)).unwrap_or(0);
        let [has_ended, is_asked] = ready.map(|file| count > 0 && file.any().unwrap_or(false));
        if has_ended {
            return cell.wait().map(Happened::Ended);
        }
        if is_asked {
            match Upgrade::take(upgrades) {
                Some(upgrade) => return Ok(Happened::Asked(upgrade)),
                None => continue,
            }
        }
        let answer = Connection::open(files).and_then(|mut connection| connection.ask(&CellRequest::Ping));
        let is_late =
            |error: io::Error| matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        if answer.is_err_and(is_late) {
            warn!("the cell's process does not answer, and is killed");
            cell.kill()?;
        }
    }
}

/// Runs the etcd of a cluster that was given none, for as long as the guard lives.
fn keep_etcd(files: &Files, site: &Site) {
    loop {
        let run = || {
            let watch = RevocationWatch::begin(&site.keys)?;
            watch.wait(&mut start_etcd(files, site)?)
        };
        match run() {
            Ok(Ended::ListChanged) => {
                info!("etcd starts again: the list of revoked certificates has changed");
                continue;
            }
            Ok(Ended::Exited(status)) => warn!("etcd ended: {status}"),
            Err(error) => error!(%error, "etcd does not start; Debian has it in `etcd-server`"),
        }
        std::thread::sleep(ETCD_PAUSE);
    }
}

/// Runs the admission server for as long as the guard lives.
fn keep_admission(files: &Files) {
    while files.plan().is_ok_and(|plan| !plan.is_empty()) {
        match start_admission(files).and_then(|mut server| server.wait()) {
            Ok(status) => warn!("the admission server ended: {status}"),
            Err(error) => error!(%error, "the admission server does not start"),
        }
        std::thread::sleep(ADMISSION_PAUSE);
    }
}

fn start_admission(files: &Files) -> io::Result<Child> {
    let log = hostfiles::private::log(&files.admission_log())?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("mirrorball").arg("cell-admission");
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    end_with_guard(&mut command);
    command.spawn()
}

/// Makes the process of `command` end with the thread that spawns it, which lives as long as the guard.
fn end_with_guard(command: &mut Command) {
    // SAFETY: prctl is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
}

fn start_etcd(files: &Files, site: &Site) -> io::Result<Child> {
    let url = site.etcd.first().map_or("", String::as_str);
    let folder = files.etcd();
    std::fs::create_dir_all(&folder)?;
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("log"))?;
    let mut command = server::command(url, &site.keys, &folder)?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    end_with_guard(&mut command);
    command.spawn()
}

#[cfg(test)]
mod tests {
    use std::fs::{File, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;

    /// A file that is no program, though it may be executed.
    fn broken(folder: &Path) -> File {
        let path = folder.join("program");
        std::fs::write(&path, "\0").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        File::open(&path).unwrap()
    }

    #[test]
    fn failed_start_is_reported_and_does_not_end_the_guard() {
        let folder = tempfile::tempdir().unwrap();
        let own = Files::at(folder.path()).cell(0);
        let upgrades = upgrade::listen(&folder.path().join("guard.sock")).unwrap();
        let mut program = Program(Trials::new(Some(broken(folder.path()).into())));
        for _ in 0..2 {
            let life = live(&mut program, &own, 0, &upgrades, None).unwrap();
            assert!(matches!(life, Life::NotStarted(_)), "{life:?}");
        }
    }

    #[test]
    fn upgrade_is_heard_while_the_guard_waits_to_start_its_cell_again() {
        let folder = tempfile::tempdir().unwrap();
        let own = Files::at(folder.path()).cell(0);
        std::fs::create_dir_all(own.guard_socket().parent().unwrap()).unwrap();
        let upgrades = upgrade::listen(&own.guard_socket()).unwrap();
        assert!(wait_for_request(&upgrades, Duration::from_millis(10)).is_none());
        let new = broken(folder.path());
        let client = std::thread::spawn({
            let own = own.clone();
            move || registry::cluster::guard::upgrade(&own, &new)
        });
        let begun = Instant::now();
        let request = wait_for_request(&upgrades, Duration::from_secs(60));
        assert!(request.is_some() && begun.elapsed() < Duration::from_secs(30));
        let mut program = Program(Trials::new(Some(broken(folder.path()).into())));
        let life = live(&mut program, &own, 0, &upgrades, request).unwrap();
        assert!(matches!(life, Life::NotStarted(_)), "{life:?}");
        let why = client.join().unwrap().unwrap_err().to_string();
        assert!(why.contains("the new program does not start"), "{why}");
    }

    #[test]
    fn former_program_that_does_not_start_after_a_failed_trial_is_started_again() {
        let folder = tempfile::tempdir().unwrap();
        let own = Files::at(folder.path()).cell(0);
        std::fs::create_dir_all(own.guard_socket().parent().unwrap()).unwrap();
        let upgrades = upgrade::listen(&own.guard_socket()).unwrap();
        let new = broken(folder.path());
        let client = std::thread::spawn({
            let own = own.clone();
            move || registry::cluster::guard::upgrade(&own, &new)
        });
        let deadline = Instant::now() + Duration::from_secs(10);
        let upgrade = loop {
            match Upgrade::take(&upgrades) {
                Some(upgrade) => break upgrade,
                None => assert!(Instant::now() < deadline, "no request comes"),
            }
        };
        let mut program = Program(Trials::new(Some(broken(folder.path()).into())));
        let cell = Command::new("sleep").arg("60").spawn().unwrap();
        let replaced = program.replace(Some(cell), &own, 0, upgrade).unwrap();
        assert!(
            matches!(replaced, Replaced::Over(Life::NotStarted(_))),
            "{replaced:?}"
        );
        let why = client.join().unwrap().unwrap_err().to_string();
        assert!(why.contains("the new program does not start"), "{why}");
    }
}
