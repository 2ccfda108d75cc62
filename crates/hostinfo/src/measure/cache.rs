//! The measurements, kept in the runtime directory as a list of facts, which hold until this host starts
//! again.
//!
//! The first line names their origin: `# measured: boot BOOT, host "NAME", CPUs 0-3,8`. A file of another
//! boot or host, or without some of the CPUs that this process may use, counts for nothing.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::cpulist;
use hostfiles::lock::{self, Flock, Share};
use hostfiles::private;
use knowledge::{Base, Fact, fact};

/// Linux numbers CPUs below this.
const CPUS_MAX: usize = 8192;
/// The longest wait for another process that measures: [`super::LIMIT`], other hosts, and a margin.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// The measurements of a runtime directory.
#[derive(Clone, Debug)]
pub struct MeasurementCache {
    file: PathBuf,
    lock: PathBuf,
}

/// The results of a measurement.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Measurements {
    /// The CPUs between which, or between some that stand for them, messages were measured.
    pub cpus: BTreeSet<i64>,
    /// Measured latencies, costs and bandwidths.
    pub facts: Vec<Fact>,
}

/// The right to measure, held until dropped. Two processes at a time would measure each other.
#[derive(Debug)]
pub struct MeasureLock(#[expect(dead_code, reason = "held")] Flock<File>);

impl MeasurementCache {
    /// The measurements of a runtime directory.
    pub fn at(runtime: &Path) -> Self {
        Self {
            file: runtime.join("measured.facts"),
            lock: runtime.join("measuring.lock"),
        }
    }

    /// Waits until no other process measures. With `at_once`, it returns none if one does.
    pub fn turn(&self, at_once: bool) -> io::Result<Option<MeasureLock>> {
        let file = private::lock_file(&self.lock)?;
        let lock = match at_once {
            true => lock::at_once(file, Share::Exclusive)?,
            false => Some(lock::within(&self.lock, file, Share::Exclusive, LOCK_TIMEOUT)?),
        };
        Ok(lock.map(MeasureLock))
    }

    /// The measurements of `host` since it started, if they cover all of the `allowed` CPUs.
    pub fn read(&self, host: &str, allowed: &BTreeSet<i64>) -> Option<Measurements> {
        let text = fs::read_to_string(&self.file).ok()?;
        let (first, facts) = text.split_once('\n')?;
        let cpus = first.strip_prefix(&title(&boot()?, host))?;
        let cpus: BTreeSet<i64> = cpulist::parse_below(cpus, CPUS_MAX)?
            .into_iter()
            .filter_map(|cpu| i64::try_from(cpu).ok())
            .collect();
        let facts = fact::parse(facts).ok()?;
        allowed.is_subset(&cpus).then_some(Measurements { cpus, facts })
    }

    /// Keeps measurements of `host`. If the kept ones cover their CPUs, the new ones correct them; else they
    /// replace them.
    pub fn write(&self, host: &str, measured: &Measurements) -> io::Result<()> {
        let boot = boot().ok_or(io::ErrorKind::NotFound)?;
        let mut all: Base = measured.facts.iter().cloned().collect();
        let mut cpus = &measured.cpus;
        let before = self.read(host, cpus);
        if let Some(before) = &before {
            all = before.facts.iter().chain(&measured.facts).cloned().collect();
            cpus = &before.cpus;
        }
        let cpus: Vec<usize> = cpus.iter().filter_map(|cpu| usize::try_from(*cpu).ok()).collect();
        let lines: String = all.facts().map(|fact| format!("{fact}\n")).collect();
        let text = format!("{}{}\n{lines}", title(&boot, host), cpulist::write(&cpus));
        hostfiles::replace_file(&self.file, private::FILE_MODE, text.as_bytes())
    }
}

fn title(boot: &str, host: &str) -> String {
    format!("# measured: boot {boot}, host {host:?}, CPUs ")
}

/// The kernel's id of this boot.
fn boot() -> Option<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}
