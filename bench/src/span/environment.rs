//! Mirrorball, and the files that the bench copies into guests.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bench::Outcome;
use bench::mirrorball::Mirrorball;
use bench::tables::median;

/// Time limit of measuring messages between CPUs.
const MEASURE_LIMIT: Duration = Duration::from_secs(30);

/// Mirrorball's programs and the guest's files, in memory.
pub struct Environment {
    /// The programs, which also own the folder.
    pub mirrorball: Mirrorball,
    /// The program to copy into guests.
    pub guest: PathBuf,
    /// The source that guests compile, as a tar file.
    pub source: PathBuf,
}

impl Environment {
    /// A new folder with Mirrorball's program, the source, and the guest's program, which is beside this one.
    pub fn new(folder: &Path, mirrorball: &Path, source: &Path) -> Outcome<Self> {
        let environment = Self {
            mirrorball: Mirrorball::new(folder, mirrorball)?,
            guest: folder.join("bench-span-guest"),
            source: folder.join("source.tar"),
        };
        fs::copy(source, &environment.source)?;
        let guest = std::env::current_exe()?.with_file_name("bench-span-guest");
        fs::copy(guest, &environment.guest)?;
        Ok(environment)
    }

    /// A message from one CPU to another and its reply, through a ring that both poll, as in cells' links:
    /// the median over all pairs of CPUs, microseconds. Measured now.
    pub fn channel_round_trip_us(&self) -> Outcome<f64> {
        let (facts, _) = self
            .mirrorball
            .call(&["topology", "--measure", "--facts"], MEASURE_LIMIT)?;
        let both_ways_us = |ns: f64| 2.0 * ns / 1e3;
        median(&latencies_ns(&facts))
            .map(both_ways_us)
            .ok_or_else(|| "no two CPUs between which messages can be measured".into())
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
