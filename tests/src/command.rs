//! One call of a command, with a limit: its command line, its output, and its end.

use std::ffi::OsStr;
use std::fmt;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::wait;

/// Longer than any guest of these tests takes to boot in a lab host whose other CPU is busy.
pub const BOOT_LIMIT: Duration = Duration::from_secs(120);

/// The `mirrorball` under test: `MIRRORBALL_BIN`, or the one built beside this test.
pub fn binary() -> PathBuf {
    match std::env::var_os("MIRRORBALL_BIN") {
        Some(path) => path.into(),
        None => built("mirrorball"),
    }
}

/// Programs that the command starts and finds beside its own file.
const BESIDE: [&str; 2] = ["mirrorball-shard", "mirrorball-keeper"];

/// Copies the command under test to `path`, and the programs of shards and keepers beside it. Commands of old
/// commits lack some of them.
pub fn copy_binary(path: &Path) -> std::io::Result<()> {
    std::fs::copy(binary(), path)?;
    for name in BESIDE {
        match std::fs::copy(binary().with_file_name(name), path.with_file_name(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// A program of the build directory that this test is in.
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("/proc/self/exe can be read");
    let place = test
        .parent()
        .and_then(Path::parent)
        .expect("a test is in target/.../deps");
    place.join(name)
}

/// A call of `mirrorball`. A `run` is never forwarded to a lab host: where the test runs, the VM runs.
pub fn mirrorball<I: AsRef<OsStr>>(arguments: impl IntoIterator<Item = I>) -> Call {
    let mut call = Call::new(binary());
    for argument in arguments {
        call.command.arg(&argument);
        if argument.as_ref() == "run" {
            call.command.args(["--lab", "never"]);
        }
    }
    call
}

/// A program about to be called.
pub struct Call {
    command: Command,
    input: Vec<u8>,
    limit: Duration,
}

impl Call {
    /// Calls `program` with no input and a limit of [`BOOT_LIMIT`].
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            command: Command::new(program),
            input: Vec::new(),
            limit: BOOT_LIMIT,
        }
    }

    /// Appends arguments to those that the command has.
    pub fn args<I: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = I>) -> Self {
        self.command.args(arguments);
        self
    }

    /// Gives the program these bytes on stdin.
    pub fn input(mut self, bytes: &[u8]) -> Self {
        self.input = bytes.to_vec();
        self
    }

    /// Kills the program after this time.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sets a variable of the environment.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs it in this directory.
    pub fn folder(mut self, path: &Path) -> Self {
        self.command.current_dir(path);
        self
    }

    /// The command line, for messages.
    pub fn line(&self) -> String {
        let words = std::iter::once(self.command.get_program()).chain(self.command.get_args());
        words
            .map(|word| word.to_string_lossy().into_owned())
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Starts it and lets it run; the caller waits for it or kills it.
    #[track_caller]
    pub fn spawn(mut self) -> Running {
        let line = self.line();
        self.command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // Its own group: a limit kills what it started, too.
        self.command.process_group(0);
        // A shell that starts the tests in the background has them ignore Ctrl-C, and their children would,
        // too. SAFETY: signal is async-signal-safe, and the default action runs no code of this process.
        unsafe {
            self.command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            });
        }
        let started = self.command.spawn();
        let mut child = started.unwrap_or_else(|error| panic!("can't start {line}: {error}"));
        let mut stdin = child.stdin.take().expect("piped");
        let input = std::mem::take(&mut self.input);
        std::thread::spawn(move || stdin.write_all(&input));
        let stdout = collect(child.stdout.take().expect("piped"));
        let stderr = collect(child.stderr.take().expect("piped"));
        Running {
            child,
            line,
            seen: Vec::new(),
            stdout,
            stderr,
            limit: self.limit,
            start: Instant::now(),
        }
    }

    /// Runs it to its end. A program over its limit is killed and has the status [`Output::OVER_LIMIT`].
    #[track_caller]
    pub fn run(self) -> Output {
        self.spawn().wait()
    }

    /// Runs it and expects exit status 0.
    #[track_caller]
    pub fn ok(self) -> Output {
        self.run().expect(0)
    }
}

type Collector = std::sync::mpsc::Receiver<Vec<u8>>;

fn collect(mut stream: impl Read + Send + 'static) -> Collector {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut chunk = vec![0; 64 << 10];
        while let Ok(count @ 1..) = stream.read(&mut chunk) {
            if sender.send(chunk[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// A started program.
pub struct Running {
    child: Child,
    line: String,
    /// Part of stdout that was read already.
    seen: Vec<u8>,
    stdout: Collector,
    stderr: Collector,
    limit: Duration,
    start: Instant,
}

impl Running {
    /// Process id of the command.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to it alone.
    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, signal).expect("the child was not waited for yet");
    }

    /// Waits until `text` was written to stdout.
    #[track_caller]
    pub fn wait_for(&mut self, text: &str, limit: Duration) {
        let found = wait::within(limit, || {
            self.seen.extend(self.stdout.try_iter().flatten());
            String::from_utf8_lossy(&self.seen).contains(text).then_some(())
        });
        if found.is_none() {
            let seen = tail(&String::from_utf8_lossy(&self.seen), 60);
            panic!("no {text:?} within {limit:?} from {}:\n{seen}", self.line);
        }
    }

    /// Its output to stdout so far.
    pub fn seen(&mut self) -> String {
        self.seen.extend(self.stdout.try_iter().flatten());
        String::from_utf8_lossy(&self.seen).into_owned()
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("our own child").is_some()
    }

    /// Waits for its end.
    pub fn wait(mut self) -> Output {
        let left = self.limit.saturating_sub(self.start.elapsed());
        let ended = wait::within(left, || self.child.try_wait().expect("our own child"));
        let status = match ended {
            Some(status) => status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
            None => {
                let group = nix::unistd::Pid::from_raw(self.child.id() as i32);
                // It may have ended just now.
                let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
                let _ = self.child.wait();
                Output::OVER_LIMIT
            }
        };
        let took = self.start.elapsed();
        Output {
            status,
            stdout: self.seen.into_iter().chain(drain(&self.stdout)).collect(),
            stderr: drain(&self.stderr),
            line: self.line,
            took,
        }
    }
}

/// All output up to the end of file; a stream that a left process keeps open is not waited for.
fn drain(from: &Collector) -> Vec<u8> {
    let mut all = Vec::new();
    while let Ok(chunk) = from.recv_timeout(Duration::from_secs(5)) {
        all.extend(chunk);
    }
    all
}

/// How a program ended. A failing test prints its `Display`.
pub struct Output {
    /// Exit status; 128 plus the signal when a signal ended it.
    pub status: i32,
    /// Its output to stdout.
    pub stdout: Vec<u8>,
    /// Its output to stderr.
    pub stderr: Vec<u8>,
    /// Time from start to end.
    pub took: Duration,
    line: String,
}

impl Output {
    /// The status of a program that was killed at its limit.
    pub const OVER_LIMIT: i32 = -1;

    /// Panics with everything known unless the exit status is `status`.
    #[track_caller]
    pub fn expect(self, status: i32) -> Self {
        assert!(self.status == status, "expected exit status {status}:\n{self}");
        self
    }

    /// stdout as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// stderr as text.
    pub fn errors(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// stdout as JSON.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|error| panic!("not JSON ({error}):\n{self}"))
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.status {
            Self::OVER_LIMIT => "killed at its limit".to_owned(),
            status => format!("exit status {status}"),
        };
        writeln!(
            f,
            "  $ {}\n  {how} after {:.1} s",
            self.line,
            self.took.as_secs_f32()
        )?;
        for (name, bytes) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            writeln!(
                f,
                "  {name}, {} bytes:\n{}",
                bytes.len(),
                tail(&String::from_utf8_lossy(bytes), 60)
            )?;
        }
        Ok(())
    }
}

/// The last `count` lines.
pub fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
