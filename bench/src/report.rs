//! The table for people and the JSON for the record.

use std::path::Path;

use serde::Serialize;

use crate::Outcome;
use crate::measure::Measurement;

/// Which figures are better.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Smaller figures.
    Lower,
    /// Larger figures.
    Higher,
}

#[derive(Serialize)]
struct Cell {
    name: String,
    median: f64,
    min: f64,
    max: f64,
    samples: usize,
    /// Mirrorball's median divided by this one's.
    ratio: f64,
}

#[derive(Serialize)]
struct Row {
    what: String,
    unit: String,
    better: Better,
    cells: Vec<Cell>,
}

/// All measurements.
#[derive(Serialize)]
pub struct Table {
    machine: String,
    rows: Vec<Row>,
}

impl Table {
    /// An empty table for a machine described in words.
    pub fn new(machine: &str) -> Self {
        Self {
            machine: machine.to_owned(),
            rows: Vec::new(),
        }
    }

    /// Adds a figure; the first measurement is Mirrorball's.
    pub fn add(&mut self, what: &str, unit: &str, better: Better, measurements: Vec<Measurement>) {
        let ours = measurements.first().map_or(f64::NAN, Measurement::median);
        let cells = measurements
            .iter()
            .map(|measurement| {
                let (min, max) = measurement.range();
                let median = measurement.median();
                let samples = measurement.samples.len();
                Cell {
                    name: measurement.name.clone(),
                    median,
                    min,
                    max,
                    samples,
                    ratio: ours / median,
                }
            })
            .collect();
        self.rows.push(Row {
            what: what.to_owned(),
            unit: unit.to_owned(),
            better,
            cells,
        });
    }

    /// Prints the table.
    pub fn print(&self) {
        println!("{}\n", self.machine);
        println!(
            "| figure | program | median | min-max | mirrorball / it |\n| --- | --- | --- | --- | --- |"
        );
        for row in &self.rows {
            for cell in &row.cells {
                println!(
                    "| {} ({}) | {} | {:.2} | {:.2}-{:.2} | {:.2} |",
                    row.what, row.unit, cell.name, cell.median, cell.min, cell.max, cell.ratio
                );
            }
        }
    }

    /// Writes the JSON.
    pub fn save(&self, file: &Path) -> Outcome<()> {
        std::fs::write(file, serde_json::to_string_pretty(self)? + "\n")?;
        Ok(())
    }
}
