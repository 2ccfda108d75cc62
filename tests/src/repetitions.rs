//! Repetitions: a few at each landing, the promised number in a campaign.
//!
//! In a campaign, `MIRRORBALL_CAMPAIGN` names a folder. A test that repeats itself by [`each`] records each
//! repetition there as it ends ([`record`]), so that a campaign which is interrupted goes on with those that
//! have not ended.

pub mod record;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use record::Record;

/// A landing repeats one of this number of times.
const LANDING_PART: usize = 10;
/// The folder of a campaign's records; `make campaign` sets it.
pub const CAMPAIGN: &str = "MIRRORBALL_CAMPAIGN";
/// Minutes after which a campaign begins no further repetition.
pub const MINUTES: &str = "MIRRORBALL_CAMPAIGN_MINUTES";

/// Whether this run is a campaign.
pub fn in_campaign() -> bool {
    std::env::var_os(CAMPAIGN).is_some()
}

/// `full` in a campaign, a part of it, but at least one, in a landing's run.
pub fn repetitions(full: usize) -> usize {
    if in_campaign() {
        full
    } else {
        full.div_ceil(LANDING_PART)
    }
}

/// The same for seconds.
pub fn seconds(full: u64) -> u64 {
    if in_campaign() {
        full
    } else {
        full.div_ceil(LANDING_PART as u64)
    }
}

/// Runs `one` once at a landing, and `full` times in a campaign, each time with its number, from 0. `one`
/// returns a note for the campaign's result. A campaign counts failed repetitions, goes on after them, and
/// fails at the end.
#[track_caller]
pub fn each(test: &str, full: usize, one: impl FnMut(usize) -> String) {
    let Some(folder) = std::env::var_os(CAMPAIGN) else {
        let mut one = one;
        println!("{}", one(0));
        return;
    };
    let minutes = std::env::var(MINUTES).ok();
    let limit = minutes.map(|text| {
        let minutes = text.parse::<u64>();
        Duration::from_secs(60 * minutes.unwrap_or_else(|error| panic!("{MINUTES}={text}: {error}")))
    });
    let path = record::path(&PathBuf::from(folder), test);
    let mut record = Record::open(&path, full).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    run(&mut record, limit, one).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let tally = record.tally();
    println!("{tally}");
    assert!(tally.failed.is_empty(), "{tally}");
}

/// Runs the repetitions that `record` lacks, at least one of them, until `limit` has passed.
fn run(
    record: &mut Record,
    limit: Option<Duration>,
    mut one: impl FnMut(usize) -> String,
) -> std::io::Result<()> {
    let start = Instant::now();
    while let Some(number) = record.next() {
        record.begin(number)?;
        let since = Instant::now();
        let ended = catch_unwind(AssertUnwindSafe(|| one(number)));
        let seconds = since.elapsed().as_secs_f64().round();
        record.end(number, seconds, ended.map_err(|panic| reason(&*panic)))?;
        if limit.is_some_and(|limit| start.elapsed() >= limit) {
            break;
        }
    }
    Ok(())
}

/// The first line of a panic's message.
fn reason(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    let line = text.unwrap_or("a panic").lines().next();
    line.unwrap_or_default().chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::Scratch;

    #[test]
    fn interrupted_repetitions_go_on_with_those_that_have_not_ended() {
        let scratch = Scratch::new("repetitions");
        let path = record::path(&scratch.join("records"), "a::test");
        let ran = RefCell::new(Vec::new());
        let one = |number| {
            ran.borrow_mut().push(number);
            assert_ne!(number, 1, "wrong value\nand more lines");
            format!("seed {number}")
        };
        // A limit that has passed allows one repetition at a time.
        for _ in 0..2 {
            let mut record = Record::open(&path, 4).expect("a record");
            run(&mut record, Some(Duration::ZERO), one).expect("it is written");
        }
        let tally = record::read(&path).expect("a record").tally();
        assert_eq!((tally.of, tally.passed, tally.failed.len()), (4, 1, 1));
        assert!(!tally.is_complete());
        // The process ends within the third one, which is run again.
        Record::open(&path, 4)
            .and_then(|mut record| record.begin(2))
            .expect("it is written");
        let mut record = Record::open(&path, 4).expect("a record");
        run(&mut record, None, one).expect("it is written");
        assert_eq!(*ran.borrow(), [0, 1, 2, 3]);
        let tally = record::read(&path).expect("a record").tally();
        assert!(tally.is_complete());
        assert_eq!(tally.passed, 3);
        assert_eq!(tally.failed.len(), 1);
        assert!(
            tally.failed[0].contains("wrong value") && !tally.failed[0].contains("more lines"),
            "{tally}"
        );
        assert_eq!(tally.notes, ["0: seed 0", "2: seed 2", "3: seed 3"]);
    }
}
