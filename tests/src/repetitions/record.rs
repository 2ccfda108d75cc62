//! The record of a test's repetitions: a file of JSON lines, each synchronized to the disk as it is written.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// One line of a record.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// How many repetitions the test has.
    Of(usize),
    /// The repetition of this number has begun.
    Begun(usize),
    Ended(Repetition),
}

/// A repetition that has ended.
#[derive(Serialize, Deserialize)]
struct Repetition {
    number: usize,
    seconds: f64,
    /// The test's note.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

/// The repetitions of one test so far.
pub struct Record {
    path: PathBuf,
    of: usize,
    ended: BTreeMap<usize, Repetition>,
    begun: Option<usize>,
}

/// Counts of a record.
#[derive(Clone, Debug, PartialEq)]
pub struct Tally {
    /// How many repetitions the test has.
    pub of: usize,
    /// How many passed.
    pub passed: usize,
    /// Numbers and reasons of those that failed.
    pub failed: Vec<String>,
    /// Numbers and notes of those that passed.
    pub notes: Vec<String>,
    /// Sum of the repetitions' durations.
    pub seconds: f64,
}

/// The file of a test's record.
pub fn path(folder: &Path, test: &str) -> PathBuf {
    folder.join(format!("{}.jsonl", test.replace("::", "-")))
}

/// Reads a record. `None` for a test that has none.
pub fn read(path: &Path) -> Option<Record> {
    let text = fs::read_to_string(path).ok()?;
    let mut record = Record {
        path: path.to_owned(),
        of: 0,
        ended: BTreeMap::new(),
        begun: None,
    };
    // A line that was cut off by a crash is left out.
    for line in text.lines().filter_map(|line| serde_json::from_str(line).ok()) {
        match line {
            Line::Of(count) => record.of = count,
            Line::Begun(number) => record.begun = Some(number),
            Line::Ended(repetition) => {
                record.begun = None;
                record.ended.insert(repetition.number, repetition);
            }
        }
    }
    Some(record)
}

impl Record {
    /// Opens the record of a test with `of` repetitions, or begins it.
    pub fn open(path: &Path, of: usize) -> io::Result<Self> {
        if let Some(record) = read(path)
            && record.of == of
        {
            return Ok(record);
        }
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        File::create(path)?;
        let record = Self {
            path: path.to_owned(),
            of,
            ended: BTreeMap::new(),
            begun: None,
        };
        record.append(&Line::Of(of))?;
        Ok(record)
    }

    /// The lowest number of a repetition that has not ended.
    pub fn next(&self) -> Option<usize> {
        (0..self.of).find(|number| !self.ended.contains_key(number))
    }

    /// The repetition that was begun last, if it has not ended.
    pub fn begun(&self) -> Option<usize> {
        self.begun
    }

    /// Records a beginning.
    pub fn begin(&mut self, number: usize) -> io::Result<()> {
        self.begun = Some(number);
        self.append(&Line::Begun(number))
    }

    /// Records an end: the test's note, or the reason of a failure.
    pub fn end(&mut self, number: usize, seconds: f64, ended: Result<String, String>) -> io::Result<()> {
        let (note, failed) = match ended {
            Ok(note) => (Some(note).filter(|note| !note.is_empty()), None),
            Err(reason) => (None, Some(reason)),
        };
        let line = Line::Ended(Repetition {
            number,
            seconds,
            note,
            failed,
        });
        self.append(&line)?;
        if let Line::Ended(repetition) = line {
            self.ended.insert(number, repetition);
        }
        self.begun = None;
        Ok(())
    }

    /// Counts what has ended.
    pub fn tally(&self) -> Tally {
        let failed = |repetition: &Repetition| {
            let reason = repetition.failed.as_ref()?;
            Some(format!("{}: {reason}", repetition.number))
        };
        let note = |repetition: &Repetition| {
            let note = repetition.note.as_ref()?;
            Some(format!("{}: {note}", repetition.number))
        };
        let failed: Vec<String> = self.ended.values().filter_map(failed).collect();
        Tally {
            of: self.of,
            passed: self.ended.len() - failed.len(),
            failed,
            notes: self.ended.values().filter_map(note).collect(),
            seconds: self.ended.values().map(|repetition| repetition.seconds).sum(),
        }
    }

    fn append(&self, line: &Line) -> io::Result<()> {
        let mut file = File::options().append(true).open(&self.path)?;
        let text = serde_json::to_string(line).map_err(io::Error::other)?;
        // A line that a crash has cut off must not swallow this one.
        file.write_all(format!("\n{text}").as_bytes())?;
        file.sync_all()
    }
}

impl Tally {
    /// Whether all repetitions have ended.
    pub fn is_complete(&self) -> bool {
        self.passed + self.failed.len() == self.of
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = self.passed + self.failed.len();
        write!(f, "repetitions: {} of {ended} passed", self.passed)?;
        if !self.is_complete() {
            write!(f, ", of {} wanted", self.of)?;
        }
        for failed in &self.failed {
            write!(f, "; failed {failed}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;

    #[test]
    fn a_line_that_a_crash_cut_off_loses_no_other_repetition() {
        let scratch = Scratch::new("record");
        let path = path(&scratch.join("records"), "a::test");
        let mut record = Record::open(&path, 3).expect("a record");
        record.end(0, 2.0, Ok(String::new())).expect("it is written");
        let mut text = fs::read_to_string(&path).expect("it was written");
        text.push_str("\n{\"ended\":{\"num");
        fs::write(&path, text).expect("it is written");
        let mut record = Record::open(&path, 3).expect("a record");
        assert_eq!(record.next(), Some(1));
        record.begin(1).expect("it is written");
        let record = Record::open(&path, 3).expect("a record");
        assert_eq!((record.next(), record.begun()), (Some(1), Some(1)));
        assert_eq!(record.tally().passed, 1);
    }

    #[test]
    fn another_number_of_repetitions_begins_anew() {
        let scratch = Scratch::new("record");
        let path = path(&scratch.join("records"), "a::test");
        let mut record = Record::open(&path, 3).expect("a record");
        record.end(0, 2.0, Err("wrong".into())).expect("it is written");
        assert_eq!(Record::open(&path, 4).expect("a record").next(), Some(0));
    }
}
