//! Tests of the keeper's program with real processes. Some start this program again, as a monitor or its
//! successor.

mod connections;
mod processes;
mod successors;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use keeper::client::{Exit, Keeper, Spawn, Spawned};
use keeper::message::{Message, PACKET_BYTES_MAX};
use keeper::socket::Socket;
use keeper::spawn::Namespaces;
use keeper::state::CHILDREN_MAX;

const PROGRAM: &str = env!("CARGO_BIN_EXE_mirrorball-keeper");
/// Time for something that takes milliseconds on an idle machine.
const SOON: Duration = Duration::from_secs(20);
/// Greatest private memory of a keeper, KiB. A debug build is larger, and not the one in use.
const PRIVATE_KIB_MAX: u64 = if cfg!(debug_assertions) { 2048 } else { 300 };
const FILE_BYTES: u64 = 1 << 40;

fn keeper() -> Keeper {
    Keeper::start(File::open(PROGRAM).unwrap().as_fd(), "vm").unwrap()
}

/// Starts `path` without namespaces.
fn spawn(keeper: &Keeper, path: &str, words: &[&str]) -> io::Result<Spawned> {
    let null = File::options().write(true).open("/dev/null").unwrap();
    keeper.spawn(&Spawn {
        program: File::open(path).unwrap().as_fd(),
        control: null.as_fd(),
        log: null.as_fd(),
        words,
        flags: 0,
        identity: None,
        file_bytes: FILE_BYTES,
    })
}

fn sleeper(keeper: &Keeper) -> Spawned {
    spawn(keeper, "/bin/sleep", &["sleep", "100"]).unwrap()
}

#[track_caller]
fn wait_for<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether the process runs: it is there, and no zombie.
fn is_running(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

fn gone(pid: i32) -> Option<()> {
    (!is_running(pid)).then_some(())
}

fn kill(pid: i32, signal: i32) {
    // SAFETY: sends a signal to a process that this test started.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// This program again, running the one test in another role.
fn again(test: &str, role: &str, directory: &Path) -> Vec<String> {
    let directory = format!("directory={}", directory.display());
    let program = std::env::current_exe().unwrap();
    [
        program.to_str().unwrap(),
        test,
        "--exact",
        "--nocapture",
        role,
        &directory,
    ]
    .map(str::to_owned)
    .to_vec()
}

/// The directory that this process was started with, if it is in that role.
fn directory_of(role: &str) -> Option<PathBuf> {
    let words: Vec<String> = std::env::args().collect();
    let directory = words.iter().find_map(|word| word.strip_prefix("directory="));
    words
        .iter()
        .any(|word| word == role)
        .then(|| directory.unwrap().into())
}

fn start_monitor(test: &str, directory: &Path) -> Child {
    let words = again(test, "role=monitor", directory);
    Command::new(&words[0])
        .args(&words[1..])
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// Writes a file that is whole once others see it.
fn write(directory: &Path, name: &str, text: &str) {
    let unfinished = directory.join(format!("{name}.unfinished"));
    fs::write(&unfinished, text).unwrap();
    fs::rename(unfinished, directory.join(name)).unwrap();
}

/// Waits for a file of numbers.
#[track_caller]
fn read<const N: usize>(directory: &Path, name: &str) -> [i32; N] {
    let text = wait_for(SOON, || fs::read_to_string(directory.join(name)).ok());
    let numbers: Vec<i32> = text
        .split_whitespace()
        .map(|word| word.parse().unwrap())
        .collect();
    numbers.try_into().unwrap()
}

/// A monitor that waits until it is killed.
fn wait_to_be_killed() -> ! {
    std::thread::sleep(Duration::from_secs(100));
    panic!("nobody killed this monitor");
}

/// A keeper without a client of the library.
fn bare_keeper() -> (Child, Socket) {
    let (socket, theirs) = Socket::pair().unwrap();
    let keeper = Command::new(PROGRAM)
        .arg("vm")
        .stdin(Stdio::from(theirs))
        .spawn()
        .unwrap();
    (keeper, socket)
}
