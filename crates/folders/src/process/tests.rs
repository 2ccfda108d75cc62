use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{MsgFlags, recv};
use nix::unistd::Pid;

use super::*;

const LIMIT: Duration = Duration::from_secs(20);

/// A process of a shell's script, and the reports of its end.
fn script(text: &str) -> (FolderSpec, Receiver<String>) {
    let (sender, receiver) = channel();
    let spec = FolderSpec {
        program: SealedProgram {
            file: Arc::new(File::open("/bin/sh").unwrap()),
            words: ["sh", "-c", text].map(OsString::from).into(),
        },
        folder: Arc::new(File::open("/").unwrap().into()),
        arguments: Arguments::default(),
        ended: Arc::new(move |why| sender.send(why.to_owned()).unwrap()),
    };
    (spec, receiver)
}

#[test]
fn end_of_a_process_is_reported_with_its_status_and_its_last_line() {
    let (spec, reports) = script("echo first >&2; echo last >&2; exit 3");
    let (_socket, _process) = FolderProcess::start(&spec).unwrap();
    assert_eq!(
        reports.recv_timeout(LIMIT).unwrap(),
        "the folder's server left with status 3; it said: last"
    );
}

#[test]
fn killed_process_is_reported_and_its_socket_ends() {
    let (spec, reports) = script("exec sleep 1000");
    let (socket, process) = FolderProcess::start(&spec).unwrap();
    let pid = Pid::from_raw(process.process().id().cast_signed());
    kill(pid, Signal::SIGKILL).unwrap();
    assert_eq!(
        reports.recv_timeout(LIMIT).unwrap(),
        "the folder's server was ended by SIGKILL"
    );
    assert_eq!(recv(socket.as_raw_fd(), &mut [0], MsgFlags::empty()), Ok(0));
}

#[test]
fn intended_end_is_not_reported() {
    let (spec, reports) = script("exec sleep 1000");
    drop(FolderProcess::start(&spec).unwrap());
    drop(spec);
    assert!(reports.recv_timeout(LIMIT).is_err(), "all senders are gone");
}

#[test]
fn process_that_ends_with_its_socket_is_not_reported() {
    let (spec, reports) = script("cat >/dev/null 2>&1; exit 0");
    let (socket, process) = FolderProcess::start(&spec).unwrap();
    drop(socket);
    child_process::service_process::END_LIMIT
        .checked_sub(Duration::ZERO)
        .unwrap();
    wait_for_end(process.process().pidfd());
    drop((process, spec));
    assert!(reports.recv_timeout(LIMIT).is_err());
}

#[test]
fn adopted_process_is_watched_by_its_next_owner() {
    let (spec, reports) = script("exec sleep 1000");
    let (_socket, first) = FolderProcess::start(&spec).unwrap();
    let left = LeftFolder {
        process: LeftProcess {
            pid: first.process().id(),
            pidfd: first.process().pidfd().try_clone_to_owned().unwrap(),
        },
        log: first.log().try_clone_to_owned().unwrap(),
    };
    let second = FolderProcess::adopt(left, &spec).unwrap();
    drop(first);
    let why = reports.recv_timeout(LIMIT).unwrap();
    assert_eq!(why, "the folder's server has ended");
    drop(second);
}
