//! The origin of a result: commit, date, and machine in words.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The origin of a result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Origin {
    /// Abbreviated hash, with [`CHANGED`] for a tree with uncommitted changes.
    pub commit: String,
    /// Date of the run in UTC.
    pub date: String,
    pub machine: String,
}

const CHANGED: &str = ", changed";

impl Origin {
    /// The origin of results that this machine gives now from the tree at `root`.
    pub fn of(root: &Path, emulated: bool) -> Result<Self, String> {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Ok(Self {
            commit: commit(root)?,
            date: date()?,
            machine: machine(&read("/proc/cpuinfo"), &read("/proc/meminfo"), emulated),
        })
    }

    /// Whether the tree had uncommitted changes.
    pub fn is_changed(&self) -> bool {
        self.commit.ends_with(CHANGED)
    }
}

/// The date and time of day, in UTC.
pub fn date() -> Result<String, String> {
    said("date", &["-u", "+%F %R"])
}

/// Commits since this one; `None` for a commit that the repository at `root` does not have.
pub fn age_commits(root: &Path, commit: &str) -> Option<u64> {
    let since = format!("{}..HEAD", commit.trim_end_matches(CHANGED));
    git(root, &["rev-list", "--count", &since]).ok()?.parse().ok()
}

fn commit(root: &Path) -> Result<String, String> {
    let commit = git(root, &["rev-parse", "--short=12", "HEAD"])?;
    // Results of other runs do not count as changes.
    let changed = git(
        root,
        &[
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ":!docs/results",
            ":!bench/results",
        ],
    )?;
    Ok(if changed.is_empty() {
        commit
    } else {
        commit + CHANGED
    })
}

/// A machine in words, from the texts of `/proc/cpuinfo` and `/proc/meminfo`.
fn machine(cpuinfo: &str, meminfo: &str, emulated: bool) -> String {
    let value = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim())
    };
    let count = |name: &str| cpuinfo.lines().filter(|line| line.starts_with(name)).count();
    let is_virtual = value("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"));
    let kib = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
    let kib = kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
    // The kernel's own part is missing from the total.
    format!(
        "{} with {} CPUs, {}, {} GiB, {}",
        if is_virtual { "virtual machine" } else { "machine" },
        count("processor\t"),
        value("model name").unwrap_or("unknown model"),
        kib.div_ceil(1 << 20),
        if emulated {
            "no usable KVM: guests are emulated"
        } else {
            "guests on its KVM"
        }
    )
}

fn git(root: &Path, words: &[&str]) -> Result<String, String> {
    let root = root.to_str().ok_or("the tree's path is not UTF-8")?;
    said("git", &[&["-C", root], words].concat())
}

fn said(program: &str, words: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(words).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(format!("{program} {}: {why}", words.join(" ")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_described_by_what_speed_depends_on() {
        let cpu = |number| {
            format!("processor\t: {number}\nmodel name\t: AMD EPYC\nflags\t\t: fpu vme hypervisor\n\n")
        };
        let cpuinfo = cpu(0) + &cpu(1);
        let meminfo = "MemTotal:       24689200 kB\nMemFree:        1 kB\n";
        assert_eq!(
            machine(&cpuinfo, meminfo, true),
            "virtual machine with 2 CPUs, AMD EPYC, 24 GiB, no usable KVM: guests are emulated"
        );
        assert_eq!(
            machine(&cpuinfo.replace(" hypervisor", ""), meminfo, false),
            "machine with 2 CPUs, AMD EPYC, 24 GiB, guests on its KVM"
        );
    }
}
