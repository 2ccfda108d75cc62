//! N guests of one kind, from their start to their end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Outcome;
use crate::kinds::Kind;

/// Time limit until all of them have booted and read.
const LIMIT: Duration = Duration::from_secs(180);
/// Time limit of sharing in the background, and of a time without any progress.
const BACKGROUND_LIMIT: Duration = Duration::from_secs(120);
const PROGRESS_LIMIT: Duration = Duration::from_secs(15);

/// Times of a guest's reads, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// The first time.
    pub first_s: f64,
    /// The second time, if it was requested.
    pub again_s: Option<f64>,
}

/// Running guests. Ended when dropped.
pub enum Guests {
    /// Under one monitor of Mirrorball's.
    Mirrorball {
        /// The `mirrorball` program.
        program: PathBuf,
        /// The VMs' names.
        names: Vec<String>,
    },
    /// Under a QEMU each, with a file for its console.
    Qemu(Vec<(Child, PathBuf)>),
}

impl Guests {
    /// Starts `count` guests at once; `words` are added to their kernel's command line.
    pub fn start(
        kind: &Kind,
        count: usize,
        files: &Path,
        mirrorball: &Path,
        runtime: &Path,
        words: &str,
    ) -> Outcome<Self> {
        if *kind == Kind::MirrorballHuge {
            crate::host::allow_huge_memory_files()?;
        }
        if kind.ours() {
            let file = runtime.join("sharing.toml");
            fs::write(&file, kind.vm_file(files, words))?;
            let output = Command::new(mirrorball)
                .args(["run", "-d", "--lab", "never", "--count", &count.to_string()])
                .arg(&file)
                .stdin(Stdio::null())
                .output()?;
            if !output.status.success() {
                let why = String::from_utf8_lossy(&output.stderr);
                return Err(format!("mirrorball run: {}", why.trim()).into());
            }
            let names = String::from_utf8(output.stdout)?;
            return Ok(Self::Mirrorball {
                program: mirrorball.to_owned(),
                names: names.lines().map(str::to_owned).collect(),
            });
        }
        let mut all = Self::Qemu(Vec::new());
        if let Self::Qemu(guests) = &mut all {
            for number in 0..count {
                let console = runtime.join(format!("console-{number}"));
                fs::write(&console, "")?;
                guests.push((kind.qemu(files, &console, words)?.spawn()?, console));
            }
        }
        Ok(all)
    }

    /// Waits until each has read everything; returns the times of the reads.
    pub fn wait(&mut self) -> Outcome<Vec<Read>> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let consoles = self.consoles()?;
            let answers: Vec<Value> = consoles.iter().filter_map(|text| answer(text)).collect();
            if let Some(error) = answers.iter().find_map(|answer| answer["error"].as_str()) {
                return Err(format!("error of a guest: {error}").into());
            }
            if answers.len() == consoles.len() {
                let sums: Vec<&Value> = answers.iter().map(|answer| &answer["sum"]).collect();
                if sums.iter().any(|sum| *sum != sums[0]) {
                    return Err(format!("guests read different things: {sums:?}").into());
                }
                let read = |answer: &Value| {
                    let first_s = answer["read_s"].as_f64()?;
                    let again_s = answer["again_s"].as_f64();
                    Some(Read { first_s, again_s })
                };
                return Ok(answers.iter().filter_map(read).collect());
            }
            if Instant::now() > deadline {
                let last = consoles.iter().find(|text| answer(text).is_none());
                return Err(format!("a guest took too long: {}", last.map_or("", String::as_str)).into());
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    fn consoles(&mut self) -> Outcome<Vec<String>> {
        match self {
            Self::Mirrorball { program, names } => names
                .iter()
                .map(|name| {
                    let output = Command::new(&*program).args(["logs", name]).output()?;
                    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
                })
                .collect(),
            Self::Qemu(guests) => guests
                .iter_mut()
                .map(|(child, console)| {
                    if let Some(status) = child.try_wait()? {
                        return Err(format!("QEMU ended: {status}").into());
                    }
                    Ok(String::from_utf8_lossy(&fs::read(console)?).into_owned())
                })
                .collect(),
        }
    }

    /// Waits until the background has finished sharing; returns the first VM's figures on sharing then. None
    /// for VMs without such figures.
    pub fn share(&self) -> Outcome<Option<Value>> {
        let Self::Mirrorball { program, names } = self else {
            return Ok(None);
        };
        let deadline = Instant::now() + BACKGROUND_LIMIT;
        let (mut left, mut since) = (u64::MAX, Instant::now());
        loop {
            let mut told = Vec::new();
            for name in names {
                let output = Command::new(program).args(["inspect", name]).output()?;
                let all: Value = serde_json::from_slice(&output.stdout)?;
                told.push(all["status"]["sharing"].clone());
            }
            let candidates: Option<u64> = told
                .iter()
                .map(|sharing| sharing["pages"]["candidates"].as_u64())
                .sum();
            let Some(candidates) = candidates else {
                return Ok(None);
            };
            if candidates < left {
                (left, since) = (candidates, Instant::now());
            }
            if candidates == 0 || since.elapsed() > PROGRESS_LIMIT || Instant::now() > deadline {
                return Ok(told.into_iter().next());
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Makes clones of the first VM, for as long as it runs; returns the seconds until all ran, and the
    /// milliseconds of its pause.
    pub fn clone_first(&mut self, count: usize) -> Outcome<(f64, f64)> {
        let Self::Mirrorball { program, names } = self else {
            return Err("only Mirrorball makes clones".into());
        };
        let start = Instant::now();
        let output = Command::new(&*program)
            .args(["clone", "--as-is", "--count", &count.to_string(), &names[0]])
            .stdin(Stdio::null())
            .output()?;
        let seconds = start.elapsed().as_secs_f64();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            return Err(format!("mirrorball clone: {}", told.trim()).into());
        }
        names.extend(String::from_utf8(output.stdout)?.lines().map(str::to_owned));
        let pause = told
            .split_once("stood still for ")
            .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok())
            .ok_or("clone does not say how long its parent stood still")?;
        Ok((seconds, pause))
    }

    /// The processes that run them.
    pub fn processes(&self) -> Outcome<Vec<u32>> {
        match self {
            Self::Mirrorball { program, names } => {
                let output = Command::new(program).args(["ps", "--json"]).output()?;
                let list: Vec<Value> = serde_json::from_slice(&output.stdout)?;
                // Clones have a monitor of their own.
                let mut monitors: Vec<u32> = list
                    .iter()
                    .filter(|vm| names.iter().any(|name| vm["name"] == name.as_str()))
                    .filter_map(|vm| vm["monitor_pid"].as_u64()?.try_into().ok())
                    .collect();
                monitors.sort_unstable();
                monitors.dedup();
                if monitors.is_empty() {
                    return Err("the VMs have ended".into());
                }
                Ok(monitors.into_iter().flat_map(crate::host::family).collect())
            }
            Self::Qemu(guests) => Ok(guests
                .iter()
                .flat_map(|(child, _)| crate::host::family(child.id()))
                .collect()),
        }
    }
}

/// The line of JSON that a guest has written, once it is whole.
fn answer(console: &str) -> Option<Value> {
    let (_, rest) = console.split_once("BENCH ")?;
    serde_json::from_str(rest.lines().next()?.trim()).ok()
}

impl Drop for Guests {
    fn drop(&mut self) {
        match self {
            Self::Mirrorball { program, names } => {
                for name in names {
                    let _ = Command::new(&*program).args(["kill", name]).status();
                }
            }
            Self::Qemu(guests) => {
                for (child, _) in guests {
                    let _ = child.kill();
                    let _ = child.wait();
                }
            }
        }
    }
}
