//! Starts a cell's process, and starts it again when it dies. One that does not answer is killed. The guard of the cell on whose host the
//! cluster's own etcd runs starts that, too.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use config::cluster::Site;
use registry::cluster::client::Connection;
use registry::cluster::files::{CellFiles, Files};
use registry::cluster::interface::Ask;
use tracing::{error, info, warn};

use super::membership::server::{self, Ended, RevocationWatch};
use crate::pidfd;

/// A process that lived shorter than this died of its start, maybe.
const SHORT: Duration = Duration::from_secs(10);
/// Short lives in a row, after which it is given up.
const SHORT_LIVES_MAX: u32 = 10;
/// Before etcd is started again.
const ETCD_PAUSE: Duration = Duration::from_secs(1);
/// Between two questions to the cell. Each has 10 s for its answer ([`Connection::ask`]).
const PING_INTERVAL_MS: u16 = 2000;
/// Before another try, times the short lives so far.
const PAUSE: Duration = Duration::from_millis(20);

/// Returns when the cell was told to end, or can't be.
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
    let mut short_lives = 0;
    loop {
        if files.cell(number).has_failed() {
            warn!("the cell has failed, and does not start again");
            // The cluster's etcd would end with this process.
            while keeps_etcd && files.plan().is_ok_and(|plan| !plan.is_empty()) {
                std::thread::sleep(ETCD_PAUSE);
            }
            return Ok(());
        }
        let start = Instant::now();
        let mut cell = Command::new("/proc/self/exe")
            .arg0("mirrorball")
            .args(["cell", &number.to_string()])
            .stdin(Stdio::null())
            .spawn()?;
        let status = wait(&mut cell, &files.cell(number))?;
        if status.success() {
            return Ok(());
        }
        warn!("the cell's process died: {status}");
        short_lives = if start.elapsed() < SHORT {
            short_lives + 1
        } else {
            0
        };
        if short_lives >= SHORT_LIVES_MAX {
            return Err(io::Error::other(format!(
                "cell {number} died {short_lives} times within {} s of its start",
                SHORT.as_secs()
            )));
        }
        std::thread::sleep(PAUSE * short_lives);
    }
}

/// Waits for the end of the cell's process; kills it if it hangs. Until it takes questions it may wait for others as long as it wants.
fn wait(cell: &mut Child, files: &CellFiles) -> io::Result<ExitStatus> {
    let process = pidfd::of_child(cell)?;
    while !pidfd::ends_within(process.as_fd(), PING_INTERVAL_MS.into()) {
        let answer = Connection::open(files).and_then(|mut connection| connection.ask(&Ask::Ping));
        let is_late =
            |error: io::Error| matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        if answer.is_err_and(is_late) {
            warn!("the cell's process does not answer, and is killed");
            cell.kill()?;
        }
    }
    cell.wait()
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
    // SAFETY: prctl is async-signal-safe. The thread that spawns it lives as long as the guard.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    command.spawn()
}
