//! A campaign: each test of one program with its full number of repetitions. `make campaign` runs one.
//!
//! Each test runs by itself, and its result is written to `docs/results/campaign-PROGRAM.json` before the
//! next begins. A campaign that was interrupted, or in which tests failed, goes on at the same commit with
//! the tests that have not passed. A test that records its repetitions goes on with those that have not
//! ended.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use guest_tests::repetitions::record::{self, Tally};
use serde::{Deserialize, Serialize};

use crate::lane::{End, Lane};
use crate::origin::{self, Origin};
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
    /// The date is that of the last test's end.
    #[serde(flatten)]
    origin: Origin,
    labs_lost: usize,
    /// Results by test name.
    tests: BTreeMap<String, TestResult>,
}

/// Outcome of one test in a campaign.
#[derive(Serialize, Deserialize)]
struct TestResult {
    /// `passed`, `failed`, `left out: REASON`, or `unfinished` for a test of which not all repetitions have
    /// run.
    ended: String,
    seconds: f64,
    /// Counts of a test that records its repetitions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    repetitions: Option<Repetitions>,
    /// Output lines that name the test's seeds, or the notes of its repetitions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    seeds: Vec<String>,
}

/// Counts of repetitions.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Repetitions {
    wanted: usize,
    passed: usize,
    /// Numbers and reasons of those that failed.
    failed: Vec<String>,
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
    let origin = Origin::of(root, schedule.emulated)?;
    let records = std::env::var_os(guest_tests::repetitions::CAMPAIGN).ok_or("no folder for records")?;
    let records = PathBuf::from(records);
    keep_records_of(&records, &origin)?;
    let mut campaign = read(&path)
        .filter(|had| had.origin.commit == origin.commit && !origin.is_changed())
        .unwrap_or_else(|| Campaign {
            origin,
            labs_lost: 0,
            tests: BTreeMap::new(),
        });
    let mut lane = Lane::new(schedule.mirrorball, schedule.labs);
    for name in schedule::names(&mut lane, program)? {
        if campaign.tests.get(&name).is_some_and(|had| had.ended == "passed") {
            println!("test-runner: {name} has passed at this commit");
            continue;
        }
        let record = record::path(&records, &name);
        let test = one(&mut lane, program, &name, &record, &mut campaign.labs_lost)?;
        campaign.tests.insert(name, test);
        campaign.origin.date = origin::date()?;
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
        "campaign: {passed} passed, {failed} failed, {} unfinished, {} skipped",
        count("unfinished"),
        count("left out")
    );
    Ok(failed == 0)
}

/// Removes the records of another commit, and those of a tree with uncommitted changes.
fn keep_records_of(records: &Path, origin: &Origin) -> Result<(), String> {
    let mark = records.join("commit");
    let is_same = fs::read_to_string(&mark).is_ok_and(|commit| commit == origin.commit);
    let kept = if is_same && !origin.is_changed() {
        Ok(())
    } else {
        // There may be none yet.
        let _ = fs::remove_dir_all(records);
        fs::create_dir_all(records).and_then(|()| fs::write(&mark, &origin.commit))
    };
    kept.map_err(|error| format!("{}: {error}", mark.display()))
}

fn one(
    lane: &mut Lane,
    program: &Program,
    name: &str,
    record: &Path,
    labs_lost: &mut usize,
) -> Result<TestResult, String> {
    let arguments = ["--exact".to_owned(), name.to_owned()];
    let mut lost = 0;
    loop {
        let (run, tests) = schedule::attempt(lane, program, &arguments);
        if let End::LabLost(why) = &run.end {
            *labs_lost += 1;
            if fail_begun(record, why)? {
                continue;
            }
            lost += 1;
            if lost < LAB_TRIES {
                continue;
            }
        }
        let test = tests.first();
        let tally = record::read(record).map(|record| record.tally());
        return Ok(result(test, &run.end, run.seconds, tally));
    }
}

/// Records that the repetition in which a lab was lost has failed. False where none had begun.
fn fail_begun(path: &Path, why: &str) -> Result<bool, String> {
    let Some((mut record, number)) = record::read(path).and_then(|record| {
        let begun = record.begun()?;
        Some((record, begun))
    }) else {
        return Ok(false);
    };
    let why = why.lines().next().unwrap_or_default();
    let failed = record.end(number, 0.0, Err(format!("the lab was lost: {why}")));
    failed
        .map(|()| true)
        .map_err(|error| format!("{}: {error}", path.display()))
}

fn result(test: Option<&Test>, end: &End, seconds: f64, tally: Option<Tally>) -> TestResult {
    let Some(tally) = tally else {
        return TestResult {
            ended: ended(test, end),
            seconds: seconds.round(),
            repetitions: None,
            seeds: test.map(|test| seeds(&test.text)).unwrap_or_default(),
        };
    };
    TestResult {
        ended: match (ended(test, end), tally.is_complete()) {
            (ended, false) if ended == "passed" => "unfinished".to_owned(),
            (ended, _) => ended,
        },
        seconds: tally.seconds,
        repetitions: Some(Repetitions {
            wanted: tally.of,
            passed: tally.passed,
            failed: tally.failed,
        }),
        seeds: tally.notes,
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
    let commit = read(path)?.origin.commit;
    Some(Kept {
        name,
        age_commits: origin::age_commits(root, &commit),
        commit,
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
    fn counted_repetitions_decide_how_a_test_ended() {
        let tally = |passed, failed: &[&str]| {
            Some(Tally {
                of: 3,
                passed,
                failed: failed.iter().map(|reason| (*reason).to_owned()).collect(),
                notes: vec!["0: seed 7".to_owned()],
                seconds: 12.0,
            })
        };
        let test = |verdict| Test {
            name: "x".into(),
            verdict,
            seconds: 1.0,
            left_out: None,
            text: "seed 9\n".into(),
        };
        let (passed, failed) = (test(Verdict::Passed), test(Verdict::Failed));
        let whole = result(Some(&passed), &End::Exited(0), 1.0, tally(3, &[]));
        assert_eq!((whole.ended.as_str(), whole.seconds), ("passed", 12.0));
        assert_eq!(whole.seeds, ["0: seed 7"]);
        let part = result(Some(&passed), &End::Exited(0), 1.0, tally(2, &[]));
        assert_eq!(part.ended, "unfinished");
        let counts = part.repetitions.expect("they are counted");
        assert_eq!((counts.passed, counts.wanted), (2, 3));
        let wrong = result(Some(&failed), &End::Exited(101), 1.0, tally(1, &["1: wrong"]));
        assert_eq!(wrong.ended, "failed");
        assert_eq!(wrong.repetitions.expect("they are counted").failed, ["1: wrong"]);
        let plain = result(Some(&passed), &End::Exited(0), 1.4, None);
        assert_eq!((plain.ended.as_str(), plain.seconds), ("passed", 1.0));
        assert_eq!(plain.seeds, ["seed 9"]);
    }

    #[test]
    fn the_repetition_that_loses_its_lab_has_failed_and_the_others_go_on() {
        let scratch = guest_tests::Scratch::new("campaign");
        let path = record::path(scratch.path(), "x");
        assert_eq!(fail_begun(&path, "silent"), Ok(false));
        let mut record = record::Record::open(&path, 2).expect("a record");
        assert_eq!(fail_begun(&path, "silent"), Ok(false), "the lab did not start");
        record.begin(0).expect("it is written");
        assert_eq!(fail_begun(&path, "silent\nfor 90 s"), Ok(true));
        let record = record::Record::open(&path, 2).expect("a record");
        assert_eq!(record.next(), Some(1));
        assert_eq!(record.tally().failed, ["0: the lab was lost: silent"]);
    }

    #[test]
    fn records_of_another_commit_do_not_count() {
        let scratch = guest_tests::Scratch::new("campaign");
        let records = scratch.join("records");
        let at = |commit: &str| Origin {
            commit: commit.to_owned(),
            date: String::new(),
            machine: String::new(),
        };
        let record = record::path(&records, "x");
        for (commit, is_kept) in [
            ("abc", false),
            ("abc", true),
            ("abd", false),
            ("abd, changed", false),
        ] {
            keep_records_of(&records, &at(commit)).expect("it is written");
            assert_eq!(record.exists(), is_kept, "{commit}");
            record::Record::open(&record, 1).expect("a record");
        }
        keep_records_of(&records, &at("abd, changed")).expect("it is written");
        assert!(!record.exists(), "the changes may be others");
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
