//! What is measured, as tables, and how a figure is taken.

mod bars;
mod report;

use std::time::Instant;

pub use report::{Report, median};

use crate::Outcome;

/// Takes one figure.
pub type Measure = fn() -> Outcome<f64>;

/// What a column tells, and its heading.
#[derive(Clone, Copy, Debug)]
pub enum Column {
    /// Nanoseconds.
    Ns(&'static str),
    /// Per second, shown in millions.
    Millions(&'static str),
    /// Hundredths.
    Percent(&'static str),
}

/// What is compared.
#[derive(Debug)]
pub struct Row {
    /// Its name.
    pub what: &'static str,
    /// For each column; none where it makes no sense.
    pub measures: &'static [Option<Measure>],
}

/// What is compared with one another.
#[derive(Debug)]
pub struct Table {
    /// What all its rows do.
    pub title: &'static str,
    /// What is told of them. Only times in the first column are drawn.
    pub columns: &'static [Column],
    /// Whether the first column is shown as multiples of its first row, too.
    pub compared: bool,
    /// In the order in which they are measured.
    pub rows: &'static [Row],
}

impl Row {
    /// With a measure, or none, for each column.
    pub const fn new(what: &'static str, measures: &'static [Option<Measure>]) -> Self {
        Self { what, measures }
    }
}

impl Column {
    /// As the table has it.
    pub fn heading(self) -> &'static str {
        match self {
            Self::Ns(heading) | Self::Millions(heading) | Self::Percent(heading) => heading,
        }
    }

    /// A figure as people read it.
    pub fn show(self, figure: f64) -> String {
        match self {
            Self::Ns(_) => format!("{figure:.0}"),
            Self::Millions(_) if figure < 1e6 => format!("{:.3}", figure / 1e6),
            Self::Millions(_) => format!("{:.1}", figure / 1e6),
            Self::Percent(_) => format!("{figure:.2}"),
        }
    }
}

/// Nanoseconds of one of `count` doings, each of which gets its number.
///
/// # Errors
/// The first one of theirs.
pub fn each_ns(count: u64, mut does: impl FnMut(u64) -> Outcome<()>) -> Outcome<f64> {
    let start = Instant::now();
    (0..count).try_for_each(&mut does)?;
    Ok(start.elapsed().as_nanos() as f64 / count as f64)
}

/// How many of `count` doings there are in a second.
///
/// # Errors
/// The first one of theirs.
pub fn per_second(count: u64, mut does: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    Ok(1e9 / each_ns(count, |_| does())?)
}
