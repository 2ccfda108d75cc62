//! The measurements: a record for programs, a table for people.

use std::fmt::Write;

use bench::Outcome;
use bench::tables::median;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::kinds::{Kind, Sizes};
use crate::sample::{Faults, Run, Sample};

/// Goal: the time with the virtual paging disk, as a part of that with an ordinary disk.
const GOAL: f64 = 0.4;
/// Goal: the I/O in the same way.
const GOAL_IO: f64 = 1.0 / 3.0;
/// Time of the paper's program without the virtual paging disk, and with it.
const PAPER_S: [f64; 2] = [258.0, 117.0];

/// Pages of 4 KiB in a MiB.
const PAGES_OF_A_MIB: f64 = 256.0;

/// Figures of one kind.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Row {
    kind: String,
    run_s: Vec<f64>,
    /// Part of the reference's time, of the medians.
    of_the_ordinary_disk: Option<f64>,
    host_read_mib: Vec<f64>,
    host_written_mib: Vec<f64>,
    guest_read_mib: Vec<f64>,
    guest_written_mib: Vec<f64>,
    without_io_mib: Vec<f64>,
    io_mib: Vec<f64>,
    /// Faults that Mirrorball has answered, by kind.
    zero_faults: Vec<f64>,
    second_chance_faults: Vec<f64>,
    read_ahead_faults: Vec<f64>,
    faults_with_io: Vec<f64>,
    /// Pages that were read for each fault with I/O.
    pages_per_read: Vec<f64>,
    /// Pages that left memory without a write.
    unchanged_mib: Vec<f64>,
    /// Part of the reference's I/O, of the medians.
    io_of_the_ordinary_disk: Option<f64>,
    /// The reason why there are no figures.
    refused: Option<String>,
}

impl Row {
    fn of(kind: Kind, runs: &[Run]) -> Self {
        let samples: Vec<&Sample> = runs.iter().filter_map(done).collect();
        let mib = |count: fn(&Sample) -> u64| samples.iter().map(|sample| mib_of(count(sample))).collect();
        let without_io = samples.iter().filter_map(|sample| sample.host.without_io);
        let of_faults = |figure: fn(&Sample, &Faults) -> f64| -> Vec<f64> {
            let figures = samples
                .iter()
                .filter_map(|sample| Some(figure(sample, sample.host.faults.as_ref()?)));
            figures.collect()
        };
        Self {
            kind: kind.name().to_owned(),
            run_s: samples.iter().map(|sample| sample.run_s).collect(),
            of_the_ordinary_disk: None,
            host_read_mib: mib(|sample| sample.host.read),
            host_written_mib: mib(|sample| sample.host.written),
            guest_read_mib: mib(|sample| sample.guest_read),
            guest_written_mib: mib(|sample| sample.guest_written),
            without_io_mib: without_io.map(mib_of).collect(),
            io_mib: samples
                .iter()
                .map(|sample| mib_of(sample.io_pages(kind)))
                .collect(),
            zero_faults: of_faults(|_, faults| faults.zero as f64),
            second_chance_faults: of_faults(|_, faults| faults.second_chance as f64),
            read_ahead_faults: of_faults(|_, faults| faults.read_ahead as f64),
            faults_with_io: of_faults(|_, faults| faults.with_io as f64),
            // Without a fault, no page was read.
            pages_per_read: of_faults(|sample, faults| {
                sample.host.read as f64 / faults.with_io.max(1) as f64
            }),
            unchanged_mib: of_faults(|_, faults| mib_of(faults.unchanged_pages)),
            io_of_the_ordinary_disk: None,
            refused: runs.iter().find_map(|run| match run {
                Run::Refused(reason) => Some(reason.clone()),
                Run::Done(_) => None,
            }),
        }
    }
}

impl Row {
    /// Puts the samples of an earlier record before these.
    fn follow(&mut self, earlier: Self) {
        if !self.has_samples() {
            self.refused = earlier.refused;
        }
        let pairs = [
            (&mut self.run_s, earlier.run_s),
            (&mut self.host_read_mib, earlier.host_read_mib),
            (&mut self.host_written_mib, earlier.host_written_mib),
            (&mut self.guest_read_mib, earlier.guest_read_mib),
            (&mut self.guest_written_mib, earlier.guest_written_mib),
            (&mut self.without_io_mib, earlier.without_io_mib),
            (&mut self.io_mib, earlier.io_mib),
            (&mut self.zero_faults, earlier.zero_faults),
            (&mut self.second_chance_faults, earlier.second_chance_faults),
            (&mut self.read_ahead_faults, earlier.read_ahead_faults),
            (&mut self.faults_with_io, earlier.faults_with_io),
            (&mut self.pages_per_read, earlier.pages_per_read),
            (&mut self.unchanged_mib, earlier.unchanged_mib),
        ];
        for (samples, mut earlier) in pairs {
            earlier.append(samples);
            *samples = earlier;
        }
    }

    fn has_samples(&self) -> bool {
        !self.run_s.is_empty() || self.refused.is_some()
    }
}

fn done(run: &Run) -> Option<&Sample> {
    match run {
        Run::Done(sample) => Some(sample),
        Run::Refused(_) => None,
    }
}

fn mib_of(pages: u64) -> f64 {
    pages as f64 / PAGES_OF_A_MIB
}

/// The quotient of two medians; none without samples, or by zero.
fn quotient(samples: &[f64], reference: &[f64]) -> Option<f64> {
    Some(median(samples)? / median(reference).filter(|median| *median > 0.0)?)
}

/// All figures.
#[derive(Serialize)]
pub struct Report<'a> {
    machine: &'a str,
    resident_mib: u64,
    memory_mib: u64,
    array_mib: u64,
    goal: f64,
    goal_of_io: f64,
    paper_ordinary_disk_s: f64,
    paper_paging_disk_s: f64,
    rows: Vec<Row>,
}

impl<'a> Report<'a> {
    /// A report on the runs of each kind, and on those of earlier records.
    ///
    /// # Errors
    /// If an earlier record is of other sizes, or is none.
    pub fn of(
        machine: &'a str,
        sizes: Sizes,
        runs: &[Vec<Run>; Kind::ALL.len()],
        earlier: Option<&Value>,
    ) -> Outcome<Self> {
        let mut rows: Vec<Row> = Kind::ALL
            .into_iter()
            .zip(runs)
            .map(|(kind, runs)| Row::of(kind, runs))
            .collect();
        if let Some(earlier) = earlier {
            add_earlier(&mut rows, sizes, earlier)?;
        }
        let is_reference = |row: &&Row| row.kind == Kind::REFERENCE.name();
        let reference = rows.iter().find(is_reference);
        let reference = reference.map(|row| (row.run_s.clone(), row.io_mib.clone()));
        if let Some((run_s, io_mib)) = reference {
            for row in &mut rows {
                row.of_the_ordinary_disk = quotient(&row.run_s, &run_s);
                row.io_of_the_ordinary_disk = quotient(&row.io_mib, &io_mib);
            }
        }
        rows.retain(Row::has_samples);
        Ok(Self {
            machine,
            resident_mib: sizes.resident_mib,
            memory_mib: sizes.memory_mib,
            array_mib: sizes.array_mib,
            goal: GOAL,
            goal_of_io: GOAL_IO,
            paper_ordinary_disk_s: PAPER_S[0],
            paper_paging_disk_s: PAPER_S[1],
            rows,
        })
    }

    /// The medians as a table, with a verdict on the goals.
    ///
    /// # Errors
    /// None but those of a writer, which a text is not.
    pub fn markdown(&self) -> Outcome<String> {
        let mut text = format!(
            "{}\n\n| medians, I/O in MiB | time, s | of the ordinary disk's | read by the host | written \
             by it | read by the guest | written by it | without I/O | I/O | of the ordinary disk's |\n|{}\n",
            self.machine,
            " --- |".repeat(10)
        );
        for row in &self.rows {
            if let Some(reason) = &row.refused {
                writeln!(text, "| {} | refused: {reason} |", row.kind)?;
                continue;
            }
            let mib = |samples: &[f64]| shown(median(samples), 1);
            let cells = [
                shown(median(&row.run_s), 1),
                shown(row.of_the_ordinary_disk, 2),
                mib(&row.host_read_mib),
                mib(&row.host_written_mib),
                mib(&row.guest_read_mib),
                mib(&row.guest_written_mib),
                mib(&row.without_io_mib),
                mib(&row.io_mib),
                shown(row.io_of_the_ordinary_disk, 2),
            ];
            writeln!(text, "| {} | {} |", row.kind, cells.join(" | "))?;
        }
        text += &self.faults()?;
        let disk = self.rows.iter().find(|row| row.kind == Kind::PagingDisk.name());
        let quotients = disk.and_then(|row| row.of_the_ordinary_disk.zip(row.io_of_the_ordinary_disk));
        if let Some((time, io)) = quotients {
            let verdict = |value: f64, goal: f64| if value <= goal { "met" } else { "not met" };
            writeln!(
                text,
                "\nGoal: the virtual paging disk takes at most {:.2} of the time. {}: {time:.2}.\n\
                 Goal: at most {:.2} of the I/O. {}: {io:.2}.",
                self.goal,
                verdict(time, self.goal),
                self.goal_of_io,
                verdict(io, self.goal_of_io)
            )?;
        }
        Ok(text)
    }
}

impl Report<'_> {
    /// Faults as a table; empty if Mirrorball has not run.
    fn faults(&self) -> Outcome<String> {
        let rows = || self.rows.iter().filter(|row| !row.faults_with_io.is_empty());
        let mut text = String::new();
        if rows().next().is_none() {
            return Ok(text);
        }
        writeln!(
            text,
            "\n| medians | first uses | second chances | first uses of pages read ahead | faults with I/O | \
             pages per read | left without a write, MiB |\n|{}",
            " --- |".repeat(7)
        )?;
        for row in rows() {
            let cells = [
                shown(median(&row.zero_faults), 0),
                shown(median(&row.second_chance_faults), 0),
                shown(median(&row.read_ahead_faults), 0),
                shown(median(&row.faults_with_io), 0),
                shown(median(&row.pages_per_read), 2),
                shown(median(&row.unchanged_mib), 1),
            ];
            writeln!(text, "| {} | {} |", row.kind, cells.join(" | "))?;
        }
        Ok(text)
    }
}

/// Adds the samples of an earlier record to the rows of their kinds.
fn add_earlier(rows: &mut [Row], sizes: Sizes, earlier: &Value) -> Outcome<()> {
    let wanted = [
        ("resident_mib", sizes.resident_mib),
        ("memory_mib", sizes.memory_mib),
        ("array_mib", sizes.array_mib),
    ];
    for (name, mib) in wanted {
        if earlier[name] != mib {
            let help = "help: run without --add, or with the record's sizes";
            return Err(format!(
                "--add: {name} of the record is {}, not {mib}; {help}",
                earlier[name]
            )
            .into());
        }
    }
    let known: Vec<Row> = serde_json::from_value(earlier["rows"].clone())
        .map_err(|error| format!("--add: the rows of the record: {error}"))?;
    for earlier in known {
        if let Some(row) = rows.iter_mut().find(|row| row.kind == earlier.kind) {
            row.follow(earlier);
        }
    }
    Ok(())
}

fn shown(figure: Option<f64>, decimals: usize) -> String {
    figure.map_or_else(String::new, |figure| format!("{figure:.decimals$}"))
}

#[cfg(test)]
mod tests;
