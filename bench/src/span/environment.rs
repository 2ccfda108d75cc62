//! Mirrorball in a runtime directory of the bench's own, and clusters in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use bench::Outcome;
use bench::tables::median;

/// Time limit until cells are up, or gone.
const CLUSTER_LIMIT: Duration = Duration::from_secs(60);
/// Time limit of measuring messages between CPUs.
const MEASURE_LIMIT: Duration = Duration::from_secs(30);
/// Number of tries to end the cluster: a VM that was killed may still be ending.
const DOWN_TRIES: usize = 20;
const DOWN_PAUSE: Duration = Duration::from_millis(500);

/// A folder in memory, with copies of the started programs, so that none is read over a network. Removed when
/// dropped.
pub struct Environment {
    folder: PathBuf,
    /// The program to copy into guests.
    pub guest: PathBuf,
    /// The source that guests compile, as a tar file.
    pub source: PathBuf,
}

impl Environment {
    /// A new folder with Mirrorball's program, the source, and the guest's program, which is beside this one.
    pub fn new(folder: &Path, mirrorball: &Path, source: &Path) -> Outcome<Self> {
        let folder = folder.to_owned();
        fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let environment = Self {
            guest: folder.join("bench-span-guest"),
            source: folder.join("source.tar"),
            folder,
        };
        bench::programs::copy(mirrorball, &environment.mirrorball())?;
        fs::copy(source, &environment.source)?;
        let guest = std::env::current_exe()?.with_file_name("bench-span-guest");
        fs::copy(guest, &environment.guest)?;
        Ok(environment)
    }

    fn mirrorball(&self) -> PathBuf {
        self.folder.join("mirrorball")
    }

    /// A call of Mirrorball, without input, that ends after `limit`.
    pub fn command(&self, words: &[&str], limit: Duration) -> Command {
        let mut command = Command::new("timeout");
        command
            // In this process's group, so that a terminal's interrupt ends all of it.
            .args(["--foreground", "-k", "5", &limit.as_secs().to_string()])
            .arg(self.mirrorball())
            .args(words)
            .env("MIRRORBALL_RUNTIME", self.folder.join("run"))
            .stdin(Stdio::null());
        command
    }

    /// Calls Mirrorball; returns its standard output and standard error.
    pub fn call(&self, words: &[&str], limit: Duration) -> Outcome<(String, String)> {
        let output = self.command(words, limit).output()?;
        let [said, told] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        match output.status.code() {
            Some(0) => Ok((said, told)),
            Some(124) => Err(format!("mirrorball {}: not within {limit:?}", words.join(" ")).into()),
            _ => Err(format!("mirrorball {}: {}", words.join(" "), told.trim()).into()),
        }
    }

    /// A message from one CPU to another and its reply, through a ring that both poll, as in cells' links:
    /// the median over all pairs of CPUs, microseconds. Measured now.
    pub fn channel_round_trip_us(&self) -> Outcome<f64> {
        let (facts, _) = self.call(&["topology", "--measure", "--facts"], MEASURE_LIMIT)?;
        let both_ways_us = |ns: f64| 2.0 * ns / 1e3;
        median(&latencies_ns(&facts))
            .map(both_ways_us)
            .ok_or_else(|| "no two CPUs between which messages can be measured".into())
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Latencies of the facts `latency_ns(Host, From, To, "ring", Ns)`.
fn latencies_ns(facts: &str) -> Vec<f64> {
    facts
        .lines()
        .filter(|line| line.starts_with("latency_ns("))
        .filter_map(|line| {
            line.rsplit_once("\"ring\", ")?
                .1
                .trim_end_matches(')')
                .parse()
                .ok()
        })
        .collect()
}

/// Cells. Ended when dropped.
pub struct Cluster<'a>(&'a Environment);

impl<'a> Cluster<'a> {
    /// Brings this host up as `cells` cells.
    pub fn up(environment: &'a Environment, cells: u16) -> Outcome<Self> {
        let cluster = Self(environment);
        let words = ["cluster", "up", "--lab", "never", "--cells", &cells.to_string()];
        environment.call(&words, CLUSTER_LIMIT)?;
        Ok(cluster)
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        for _ in 0..DOWN_TRIES {
            if self.0.call(&["cluster", "down"], CLUSTER_LIMIT).is_ok() {
                return;
            }
            thread::sleep(DOWN_PAUSE);
        }
        eprintln!("bench-span: the cells do not end");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_those_of_rings_between_cpus() {
        let facts = "cpu(\"vm\", 0, 0)\nlatency_ns(\"vm\", 0, 1, \"ring\", 248)\n\
                     latency_ns(\"vm\", 1, 0, \"ring\", 250)\nlatency_ns(\"vm\", 1, 0, \"shared\", 251)\n\
                     host_latency_ns(\"vm\", \"b\", \"ring\", 9000)\nsend_ns(\"vm\", 0, 1, \"ring\", 5)\n";
        assert_eq!(latencies_ns(facts), [248.0, 250.0]);
    }
}
