//! The order of programs, their concurrency, and retries.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use crate::failure::{self, Kind};
use crate::lane::{End, Lane, Run};
use crate::output::{self, Test, Verdict};
use crate::programs::{Place, Program};

/// Guest programs that run at a time: each waits about as long as it computes.
const LANES: usize = 2;
/// Programs of unit tests that run at a time: alone, one leaves this machine's CPUs idle for half of its
/// time.
const UNIT_LANES: usize = 2;
/// Time limit of a program. The slowest took 1,200 s, on a slow machine.
const LIMIT: Duration = Duration::from_secs(2400);
/// Time limit of a test in a campaign: 100 repetitions of a minute or two, each with limits of its own.
const CAMPAIGN_LIMIT: Duration = Duration::from_secs(4 * 3600);
/// The slowest guest programs. They start first, so that none runs alone at the end.
const LONGEST_FIRST: &[&str] = &[
    "memory",
    "restarts",
    "cluster",
    "resources",
    "cells",
    "lab",
    "auto",
    "boot",
    "deaths",
    "underway",
    "isolation",
    "moves",
    "network",
    "successors",
    "shards",
    "wide",
    "endings",
    "cycles",
    "composition",
    "clones",
    "warm",
    "control",
    "span",
    "disks",
    "debian",
    "sandbox",
    "sharing",
];
/// Retries of a program that loses its lab each time.
const TRIES_MAX: usize = 2;
/// Programs that run alone, as their hosts need all CPUs of this machine. Beside another, `coherent` takes
/// three times as long on a slow one, and its guests miss their limits.
const ALONE: &[&str] = &["hosts", "joins", "coherent"];

/// Settings for running programs.
pub struct Schedule<'a> {
    pub mirrorball: &'a Path,
    /// The folder of lab files.
    pub labs: &'a Path,
    /// Whether guests are emulated.
    pub emulated: bool,
    /// Time after which no program starts. Without it all programs run.
    pub until: Option<SystemTime>,
}

/// A program with its first run, and its retry.
pub struct Outcome {
    pub program: Program,
    pub run: Run,
    pub tests: Vec<Test>,
    pub again: Option<Again>,
}

/// A retry of failed tests.
pub struct Again {
    /// Names of the tests; one line of text when tests had not ended.
    pub what: Vec<String>,
    pub kind: Kind,
    /// Number of retries: a second one follows where the first lost its lab too.
    pub tries: usize,
    /// The last retry.
    pub run: Run,
    pub tests: Vec<Test>,
}

impl Schedule<'_> {
    /// Runs all programs, or those that start in time. Outcomes are in the order of the programs' ends.
    pub fn run(&self, programs: Vec<Program>) -> Vec<Outcome> {
        let is_unit = |program: &Program| program.place == Place::Unit;
        let (units, mut guests): (Vec<_>, Vec<_>) = programs.into_iter().partition(is_unit);
        let place = |program: &Program| {
            LONGEST_FIRST
                .iter()
                .position(|name| *name == program.name)
                .unwrap_or(LONGEST_FIRST.len())
        };
        guests.sort_by_key(place);
        let (alone, guests): (Vec<_>, Vec<_>) = guests
            .into_iter()
            .partition(|program| ALONE.contains(&program.name.as_str()));
        // The longest end long before `until`. The last programs are short, so a run is over soon after it.
        let mut outcomes = self.side_by_side(units, UNIT_LANES);
        outcomes.extend(self.side_by_side(alone, 1));
        outcomes.extend(self.side_by_side(guests, if self.emulated { LANES } else { 1 }));
        if self.emulated {
            for outcome in &mut outcomes {
                outcome.again = self.again(outcome);
            }
        }
        outcomes
    }

    fn side_by_side(&self, programs: Vec<Program>, lanes: usize) -> Vec<Outcome> {
        let (waiting, outcomes) = (Mutex::new(VecDeque::from(programs)), Mutex::new(Vec::new()));
        // A lane prefers programs of its lab host's shape, as another lab costs a start.
        let next = |lane: &Lane| {
            if is_over(self.until, SystemTime::now()) {
                return None;
            }
            let mut waiting = waiting.lock().expect("no lane panics");
            let fits = |program: &Program| {
                lane.shape()
                    .is_some_and(|shape| program.place == Place::Lab(shape))
            };
            let place = waiting.iter().position(fits).unwrap_or(0);
            waiting.remove(place)
        };
        std::thread::scope(|scope| {
            for _ in 0..lanes {
                scope.spawn(|| {
                    let mut lane = Lane::new(self.mirrorball, self.labs);
                    while let Some(program) = next(&lane) {
                        if program.place == Place::OwnLabs {
                            lane.leave_lab();
                        }
                        let outcome = first(&mut lane, program);
                        outcomes.lock().expect("no lane panics").push(outcome);
                    }
                });
            }
        });
        outcomes.into_inner().expect("no lane panics")
    }

    /// Retries failures of the lab and timeouts, alone and in a new lab. Other failures are not retried.
    fn again(&self, outcome: &Outcome) -> Option<Again> {
        if outcome.program.place == Place::Unit || matches!(outcome.run.end, End::Exited(0)) {
            return None;
        }
        let failed: Vec<&Test> = outcome
            .tests
            .iter()
            .filter(|test| test.verdict == Verdict::Failed)
            .collect();
        let (kind, what, arguments) = if failed.is_empty() {
            // Passed tests are skipped.
            let passed = outcome
                .tests
                .iter()
                .filter(|test| test.verdict == Verdict::Passed);
            let skipped = passed.flat_map(|test| ["--skip".to_owned(), test.name.clone()]);
            let arguments: Vec<String> = std::iter::once("--exact".to_owned()).chain(skipped).collect();
            (
                failure::of_program(&outcome.run.end),
                vec!["what had not ended".to_owned()],
                arguments,
            )
        } else {
            let names: Vec<String> = failed.iter().map(|test| test.name.clone()).collect();
            let kinds: Vec<Kind> = failed.iter().map(|test| failure::of_test(&test.text)).collect();
            let kind = match (kinds.contains(&Kind::Ours), kinds.contains(&Kind::Late)) {
                (true, _) => Kind::Ours,
                (false, true) => Kind::Late,
                (false, false) => Kind::Lab,
            };
            let arguments = std::iter::once("--exact".to_owned())
                .chain(names.clone())
                .collect();
            (kind, names, arguments)
        };
        if kind == Kind::Ours {
            return None;
        }
        println!(
            "test-runner: second try of {}: {} ({kind:?})",
            outcome.program.name,
            what.join(", ")
        );
        let mut lane = Lane::new(self.mirrorball, self.labs);
        let mut tries = 1;
        let (mut run, mut tests) = attempt(&mut lane, &outcome.program, &arguments);
        // A lost lab proves nothing about the tests in it.
        while tries < TRIES_MAX && matches!(run.end, End::LabLost(_)) {
            tries += 1;
            (run, tests) = attempt(&mut lane, &outcome.program, &arguments);
        }
        Some(Again {
            what,
            kind,
            tries,
            run,
            tests,
        })
    }
}

/// Whether it is too late to start a program.
fn is_over(until: Option<SystemTime>, now: SystemTime) -> bool {
    until.is_some_and(|until| now >= until)
}

fn first(lane: &mut Lane, program: Program) -> Outcome {
    let (run, tests) = attempt(lane, &program, &[]);
    Outcome {
        program,
        run,
        tests,
        again: None,
    }
}

/// Names of a program's tests, with the ignored ones.
pub fn names(lane: &mut Lane, program: &Program) -> Result<Vec<String>, String> {
    let words = ["--list", "--format=terse"].map(str::to_owned);
    let run = lane.run(program, &words, LIMIT);
    if run.end != End::Exited(0) {
        return Err(format!(
            "the tests of {} can't be listed: {:?}",
            program.name, run.end
        ));
    }
    let lines = run.lines.iter();
    let names = lines.filter_map(|(_, line)| line.strip_suffix(": test"));
    Ok(names.map(str::to_owned).collect())
}

/// Runs a program, and prints its output after its end, as other programs run at the same time.
pub fn attempt(lane: &mut Lane, program: &Program, arguments: &[String]) -> (Run, Vec<Test>) {
    let begun = Instant::now();
    let mut words = vec!["--show-output".to_owned()];
    if program.place != Place::Unit {
        // Some tests count processes and files on the host.
        words.push("--test-threads=1".to_owned());
    }
    let mut limit = LIMIT;
    if guest_tests::repetitions::in_campaign() {
        words.push("--include-ignored".to_owned());
        limit = CAMPAIGN_LIMIT;
    }
    words.extend_from_slice(arguments);
    let run = lane.run(program, &words, limit);
    let tests = output::tests(&run.lines);
    let mut text = String::new();
    for (_, line) in &run.lines {
        text.push_str(line);
        text.push('\n');
    }
    println!(
        "{text}test-runner: {} took {:.0} s{}",
        program.name,
        begun.elapsed().as_secs_f64(),
        match &run.end {
            End::Exited(0) => String::new(),
            End::Exited(status) => format!(" and FAILED with exit status {status}"),
            End::OverLimit(limit) => format!(" and was killed at its limit of {limit:?}"),
            End::LabLost(why) => format!(" and LOST ITS LAB:\n{why}"),
        }
    );
    (run, tests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_start_until_the_time_is_over_and_always_without_a_limit() {
        let now = SystemTime::now();
        let second = Duration::from_secs(1);
        assert!(!is_over(None, now));
        assert!(!is_over(Some(now + second), now));
        assert!(is_over(Some(now), now) && is_over(Some(now - second), now));
    }
}
