//! The `mirrorball-lab` under test: a limit on every call, and one lab at a time, since two at once on two
//! CPUs are less reliable than one after the other.

use std::fmt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard};

use locks::IgnorePoison;
use nix::unistd::Pid;

/// Seconds a call may take; a lab is up after about 7.
const LIMIT_S: &str = "150";

static ONE_LAB: Mutex<()> = Mutex::new(());

/// Lock that allows one lab at a time; a test holds it to its end.
pub fn turn() -> MutexGuard<'static, ()> {
    ONE_LAB.lock().ignore_poison()
}

/// The program alone, without a limit.
pub fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mirrorball-lab"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// A call of the program that is killed after [`LIMIT_S`].
pub fn lab(arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", LIMIT_S, env!("CARGO_BIN_EXE_mirrorball-lab")]);
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Result of a call. A failing test prints its `Display`.
pub struct Ended {
    pub status: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Ended {
    #[track_caller]
    pub fn of(mut command: Command) -> Self {
        let output = command.output().unwrap();
        Self {
            status: output.status.code(),
            stdout: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Panics with everything known unless the exit status is `status`.
    #[track_caller]
    pub fn expect(self, status: i32) -> Self {
        assert_eq!(self.status, Some(status), "{self}");
        self
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = &self.stdout[..self.stdout.len().min(4096)];
        writeln!(f, "exit status {:?}", self.status)?;
        writeln!(f, "stdout:\n{}", String::from_utf8_lossy(start))?;
        writeln!(f, "stderr:\n{}", self.stderr)
    }
}

/// The directory of the lab `name`: its console, its lock.
pub fn directory(name: &str) -> PathBuf {
    let set = |name| std::env::var_os(name).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    cache
        .expect("a user has a home")
        .join("mirrorball/lab/labs")
        .join(name)
}

/// The QEMU processes whose command line has `word`.
pub fn hosts(word: &str) -> Vec<Pid> {
    let is_host = |pid: &i32| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.starts_with(b"qemu") && String::from_utf8_lossy(&line).contains(word))
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(is_host)
        .map(Pid::from_raw)
        .collect()
}
