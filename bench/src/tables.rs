//! The measurements, as tables, and the taking of a figure.

mod report;

use std::time::Instant;

pub use report::{Report, median};

use crate::Outcome;

/// Takes one figure.
pub type Measure = fn() -> Outcome<f64>;

/// Unit of a column, and its heading.
#[derive(Clone, Copy, Debug)]
pub enum Column {
    /// Times in nanoseconds.
    Ns(&'static str),
    /// Per second, shown in millions.
    Millions(&'static str),
    /// Shares in hundredths of a whole.
    Percent(&'static str),
}

/// One of the compared things.
#[derive(Debug)]
pub struct Row {
    /// Name in the first column of the table.
    pub what: &'static str,
    /// A measure for each column; none where it makes no sense.
    pub measures: &'static [Option<Measure>],
}

/// Things that are compared with one another.
#[derive(Debug)]
pub struct Table {
    /// Common name of its rows.
    pub title: &'static str,
    /// The columns. Only times in the first one are drawn.
    pub columns: &'static [Column],
    /// Whether the first column is shown as multiples of its first row, too.
    pub compared: bool,
    /// The rows, in the order in which they are measured.
    pub rows: &'static [Row],
}

impl Row {
    /// A row with a measure, or none, for each column.
    pub const fn new(what: &'static str, measures: &'static [Option<Measure>]) -> Self {
        Self { what, measures }
    }
}

impl Column {
    /// The heading in the table.
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

/// Nanoseconds of one of `count` operations, each of which gets its number.
///
/// # Errors
/// The first error of an operation.
pub fn each_ns(count: u64, mut does: impl FnMut(u64) -> Outcome<()>) -> Outcome<f64> {
    let start = Instant::now();
    (0..count).try_for_each(&mut does)?;
    Ok(start.elapsed().as_nanos() as f64 / count as f64)
}

/// Number of `count` operations in a second.
///
/// # Errors
/// The first error of an operation.
pub fn per_second(count: u64, mut does: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    Ok(1e9 / each_ns(count, |_| does())?)
}
