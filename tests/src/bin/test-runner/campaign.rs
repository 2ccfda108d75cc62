//! A campaign: each test of one program with its full number of repetitions. `make campaign` runs one.
//!
//! Each test runs by itself, and its result is written to `docs/results/campaign-PROGRAM.json` before the next begins. A campaign
//! that was interrupted, or in which tests failed, goes on at the same commit with the tests that have not passed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::lane::{End, Lane};
use crate::output::{Test, Verdict};
use crate::programs::Program;
use crate::schedule::{self, Schedule};

/// A result older than this is stale: twenty landings of about fifteen commits.
const STALE_AFTER_COMMITS: u64 = 300;
/// Runs of a test that loses its lab each time.
const LAB_TRIES: usize = 3;

/// The contents of a result file.
#[derive(Serialize, Deserialize)]
struct Campaign {
    /// Abbreviated hash, with `, changed` for a tree with uncommitted changes.
    commit: String,
    /// Date of the last test's end, in UTC.
    date: String,
    machine: String,
    labs_lost: usize,
    /// Results by test name.
    tests: BTreeMap<String, TestResult>,
}

/// The result of a test.
#[derive(Serialize, Deserialize)]
struct TestResult {
    /// `passed`, `failed` or `left out: REASON`.
    ended: String,
    seconds: f64,
    /// Output lines that name the test's seeds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    seeds: Vec<String>,
}

/// A result file in `docs/results`.
pub struct Kept {
    /// The program's name.
    pub name: String,
    pub commit: String,
    /// Commits since then; `None` for a commit that this repository does not have.
    pub age_commits: Option<u64>,
}

impl Kept {
    /// `fresh`, or `stale` for a result that is too old to count; `None` where its age is not known.
    pub fn state(&self) -> Option<&'static str> {
        let age = self.age_commits?;
        Some(if age > STALE_AFTER_COMMITS {
            "stale"
        } else {
            "fresh"
        })
    }
}

/// Runs a campaign of a program. True when no test failed.
pub fn run(schedule: &Schedule, root: &Path, program: &Program) -> Result<bool, String> {
    let path = file(root, &program.name);
    let commit = commit(root)?;
    let mut campaign = read(&path)
        .filter(|had| had.commit == commit && !commit.contains("changed"))
        .unwrap_or_else(|| Campaign {
            commit,
            date: String::new(),
            machine: machine(),
            labs_lost: 0,
            tests: BTreeMap::new(),
        });
    let mut lane = Lane::new(schedule.mirrorball, schedule.labs);
    for name in schedule::names(&mut lane, program)? {
        if campaign.tests.get(&name).is_some_and(|had| had.ended == "passed") {
            println!("test-runner: {name} has passed at this commit");
            continue;
        }
        let test = one(&mut lane, program, &name, &mut campaign.labs_lost);
        campaign.tests.insert(name, test);
        campaign.date = said("date", &["-u", "+%F %R"])?;
        let text = serde_json::to_string_pretty(&campaign).map_err(|error| error.to_string())?;
        fs::write(&path, text + "\n").map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let count = |what: &str| {
        let tests = campaign.tests.values();
        tests.filter(|test| test.ended.starts_with(what)).count()
    };
    let (passed, failed) = (count("passed"), count("failed"));
    println!(
        "labs lost: {}; {} has the results",
        campaign.labs_lost,
        path.display()
    );
    println!(
        "campaign: {passed} passed, {failed} failed, {} skipped",
        count("left out")
    );
    Ok(failed == 0)
}

fn one(lane: &mut Lane, program: &Program, name: &str, labs_lost: &mut usize) -> TestResult {
    let arguments = ["--exact".to_owned(), name.to_owned()];
    let mut lost = 0;
    loop {
        let (run, tests) = schedule::attempt(lane, program, &arguments);
        if matches!(run.end, End::LabLost(_)) {
            (lost, *labs_lost) = (lost + 1, *labs_lost + 1);
            if lost < LAB_TRIES {
                continue;
            }
        }
        let test = tests.first();
        return TestResult {
            ended: ended(test, &run.end),
            seconds: run.seconds.round(),
            seeds: test.map(|test| seeds(&test.text)).unwrap_or_default(),
        };
    }
}

fn ended(test: Option<&Test>, end: &End) -> String {
    match test {
        Some(test) if test.verdict == Verdict::Passed => match &test.left_out {
            None => "passed".to_owned(),
            Some(reason) => format!("left out: {reason}"),
        },
        Some(_) => "failed".to_owned(),
        None => format!("failed: {end:?}"),
    }
}

fn seeds(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| line.contains("seed"));
    lines.map(str::to_owned).collect()
}

/// All result files, sorted by name.
pub fn kept(root: &Path) -> Vec<Kept> {
    let folder = fs::read_dir(root.join("docs/results"));
    let files = folder.into_iter().flatten().flatten();
    let mut found: Vec<Kept> = files.filter_map(|entry| kept_in(root, &entry.path())).collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

fn kept_in(root: &Path, path: &Path) -> Option<Kept> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_prefix("campaign-")?.strip_suffix(".json")?.to_owned();
    let commit = read(path)?.commit;
    let since = format!("{}..HEAD", commit.split(',').next().unwrap_or_default());
    let age = git(root, &["rev-list", "--count", &since]).ok();
    Some(Kept {
        name,
        commit,
        age_commits: age.and_then(|age| age.parse().ok()),
    })
}

fn file(root: &Path, program: &str) -> PathBuf {
    root.join(format!(
        "docs/results/campaign-{}.json",
        program.replace(' ', "-")
    ))
}

fn read(path: &Path) -> Option<Campaign> {
    serde_json::from_str(&fs::read_to_string(path).ok()?).ok()
}

fn commit(root: &Path) -> Result<String, String> {
    let commit = git(root, &["rev-parse", "--short=12", "HEAD"])?;
    // Result files of other campaigns do not count as changes.
    let changed = git(
        root,
        &[
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ":!docs/results",
        ],
    )?;
    Ok(if changed.is_empty() {
        commit
    } else {
        format!("{commit}, changed")
    })
}

fn machine() -> String {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name\t: "));
    format!("{cpus} CPUs, {}", model.unwrap_or("unknown"))
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
    fn seeds_and_reasons_are_kept() {
        let test = |verdict, left_out: Option<&str>| Test {
            name: "x".into(),
            verdict,
            seconds: 1.0,
            left_out: left_out.map(str::to_owned),
            text: "one\nseed 7 of moves\n".into(),
        };
        let end = End::Exited(0);
        assert_eq!(ended(Some(&test(Verdict::Passed, None)), &end), "passed");
        assert_eq!(
            ended(Some(&test(Verdict::Passed, Some("no KVM"))), &end),
            "left out: no KVM"
        );
        assert_eq!(
            ended(Some(&test(Verdict::Failed, None)), &End::Exited(101)),
            "failed"
        );
        assert!(ended(None, &End::LabLost("silent".into())).starts_with("failed: LabLost"));
        assert_eq!(seeds(&test(Verdict::Passed, None).text), ["seed 7 of moves"]);
    }

    #[test]
    fn a_result_becomes_stale_with_its_age() {
        let state = |age_commits| {
            let (name, commit) = ("moves".into(), "abc".into());
            Kept {
                name,
                commit,
                age_commits,
            }
            .state()
        };
        assert_eq!(state(Some(STALE_AFTER_COMMITS)), Some("fresh"));
        assert_eq!(state(Some(STALE_AFTER_COMMITS + 1)), Some("stale"));
        assert_eq!(state(None), None);
    }
}
