//! Runs one program at a time: on this machine, or in a lab host that serves the following programs too.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::programs::{Place, Program, Shape};
use crate::worker;

/// The exit status of `mirrorball lab run` when the lab died.
const LAB_DIED: i32 = 125;
/// The lab host's own copy of `mirrorball`, in its memory.
const PROGRAM_IN_LAB: &str = "/run/lab/mirrorball";
/// How long a lab host may take to come up.
const LAB_START: Duration = Duration::from_secs(120);

/// How a run of a program ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// By itself, with this status.
    Exited(i32),
    /// The program was killed at its limit.
    OverLimit(Duration),
    /// The lab host died or stopped answering; the text is the lab's error.
    LabLost(String),
}

/// A run of a program.
pub struct Run {
    /// Output lines, each with its arrival time in seconds since the start.
    pub lines: Vec<(f64, String)>,
    pub end: End,
    /// Duration in seconds, without the lab's start.
    pub seconds: f64,
    /// Duration of the lab host's start in seconds; 0 for a host that was up.
    pub lab_start_s: f64,
    /// CPU time of the lab host during the run, in seconds.
    pub host_cpu_s: f64,
}

/// A lab host with a worker in it.
struct Lab {
    shape: Shape,
    child: Child,
    requests: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Receiver<String>,
    start_s: f64,
}

/// One of the lanes that run programs side by side.
pub struct Lane<'a> {
    mirrorball: &'a Path,
    labs: &'a Path,
    lab: Option<Lab>,
}

impl<'a> Lane<'a> {
    /// A lane without a lab host yet.
    pub fn new(mirrorball: &'a Path, labs: &'a Path) -> Self {
        Self {
            mirrorball,
            labs,
            lab: None,
        }
    }

    /// The shape of its lab host.
    pub fn shape(&self) -> Option<Shape> {
        self.lab.as_ref().map(|lab| lab.shape)
    }

    /// Ends its lab host: the next program gets a new one.
    pub fn leave_lab(&mut self) {
        self.lab = None;
    }

    /// Runs a program with these arguments.
    pub fn run(&mut self, program: &Program, arguments: &[String], limit: Duration) -> Run {
        let words = match program.words() {
            Ok(words) => words,
            Err(error) => return Run::without_start(Instant::now(), &program.name, &error),
        };
        let words: Vec<String> = words.into_iter().chain(arguments.iter().cloned()).collect();
        match program.place {
            Place::Lab(shape) => self.run_in_lab(shape, &words, limit),
            Place::Unit | Place::Here | Place::OwnLabs => self.run_here(&words, limit),
        }
    }

    fn run_here(&self, words: &[String], limit: Duration) -> Run {
        let start = Instant::now();
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .env("MIRRORBALL_BIN", self.mirrorball)
            .stdin(Stdio::null())
            .process_group(0);
        let (mut child, lines) = match spawn(&mut command) {
            Ok(spawned) => spawned,
            Err(error) => return Run::without_start(start, &words[0], &error),
        };
        let (lines, ended) = collect(&lines, start, limit, |_| false);
        let end = match ended {
            Collected::Over => {
                kill_group(&mut child);
                self.end_labs_of(child.id());
                End::OverLimit(limit)
            }
            _ => End::Exited(status(&mut child)),
        };
        Run {
            lines,
            end,
            seconds: start.elapsed().as_secs_f64(),
            lab_start_s: 0.0,
            host_cpu_s: 0.0,
        }
    }

    /// Ends the labs that a killed test program has started. Their supervisors are in sessions of their own,
    /// and their hosts would take the CPUs from all programs after it. Names of the tests' labs end with the
    /// number of their process.
    fn end_labs_of(&self, pid: u32) {
        let lab = |arguments: &[&str]| Command::new(self.mirrorball).arg("lab").args(arguments).output();
        let listed = lab(&["ls", "--json"])
            .map(|output| output.stdout)
            .unwrap_or_default();
        let labs: Vec<Value> = serde_json::from_slice(&listed).unwrap_or_default();
        for name in labs.iter().filter_map(|lab| lab["name"].as_str()) {
            if name.ends_with(&format!("-{pid}")) {
                let ended = lab(&["down", "--name", name]);
                let ended = ended.is_ok_and(|output| output.status.success());
                println!(
                    "test-runner: lab {name} was left, and {}",
                    if ended { "is ended" } else { "stays" }
                );
            }
        }
    }

    fn run_in_lab(&mut self, shape: Shape, words: &[String], limit: Duration) -> Run {
        let asked = Instant::now();
        let is_new = self.lab.as_ref().is_none_or(|lab| lab.shape != shape);
        if is_new {
            // The old lab ends before the new one starts, as two would share the CPUs.
            self.lab = None;
            self.lab = match Lab::start(self.mirrorball, self.labs, shape) {
                Ok(lab) => Some(lab),
                Err(error) => return Run::without_start(asked, "the lab", &error),
            };
        }
        let Some(lab) = &mut self.lab else {
            unreachable!("a lab was started above");
        };
        let lab_start_s = if is_new { lab.start_s } else { 0.0 };
        let (start, cpu) = (Instant::now(), lab.cpu_s());
        let said_at_start: Vec<_> = lab.errors.try_iter().map(|line| (0.0, line)).collect();
        let mut run = lab.run(words, start, limit);
        run.0.splice(
            0..0,
            said_at_start
                .into_iter()
                .filter(|(_, line)| line.contains(FALSE_START)),
        );
        let host_cpu_s = lab.cpu_s() - cpu;
        if !matches!(run.1, End::Exited(0)) {
            // The failure may have left processes or files that disturb the next program.
            self.lab = None;
        }
        Run {
            lines: run.0,
            end: run.1,
            seconds: start.elapsed().as_secs_f64(),
            lab_start_s,
            host_cpu_s,
        }
    }
}

/// Part of the line by which `mirrorball lab` reports a restart.
const FALSE_START: &str = "; the lab starts again";

impl Run {
    /// Number of labs that had to start again, the tests' own included.
    pub fn false_starts(&self) -> usize {
        self.lines
            .iter()
            .filter(|(_, line)| line.contains(FALSE_START))
            .count()
    }

    fn without_start(since: Instant, what: &str, error: &str) -> Self {
        Self {
            lines: Vec::new(),
            end: End::LabLost(format!("{what}: {error}")),
            seconds: since.elapsed().as_secs_f64(),
            lab_start_s: 0.0,
            host_cpu_s: 0.0,
        }
    }
}

impl Lab {
    fn start(mirrorball: &Path, labs: &Path, shape: Shape) -> Result<Self, String> {
        let start = Instant::now();
        let own = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(mirrorball);
        command.args(["lab", "run"]);
        command.args(shape.file().map(|name| labs.join(name)));
        command.args(["--", "env"]);
        // Temporary files go to the host's memory, not to the shared file system.
        command.args(["TMPDIR=/run", "XDG_RUNTIME_DIR=/run"]);
        command.arg(format!("MIRRORBALL_BIN={PROGRAM_IN_LAB}"));
        command.arg(own).arg(worker::ARGUMENT);
        command
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        // A killed runner leaves no lab in which a test goes on.
        // SAFETY: between fork and exec the closure makes one system call, with numbers only.
        unsafe {
            command.pre_exec(|| {
                nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
                    .map_err(std::io::Error::from)
            });
        }
        let (mut child, lines) = spawn(&mut command)?;
        let errors = child.stderr.take().map(forward).ok_or("no standard error")?;
        let requests = child.stdin.take();
        let mut lab = Self {
            shape,
            child,
            requests,
            lines,
            errors,
            start_s: 0.0,
        };
        // A request that does nothing shows that the worker is up.
        let (_, end) = lab.run(&["true".to_owned()], start, LAB_START);
        lab.start_s = start.elapsed().as_secs_f64();
        match end {
            End::Exited(0) => Ok(lab),
            end => Err(format!("did not start: {end:?}")),
        }
    }

    fn run(&mut self, words: &[String], start: Instant, limit: Duration) -> (Vec<(f64, String)>, End) {
        let request = serde_json::json!(words).to_string();
        // A write error is ignored: a dead worker also closes its output.
        if let Some(requests) = &mut self.requests {
            let _ = writeln!(requests, "{request}");
        }
        let (mut lines, ended) = collect(&self.lines, start, limit, |line| line.starts_with(worker::END));
        let end = match ended {
            Collected::Mark => {
                let last = lines.pop().map(|(_, line)| line).unwrap_or_default();
                let status = last
                    .strip_prefix(worker::END)
                    .and_then(|status| status.trim().parse().ok());
                status.map_or(
                    End::LabLost(format!("the last line of its worker: {last:?}")),
                    End::Exited,
                )
            }
            Collected::Over => End::OverLimit(limit),
            Collected::Closed => {
                let status = status(&mut self.child);
                let said: Vec<String> = self.errors.try_iter().collect();
                match status {
                    LAB_DIED => End::LabLost(said.join("\n")),
                    _ => End::LabLost(format!(
                        "`lab run` ended with status {status}\n{}",
                        said.join("\n")
                    )),
                }
            }
        };
        (lines, end)
    }

    /// CPU time that its host has taken so far, in seconds.
    fn cpu_s(&self) -> f64 {
        let tasks = format!("/proc/{0}/task/{0}/children", self.child.id());
        let children = fs::read_to_string(tasks).unwrap_or_default();
        children
            .split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .map(cpu_s)
            .sum()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // The worker ends with its input, and the lab with the worker.
        self.requests = None;
        for _ in 0..100 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        kill_group(&mut self.child);
    }
}

/// CPU time of a process, in seconds.
fn cpu_s(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ');
    // User and system time, the 14th and 15th fields; the name was the second.
    let ticks: u64 = fields
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    // SAFETY: a call with a number only.
    let each_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    ticks as f64 / each_s.max(1) as f64
}

fn spawn(command: &mut Command) -> Result<(Child, Receiver<String>), String> {
    let (reader, writer) = std::io::pipe().map_err(|error| error.to_string())?;
    if command.get_args().next().is_none_or(|first| first != "lab") {
        let errors = writer.try_clone().map_err(|error| error.to_string())?;
        command.stderr(errors);
    }
    let child = command
        .stdout(writer)
        .spawn()
        .map_err(|error| error.to_string())?;
    // `Command` keeps the pipe's write end open; the reader would never see its end.
    command.stdout(Stdio::null());
    if command.get_args().next().is_none_or(|first| first != "lab") {
        command.stderr(Stdio::null());
    }
    Ok((child, forward(reader)))
}

fn forward(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut bytes = Vec::new();
        while matches!(stream.read_until(b'\n', &mut bytes), Ok(1..)) {
            let line = String::from_utf8_lossy(&bytes);
            if sender
                .send(line.trim_end_matches(['\n', '\r']).to_owned())
                .is_err()
            {
                return;
            }
            bytes.clear();
        }
    });
    receiver
}

/// Reason for the end of a collection.
enum Collected {
    /// The expected last line arrived.
    Mark,
    /// The stream ended.
    Closed,
    /// The limit has passed.
    Over,
}

fn collect(
    from: &Receiver<String>,
    start: Instant,
    limit: Duration,
    is_last: impl Fn(&str) -> bool,
) -> (Vec<(f64, String)>, Collected) {
    let mut lines = Vec::new();
    let deadline = Instant::now() + limit;
    loop {
        match from.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                let last = is_last(&line);
                lines.push((start.elapsed().as_secs_f64(), line));
                if last {
                    return (lines, Collected::Mark);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return (lines, Collected::Closed),
            Err(RecvTimeoutError::Timeout) => return (lines, Collected::Over),
        }
    }
}

fn status(child: &mut Child) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    let ended = child.wait();
    ended.map_or(-1, |status| {
        status
            .code()
            .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
    })
}

/// Kills a child with all that it has started in its group.
fn kill_group(child: &mut Child) {
    let group = nix::unistd::Pid::from_raw(child.id().cast_signed());
    // It may have ended just now.
    let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
    let _ = child.wait();
}
