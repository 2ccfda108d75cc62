//! The measurements: a record for programs, a table for people.

use std::fmt::Write;

use bench::Outcome;
use bench::tables::median;
use serde::Serialize;

use crate::kinds::{Kind, Sizes};
use crate::sample::{Run, Sample};

/// Goal: the time with the virtual paging disk, as a part of that with an ordinary disk.
const GOAL: f64 = 0.4;
/// Goal: the I/O in the same way.
const GOAL_IO: f64 = 1.0 / 3.0;
/// Time of the paper's program without the virtual paging disk, and with it.
const PAPER_S: [f64; 2] = [258.0, 117.0];

/// Pages of 4 KiB in a MiB.
const PAGES_OF_A_MIB: f64 = 256.0;

/// Figures of one kind.
#[derive(Debug, Serialize)]
struct Row {
    kind: &'static str,
    run_s: Vec<f64>,
    /// Part of the reference's time, of the medians.
    of_the_ordinary_disk: Option<f64>,
    host_read_mib: Vec<f64>,
    host_written_mib: Vec<f64>,
    guest_read_mib: Vec<f64>,
    guest_written_mib: Vec<f64>,
    without_io_mib: Vec<f64>,
    io_mib: Vec<f64>,
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
        Self {
            kind: kind.name(),
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
            io_of_the_ordinary_disk: None,
            refused: runs.iter().find_map(|run| match run {
                Run::Refused(reason) => Some(reason.clone()),
                Run::Done(_) => None,
            }),
        }
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
    /// A report on the runs of each kind.
    pub fn of(machine: &'a str, sizes: Sizes, runs: &[Vec<Run>; Kind::ALL.len()]) -> Self {
        let mut rows: Vec<Row> = Kind::ALL
            .into_iter()
            .zip(runs)
            .filter(|(_, runs)| !runs.is_empty())
            .map(|(kind, runs)| Row::of(kind, runs))
            .collect();
        let reference = Kind::ALL.into_iter().zip(runs);
        let reference = reference
            .filter(|(kind, _)| *kind == Kind::REFERENCE)
            .map(|(kind, runs)| Row::of(kind, runs));
        for reference in reference {
            for row in &mut rows {
                row.of_the_ordinary_disk = quotient(&row.run_s, &reference.run_s);
                row.io_of_the_ordinary_disk = quotient(&row.io_mib, &reference.io_mib);
            }
        }
        Self {
            machine,
            resident_mib: sizes.resident_mib,
            memory_mib: sizes.memory_mib,
            array_mib: sizes.array_mib,
            goal: GOAL,
            goal_of_io: GOAL_IO,
            paper_ordinary_disk_s: PAPER_S[0],
            paper_paging_disk_s: PAPER_S[1],
            rows,
        }
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

fn shown(figure: Option<f64>, decimals: usize) -> String {
    figure.map_or_else(String::new, |figure| format!("{figure:.decimals$}"))
}

#[cfg(test)]
mod tests;
