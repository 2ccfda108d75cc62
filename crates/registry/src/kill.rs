//! Kill of a VM, also when the process that serves it is stopped or hangs.
//!
//! The process that serves a VM ends it and lets its shard flush the disks. A process that does not answer
//! within [`ANSWER_LIMIT`] does neither: then the VM's keeper is killed, and the kernel kills the shard with
//! it. The process finds the keeper gone when it goes on, or its successor does.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::control::{Answer, Request, ask};
use crate::vms::{self, Record};

/// Time that the process which serves a VM has for a request that it answers at once.
pub const ANSWER_LIMIT: Duration = Duration::from_millis(500);
/// Time that a shard has to be gone after its keeper was killed.
const GONE_LIMIT: Duration = Duration::from_secs(5);

/// How a VM was killed.
#[derive(Debug)]
pub enum Killed {
    /// By the process that serves it, which answered.
    Served(Answer),
    /// With its keeper, since that process did not answer in time.
    Forced,
}

/// Something that a request to the process resulted in.
enum Event {
    /// The request to kill the VM.
    Killed(io::Result<Answer>),
    /// The request that is answered at once.
    Alive(io::Result<Answer>),
}

/// Kills the VM with the directory `folder`. Returns when it has ended.
///
/// # Errors
/// If no process serves the VM's socket, or the VM can't be ended without its process.
pub fn kill(folder: &Path) -> io::Result<Killed> {
    let (sender, events) = mpsc::channel();
    let asked = Instant::now();
    spawn(folder, &sender, |folder| {
        Event::Killed(ask(folder, &Request::Kill, None))
    })?;
    spawn(folder, &sender, |folder| {
        let at_once = Request::AwaitEnd { limit_s: 0 };
        Event::Alive(ask(folder, &at_once, Some(ANSWER_LIMIT)))
    })?;
    drop(sender);
    let left = ANSWER_LIMIT.saturating_sub(asked.elapsed());
    match events.recv_timeout(left) {
        Ok(Event::Killed(answer)) => return answer.map(Killed::Served),
        Ok(Event::Alive(answer)) if answer.as_ref().is_err_and(is_late) => {}
        // An error of another kind is one of the request to kill, too.
        Ok(Event::Alive(_)) => return served(&events),
        Err(RecvTimeoutError::Timeout) => {}
        Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::BrokenPipe.into()),
    }
    if force(folder)? {
        return Ok(Killed::Forced);
    }
    served(&events)
}

/// Waits for the answer to the request to kill.
fn served(events: &mpsc::Receiver<Event>) -> io::Result<Killed> {
    loop {
        match events.recv() {
            Ok(Event::Killed(answer)) => return answer.map(Killed::Served),
            Ok(Event::Alive(_)) => {}
            Err(_) => return Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

fn spawn(
    folder: &Path,
    sender: &Sender<Event>,
    request: impl FnOnce(&Path) -> Event + Send + 'static,
) -> io::Result<()> {
    let (folder, sender) = (folder.to_owned(), sender.clone());
    let run = move || _ = sender.send(request(&folder));
    std::thread::Builder::new()
        .name("kill".into())
        .spawn(run)
        .map(drop)
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

/// Kills the VM's keeper, and waits until the shard is gone. Returns false if the VM has no keeper yet.
fn force(folder: &Path) -> io::Result<bool> {
    let record = match vms::read(folder) {
        Ok(record) => record,
        Err(_) if !folder.exists() => return Ok(false),
        Err(error) => return Err(error),
    };
    let Some(keeper) = record.keeper_pid else {
        return Ok(false);
    };
    let is_same = |now: Record| now.cid == record.cid && now.keeper_pid == record.keeper_pid;
    let shard = record.shard_pid.and_then(|pid| open(pid).ok());
    let Ok(keeper) = open(keeper) else {
        // It has ended, and its shard with it.
        return Ok(true);
    };
    // Whether the number is still the keeper's is known once the descriptor is open.
    if !vms::read(folder).is_ok_and(is_same) {
        return Ok(false);
    }
    // SAFETY: sends a signal; the kernel reads no memory of ours without the third argument.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            keeper.as_raw_fd(),
            libc::SIGKILL,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    let error = io::Error::last_os_error();
    if sent < 0 && error.raw_os_error() != Some(libc::ESRCH) {
        return Err(error);
    }
    for process in [Some(keeper), shard].into_iter().flatten() {
        if !has_ended(&process, Instant::now() + GONE_LIMIT)? {
            let why = "a process of the VM does not end though its keeper was killed";
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
    }
    Ok(true)
}

/// Opens the process that has this number now.
fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Waits until a process has ended. False if it has not before `deadline`.
fn has_ended(process: &OwnedFd, deadline: Instant) -> io::Result<bool> {
    use std::os::fd::AsFd;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], limit) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(nix::Error::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::process::{Child, Command};

    use serde_json::json;

    use super::*;
    use crate::control::OF_VM;

    /// The directory of a VM whose keeper and shard are these processes, and its control socket.
    fn vm(keeper: &Child, shard: &Child) -> (tempfile::TempDir, UnixListener) {
        let folder = tempfile::tempdir().unwrap();
        let record = json!({
            "name": "vm", "state": "running", "monitor_pid": 1,
            "keeper_pid": keeper.id(), "shard_pid": shard.id(),
            "started_unix_s": 0, "boots": 1, "cid": 3, "sandbox_missing": [], "spec": { "image": "tiny" },
        });
        std::fs::write(folder.path().join("vm.json"), record.to_string()).unwrap();
        let listener = UnixListener::bind(folder.path().join("control.sock")).unwrap();
        (folder, listener)
    }

    fn sleeper() -> Child {
        Command::new("sleep").arg("100").spawn().unwrap()
    }

    /// Answers each request, a kill after `kill_takes`.
    fn serve(listener: UnixListener, kill_takes: Duration) {
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let mut client = client.unwrap();
                std::thread::spawn(move || {
                    let mut line = String::new();
                    BufReader::new(&client).read_line(&mut line).unwrap();
                    let answer = match OF_VM.read(&line).unwrap() {
                        Request::Kill => {
                            std::thread::sleep(kill_takes);
                            Answer::Ended { killed: true }
                        }
                        _ => Answer::TimedOut,
                    };
                    client.write_all(&OF_VM.write(&answer).unwrap()).unwrap();
                });
            }
        });
    }

    #[test]
    fn vm_whose_process_answers_nothing_is_killed_with_its_keeper_within_a_second() {
        let (mut keeper, mut shard) = (sleeper(), sleeper());
        let (folder, _unserved) = vm(&keeper, &shard);
        // Its shard ends with it, as by the death signal.
        let shard_pid = nix::unistd::Pid::from_raw(shard.id() as i32);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                keeper.wait().unwrap();
                nix::sys::signal::kill(shard_pid, nix::sys::signal::Signal::SIGKILL).unwrap();
            });
            assert!(matches!(kill(folder.path()).unwrap(), Killed::Forced));
        });
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        shard.wait().unwrap();
    }

    #[test]
    fn vm_whose_process_answers_is_left_to_it_however_long_the_disks_take() {
        let (mut keeper, mut shard) = (sleeper(), sleeper());
        let (folder, listener) = vm(&keeper, &shard);
        serve(listener, ANSWER_LIMIT * 3);
        let killed = kill(folder.path()).unwrap();
        assert!(
            matches!(killed, Killed::Served(Answer::Ended { killed: true })),
            "{killed:?}"
        );
        for process in [&mut keeper, &mut shard] {
            assert!(process.try_wait().unwrap().is_none(), "it was left alone");
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    #[test]
    fn number_that_another_process_has_by_now_is_not_killed() {
        let (mut keeper, mut shard) = (sleeper(), sleeper());
        let (folder, _unserved) = vm(&keeper, &shard);
        // The VM has ended meanwhile.
        std::fs::remove_file(folder.path().join("vm.json")).unwrap();
        assert!(force(folder.path()).is_err());
        let gone = folder.path().join("gone");
        assert!(!force(&gone).unwrap());
        for process in [&mut keeper, &mut shard] {
            assert!(process.try_wait().unwrap().is_none());
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }
}
