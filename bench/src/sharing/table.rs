//! The table for people and the JSON for the record.

use std::path::Path;

use serde::Serialize;

use crate::Outcome;
use crate::kinds::MEMORY_BYTES;
use crate::measure::Sample;
use crate::plot::{Series, svg};

#[derive(Serialize)]
struct Cell {
    kind: String,
    vms: usize,
    /// None if it could not be measured.
    median: Option<Sample>,
    samples: Vec<Sample>,
}

/// All measurements.
#[derive(Serialize)]
pub struct Table {
    machine: String,
    counts: Vec<usize>,
    cells: Vec<Cell>,
}

impl Table {
    /// An empty table for a machine described in words.
    pub fn new(machine: &str, counts: &[usize]) -> Self {
        Self {
            machine: machine.to_owned(),
            counts: counts.to_vec(),
            cells: Vec::new(),
        }
    }

    /// Adds the samples of `vms` guests of a kind.
    pub fn add(&mut self, kind: &str, vms: usize, samples: Vec<Sample>) {
        let median = median(&samples);
        self.cells.push(Cell {
            kind: kind.to_owned(),
            vms,
            median,
            samples,
        });
    }

    /// Prints three tables: the drop of free memory, the part of it that the page cache can't give back, and
    /// PSS with CPU time.
    pub fn print(&self) {
        println!("{}", self.machine);
        self.one("host memory lost (MemFree), MB", |sample| sample.drop_mb);
        self.one("the same without unmapped page cache, MB", |sample| {
            sample.kept_mb
        });
        self.one("PSS of all processes, MB", |sample| sample.pss_mb);
        self.one("CPU time, KSM's included, s", |sample| {
            sample.cpu_s + sample.ksm_cpu_s.unwrap_or(0.0)
        });
    }

    fn one(&self, what: &str, figure: fn(&Sample) -> f64) {
        let heads: Vec<String> = self.counts.iter().map(usize::to_string).collect();
        println!("\n| {what} | {} | each further VM |", heads.join(" | "));
        println!("| --- |{}", " --- |".repeat(heads.len() + 1));
        for kind in self.kinds() {
            let row: Vec<(usize, Option<f64>)> = self
                .cells
                .iter()
                .filter(|cell| cell.kind == kind)
                .map(|cell| (cell.vms, cell.median.as_ref().map(figure)))
                .collect();
            let cells: Vec<String> = row
                .iter()
                .map(|(_, value)| value.map_or_else(|| "failed".to_owned(), |value| format!("{value:.0}")))
                .collect();
            let further = match (row.first(), row.last()) {
                (Some((first, Some(low))), Some((last, Some(high)))) if last > first => {
                    format!("{:.0}", (high - low) / (last - first) as f64)
                }
                _ => String::new(),
            };
            println!("| {kind} | {} | {further} |", cells.join(" | "));
        }
    }

    /// The kinds in the order they were added.
    fn kinds(&self) -> Vec<&str> {
        let mut kinds: Vec<&str> = Vec::new();
        for cell in &self.cells {
            if !kinds.contains(&cell.kind.as_str()) {
                kinds.push(&cell.kind);
            }
        }
        kinds
    }

    /// Virtual footprint, then each kind's machine footprint.
    fn picture(&self) -> String {
        let virtual_mb = |vms: &usize| (*vms, *vms as f64 * MEMORY_BYTES as f64 / 1e6);
        let mut series = vec![Series {
            name: "virtual: what the guests have".to_owned(),
            points: self.counts.iter().map(virtual_mb).collect(),
        }];
        for kind in self.kinds() {
            let cells = self.cells.iter().filter(|cell| cell.kind == kind);
            let points = cells
                .filter_map(|cell| Some((cell.vms, cell.median.as_ref()?.drop_mb)))
                .collect();
            series.push(Series {
                name: kind.to_owned(),
                points,
            });
        }
        svg("Host memory of VMs that read the same 150 MiB", &series)
    }

    /// Writes the JSON, and the picture beside it.
    pub fn save(&self, file: &Path) -> Outcome<()> {
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(file, serde_json::to_string_pretty(self)? + "\n")?;
        std::fs::write(file.with_extension("svg"), self.picture())?;
        Ok(())
    }
}

/// The sample in the middle by the memory lost; the lower one of an even number.
fn median(samples: &[Sample]) -> Option<Sample> {
    let mut sorted: Vec<&Sample> = samples.iter().collect();
    sorted.sort_by(|a, b| a.drop_mb.total_cmp(&b.drop_mb));
    sorted
        .get(samples.len().saturating_sub(1) / 2)
        .map(|sample| (*sample).clone())
}
