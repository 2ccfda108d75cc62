//! Runs every test program that cargo has built: unit tests on this machine, and guest tests on its KVM or,
//! where that can't run guests, in lab hosts. `make test` calls it.
//!
//! The run ends with counts, with each test that checked nothing here, and with status 1 unless all of these
//! hold: no test failed, each test that was left out is listed in `tests/left-out.toml`, each test of
//! `tests/ledger.txt` ran or was left out, second tries stayed within their limit, and each promise that
//! SPECIFICATION.md calls tested names a test that passed. Where the environment names a time ([`UNTIL`]),
//! programs that have not started by then are named instead of run, and the run's tests are not compared with
//! ledger and SPECIFICATION.md.

mod campaign;
mod excerpt;
mod failure;
mod lane;
mod ledger;
mod left_out;
mod origin;
mod output;
mod programs;
mod report;
mod schedule;
mod specification;
mod user;
mod worker;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use origin::Origin;
use programs::Guests;
use report::Report;
use schedule::Schedule;

/// When this run began.
static BEGUN: OnceLock<Instant> = OnceLock::new();

/// The command line.
struct Options {
    /// Cargo's messages of `cargo test --no-run`, as JSON lines.
    messages: PathBuf,
    mirrorball: PathBuf,
    /// The root of the source tree.
    root: PathBuf,
    /// Programs to run, by name; all when empty.
    only: Vec<String>,
}

/// Names the time after which no program starts, in seconds since 1970. `.ci/run` sets it.
const UNTIL: &str = "MIRRORBALL_TESTS_UNTIL";
const USAGE: &str = "usage: test-runner MIRRORBALL MESSAGES ROOT [PROGRAM...]";

fn options() -> Result<Options, String> {
    let mut words = std::env::args().skip(1);
    let mut next = || words.next().map(PathBuf::from).ok_or_else(|| USAGE.to_owned());
    Ok(Options {
        mirrorball: next()?,
        messages: next()?,
        root: next()?,
        only: words.collect(),
    })
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.first().map(String::as_str) {
        Some(worker::ARGUMENT) => return worker::serve(std::io::stdin().lock()),
        Some(kind @ (user::ARGUMENT | user::WITHOUT_NAMESPACES)) => return user::serve(kind, &words[1..]),
        _ => {}
    }
    BEGUN.get_or_init(Instant::now);
    match options().and_then(|options| run(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("test-runner: {error}");
            ExitCode::from(2)
        }
    }
}

/// The time after which no program starts, if the environment names one.
fn until() -> Result<Option<SystemTime>, String> {
    let Some(text) = std::env::var_os(UNTIL) else {
        return Ok(None);
    };
    let seconds = text.to_str().and_then(|text| text.parse().ok());
    let time = seconds.and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
    let wrong = || format!("{UNTIL}={text:?} is no time; help: set it to seconds since 1970, or not at all");
    time.map(Some).ok_or_else(wrong)
}

/// Runs the programs and reports. True when the run is green.
fn run(options: &Options) -> Result<bool, String> {
    let read = |path: PathBuf| {
        std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
    };
    let messages = read(options.messages.clone())?;
    let allowed = left_out::parse(&read(options.root.join("tests/left-out.toml"))?)?;
    let known = read(options.root.join("tests/ledger.txt"))?;
    let document = read(options.root.join("SPECIFICATION.md"))?;
    let promises = specification::promises(&document);
    let emulated = !programs::guests_run_here(&options.mirrorball);
    let guests = Guests {
        emulated,
        any_kvm: programs::has_kvm() && !guest_tests::repetitions::in_campaign(),
    };
    let mut programs = programs::find(&messages, guests)?;
    let whole = options.only.is_empty();
    if !whole {
        for name in &options.only {
            if !programs.iter().any(|program| program.name == *name) {
                let known: Vec<&str> = programs.iter().map(|program| program.name.as_str()).collect();
                return Err(format!("no test program {name}; there are {}", known.join(", ")));
            }
        }
        programs.retain(|program| options.only.contains(&program.name));
    }
    let schedule = Schedule {
        mirrorball: &options.mirrorball,
        labs: &options.root.join("tests/labs"),
        emulated,
        until: until()?,
    };
    if guest_tests::repetitions::in_campaign() {
        let [program] = &programs[..] else {
            return Err("a campaign is of one test program: make campaign NAME=moves".into());
        };
        return campaign::run(&schedule, &options.root, program);
    }
    let wrong = wrong_specification(&document, &known, &options.root)?;
    if !wrong.is_empty() {
        wrong.iter().for_each(|wrong| println!("{wrong}"));
        return Ok(false);
    }
    // Before the run, as the tree may change while it runs.
    let origin = Origin::of(&options.root, emulated)?;
    let mut not_run: Vec<String> = programs.iter().map(|program| program.name.clone()).collect();
    let outcomes = schedule.run(programs);
    not_run.retain(|name| outcomes.iter().all(|outcome| outcome.program.name != *name));
    let whole = whole && not_run.is_empty();
    let report = Report::of(outcomes, not_run, emulated, origin);
    // Promises and ledger cover all programs, so they are compared only with a whole run.
    let unproven = if whole {
        specification::unproven(&promises, &report.passed())
    } else {
        Vec::new()
    };
    let missing = if whole {
        ledger::missing(&known, &report.ran())
    } else {
        Vec::new()
    };
    let json = options.messages.with_file_name("tests.json");
    let written = std::fs::write(&json, format!("{:#}\n", report.json()));
    written.map_err(|error| format!("{}: {error}", json.display()))?;
    let campaigns = specification::wrong_about_campaigns(&document, &campaign::kept(&options.root));
    for wrong in &campaigns {
        println!("{wrong}");
    }
    Ok(report.print(&allowed, &unproven, &missing) && campaigns.is_empty())
}

/// Errors of SPECIFICATION.md that no run of tests is needed to find: its ids, tests that are not in the
/// ledger, and ids that tests cite.
fn wrong_specification(document: &str, ledger: &str, root: &Path) -> Result<Vec<String>, String> {
    let mut wrong = specification::wrong_ids(document);
    let known: Vec<String> = ledger::names(ledger).map(str::to_owned).collect();
    let unknown = specification::unproven(&specification::promises(document), &known);
    wrong.extend(unknown.iter().map(|promise| {
        format!(
            "SPECIFICATION.md:{}: tests/ledger.txt has no test of the name {}",
            promise.line, promise.text
        )
    }));
    let cited = specification::citations::wrong(document, root);
    wrong.extend(cited.map_err(|error| format!("reading what tests cite: {error}"))?);
    Ok(wrong)
}
