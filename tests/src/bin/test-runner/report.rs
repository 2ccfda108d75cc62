//! The report of a run: counts, names and times, for people and as JSON.

use std::collections::BTreeSet;
use std::time::Instant;

use serde_json::{Value, json};

use crate::excerpt;
use crate::lane::{End, Run};
use crate::left_out::Allowed;
use crate::origin::Origin;
use crate::output::{Test, Verdict};
use crate::schedule::{Again, Outcome};
use crate::specification::Promise;

/// Most second tries of a green run. More would hide a fault.
const SECOND_TRIES_MAX: usize = 3;
/// How many of the slowest tests are shown.
const SLOWEST: usize = 15;
/// Failures whose panics are shown at the end of a run.
const PANICS_SHOWN: usize = 10;

/// The outcomes of a run.
pub struct Report {
    outcomes: Vec<Outcome>,
    /// Names of programs that did not start in time.
    not_run: Vec<String>,
    emulated: bool,
    origin: Origin,
    begun: Instant,
}

/// A test, or a program none of whose tests failed, whose last try failed.
struct Failure<'a> {
    name: String,
    /// The lines around the first panic.
    panic: Vec<&'a str>,
}

impl Report {
    /// Reports on these outcomes.
    pub fn of(outcomes: Vec<Outcome>, not_run: Vec<String>, emulated: bool, origin: Origin) -> Self {
        Self {
            outcomes,
            not_run,
            emulated,
            origin,
            begun: *crate::BEGUN.get_or_init(Instant::now),
        }
    }

    /// Full names of the tests that passed at the first or a later try, without those left out.
    pub fn passed(&self) -> Vec<String> {
        let mut names = Vec::new();
        for outcome in &self.outcomes {
            let again = outcome.again.iter().flat_map(|again| &again.tests);
            for test in outcome.tests.iter().chain(again) {
                if test.verdict == Verdict::Passed && test.left_out.is_none() {
                    names.push(full(outcome, test));
                }
            }
        }
        names
    }

    /// The full names of all tests that ran or were left out.
    pub fn ran(&self) -> Vec<String> {
        let tests = self.outcomes.iter().flat_map(|outcome| {
            let again = outcome.again.iter().flat_map(|again| &again.tests);
            outcome.tests.iter().chain(again).map(|test| full(outcome, test))
        });
        tests.collect()
    }

    /// Programs and tests whose last try failed.
    fn failed(&self) -> Vec<Failure<'_>> {
        let mut failures = Vec::new();
        for outcome in &self.outcomes {
            // A module that was renamed would be left out silently.
            let ran_none = outcome.program.module.is_some() && outcome.tests.is_empty();
            let has_passed = matches!(outcome.run.end, End::Exited(0)) && !ran_none;
            if has_passed || outcome.again.as_ref().is_some_and(passed_again) {
                continue;
            }
            let (run, tests) = match &outcome.again {
                Some(again) => (&again.run, &again.tests),
                None => (&outcome.run, &outcome.tests),
            };
            let failed = tests.iter().filter(|test| test.verdict == Verdict::Failed);
            let before = failures.len();
            failures.extend(failed.map(|test| Failure {
                name: full(outcome, test),
                panic: excerpt::of_panic(test.text.lines()),
            }));
            if failures.len() == before {
                failures.push(Failure {
                    name: format!("{}: {:?}", outcome.program.name, run.end),
                    panic: excerpt::of_panic(run.lines.iter().map(|(_, line)| line.as_str())),
                });
            }
        }
        failures
    }

    /// Tests that were left out, each with its reason.
    fn left_out(&self) -> Vec<(String, String)> {
        let mut names = Vec::new();
        for outcome in &self.outcomes {
            for test in &outcome.tests {
                if let Some(reason) = &test.left_out
                    && test.verdict != Verdict::Failed
                {
                    names.push((full(outcome, test), reason.clone()));
                }
            }
        }
        names
    }

    fn second_tries(&self) -> usize {
        self.outcomes
            .iter()
            .filter_map(|outcome| outcome.again.as_ref())
            .map(|again| again.what.len() + again.tries - 1)
            .sum()
    }

    fn labs_lost(&self) -> usize {
        let again = self
            .outcomes
            .iter()
            .filter_map(|outcome| outcome.again.as_ref())
            .map(|again| &again.run);
        let runs = self.outcomes.iter().map(|outcome| &outcome.run).chain(again);
        // Each retry before the last one lost its lab.
        let between = self.outcomes.iter().filter_map(|outcome| outcome.again.as_ref());
        let between: usize = between.map(|again| again.tries - 1).sum();
        let in_run = |run: &Run| run.false_starts() + usize::from(matches!(run.end, End::LabLost(_)));
        between + runs.map(in_run).sum::<usize>()
    }

    fn minutes(&self) -> f64 {
        self.begun.elapsed().as_secs_f64() / 60.0
    }

    /// The run as JSON.
    pub fn json(&self) -> Value {
        let programs = self.outcomes.iter().map(|outcome| {
            let tests = outcome
                .tests
                .iter()
                .map(|test| json!([test.name, tenth(test.seconds)]));
            json!({
                "name": outcome.program.name,
                "seconds": tenth(outcome.run.seconds),
                "lab_start_s": tenth(outcome.run.lab_start_s),
                "host_cpu_s": tenth(outcome.run.host_cpu_s),
                "tests": tests.collect::<Vec<_>>(),
            })
        });
        let left_out = self.left_out();
        json!({
            "commit": self.origin.commit,
            "date": self.origin.date,
            "machine": self.origin.machine,
            "emulated": self.emulated,
            "passed": self.passed().len(),
            "failed": self.failed().iter().map(|failure| &failure.name).collect::<Vec<_>>(),
            "left_out": left_out
                .iter()
                .map(|(name, reason)| json!({ "test": name, "reason": reason }))
                .collect::<Vec<_>>(),
            "second_tries": self.outcomes.iter().filter_map(|outcome| {
                let again = outcome.again.as_ref()?;
                Some(json!({
                    "program": outcome.program.name,
                    "what": again.what,
                    "kind": format!("{:?}", again.kind),
                    "passed": passed_again(again),
                }))
            }).collect::<Vec<_>>(),
            "not_run": self.not_run,
            "labs_lost": self.labs_lost(),
            "minutes": tenth(self.minutes()),
            "programs": programs.collect::<Vec<_>>(),
        })
    }

    /// Prints the report. True when the run is green.
    pub fn print(&self, allowed: &Allowed, unproven: &[Promise], missing: &[String]) -> bool {
        let (failed, left_out) = (self.failed(), self.left_out());
        self.print_times();
        self.print_failures(&failed);
        for (name, reason) in &left_out {
            println!("left out: {name}: {reason}");
        }
        for name in &self.not_run {
            println!("NOT RUN, as the time for this run was over: {name}");
        }
        if !self.not_run.is_empty() {
            println!("so SPECIFICATION.md and tests/ledger.txt were not compared with this run");
        }
        let unlisted: Vec<&String> = left_out
            .iter()
            .map(|(name, _)| name)
            .filter(|name| !allowed.contains_key(*name))
            .collect();
        for name in &unlisted {
            println!("LEFT OUT and not listed in tests/left-out.toml: {name}");
        }
        for name in missing {
            println!("MISSING, though tests/ledger.txt names it: {name}");
        }
        for promise in unproven {
            println!(
                "SPECIFICATION.md:{}: no test of the name {} passed in this run",
                promise.line, promise.text
            );
        }
        for outcome in &self.outcomes {
            if let Some(again) = &outcome.again {
                let how = if passed_again(again) {
                    "passed"
                } else {
                    "failed again"
                };
                println!(
                    "second try: {} of {} ({:?}): {how}",
                    again.what.join(", "),
                    outcome.program.name,
                    again.kind
                );
            }
        }
        for (number, failure) in failed.iter().enumerate() {
            println!("FAILED: {}", failure.name);
            if number < PANICS_SHOWN {
                for line in &failure.panic {
                    println!("    {line}");
                }
            }
        }
        let tries = self.second_tries();
        if tries > SECOND_TRIES_MAX {
            println!("FAILED: {tries} second tries, where {SECOND_TRIES_MAX} may be needed");
        }
        println!(
            "second tries: {tries}, labs lost: {}, minutes: {:.0}",
            self.labs_lost(),
            self.minutes()
        );
        println!(
            "tests: {} passed, {} failed, {} skipped",
            self.passed().len(),
            failed.len(),
            left_out.len()
        );
        failed.is_empty()
            && unlisted.is_empty()
            && missing.is_empty()
            && unproven.is_empty()
            && tries <= SECOND_TRIES_MAX
            // A run without time for any program proves nothing.
            && (self.not_run.is_empty() || !self.outcomes.is_empty())
    }

    /// Repeats the output of failed tests and the errors of lost labs near the end of the report.
    fn print_failures(&self, failed: &[Failure<'_>]) {
        for outcome in &self.outcomes {
            let again = outcome.again.as_ref();
            let (run, tests) =
                again.map_or((&outcome.run, &outcome.tests), |again| (&again.run, &again.tests));
            for test in tests.iter().filter(|test| test.verdict == Verdict::Failed) {
                let name = full(outcome, test);
                if failed.iter().any(|failure| failure.name == name) {
                    println!("FAILED: {name}\n{}", excerpt::both_ends(&test.text));
                }
            }
            for run in std::iter::once(&outcome.run).chain(again.map(|_| run)) {
                if let End::LabLost(why) = &run.end {
                    println!(
                        "{} lost its lab: {}",
                        outcome.program.name,
                        excerpt::both_ends(why)
                    );
                }
            }
        }
    }

    fn print_times(&self) {
        println!("program                    s  lab start s  host's CPU s");
        let mut outcomes: Vec<&Outcome> = self.outcomes.iter().collect();
        outcomes.sort_by(|a, b| b.run.seconds.total_cmp(&a.run.seconds));
        for outcome in outcomes {
            let run = &outcome.run;
            println!(
                "{:22} {:>6.0} {:>12.0} {:>13.0}",
                outcome.program.name, run.seconds, run.lab_start_s, run.host_cpu_s
            );
        }
        let mut tests: Vec<(f64, String)> = Vec::new();
        for outcome in &self.outcomes {
            tests.extend(
                outcome
                    .tests
                    .iter()
                    .map(|test| (test.seconds, full(outcome, test))),
            );
        }
        tests.sort_by(|a, b| b.0.total_cmp(&a.0));
        println!("the slowest tests:");
        for (seconds, name) in tests.iter().take(SLOWEST) {
            println!("{seconds:>6.0} s  {name}");
        }
    }
}

fn passed_again(again: &Again) -> bool {
    let ran: BTreeSet<&str> = again.tests.iter().map(|test| test.name.as_str()).collect();
    matches!(again.run.end, End::Exited(0)) && !ran.is_empty()
}

fn full(outcome: &Outcome, test: &Test) -> String {
    format!("{}{}", outcome.program.prefix, test.name)
}

fn tenth(seconds: f64) -> f64 {
    (seconds * 10.0).round() / 10.0
}
