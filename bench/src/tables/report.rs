//! The measurements: a record for programs, tables and a picture for people.

use serde::Serialize;

use super::{Column, Table};
use crate::Outcome;
use crate::bars::{Group, Scale, bars};

/// All figures.
#[derive(Serialize)]
pub struct Report<'a> {
    machine: &'a str,
    tables: Vec<Figures>,
}

/// Figures of a table.
#[derive(Serialize)]
struct Figures {
    title: &'static str,
    columns: Vec<&'static str>,
    rows: Vec<Line>,
    #[serde(skip)]
    table: &'static Table,
}

/// Figures of a row: for each column that of every run.
#[derive(Serialize)]
struct Line {
    what: &'static str,
    runs: Vec<Vec<f64>>,
}

impl<'a> Report<'a> {
    /// A report without figures.
    pub fn new(machine: &'a str, tables: &'static [Table]) -> Self {
        let figures = |table: &'static Table| Figures {
            title: table.title,
            columns: table.columns.iter().map(|column| column.heading()).collect(),
            rows: table
                .rows
                .iter()
                .map(|row| Line {
                    what: row.what,
                    runs: vec![Vec::new(); table.columns.len()],
                })
                .collect(),
            table,
        };
        Self {
            machine,
            tables: tables.iter().map(figures).collect(),
        }
    }

    /// Measures everything once, in turn.
    ///
    /// # Errors
    /// The first error of a measurement, after the name of its row.
    pub fn run(&mut self) -> Outcome<()> {
        for figures in &mut self.tables {
            for (row, line) in figures.table.rows.iter().zip(&mut figures.rows) {
                for (measure, runs) in row.measures.iter().zip(&mut line.runs) {
                    if let Some(measure) = measure {
                        let figure = measure().map_err(|error| format!("{}: {error}", row.what))?;
                        runs.push(figure);
                    }
                }
            }
        }
        Ok(())
    }

    /// The medians as tables.
    pub fn markdown(&self) -> String {
        let mut text = format!("{}\n", self.machine);
        for figures in &self.tables {
            text += &figures.markdown();
        }
        text
    }

    /// All times as bars on a logarithmic scale.
    pub fn svg(&self) -> String {
        let groups = self.tables.iter().map(|figures| Group {
            name: figures.title,
            bars: figures.times(),
        });
        let groups: Vec<Group> = groups.filter(|group| !group.bars.is_empty()).collect();
        bars(
            "Round trip of a message, and operations made of messages, ns",
            Scale::Logarithmic,
            &groups,
        )
    }
}

impl Figures {
    fn markdown(&self) -> String {
        let mut heads = vec![self.title];
        heads.extend(&self.columns);
        if self.table.compared {
            heads.insert(2, "of the first");
        }
        let mut text = format!("\n| {} |\n|{}\n", heads.join(" | "), " --- |".repeat(heads.len()));
        let first = self.rows.first().and_then(|line| median(line.runs.first()?));
        for line in &self.rows {
            let medians: Vec<Option<f64>> = line.runs.iter().map(|runs| median(runs)).collect();
            let shown = |(column, figure): (&Column, &Option<f64>)| figure.map(|figure| column.show(figure));
            let mut cells: Vec<String> = vec![line.what.to_owned()];
            cells.extend(
                self.table
                    .columns
                    .iter()
                    .zip(&medians)
                    .map(|cell| shown(cell).unwrap_or_default()),
            );
            if self.table.compared {
                let ratio = medians.first().copied().flatten().zip(first);
                cells.insert(
                    2,
                    ratio.map_or_else(String::new, |(own, first)| format!("{:.2}", own / first)),
                );
            }
            text += &format!("| {} |\n", cells.join(" | "));
        }
        text
    }

    /// The medians of the first column, if that is a time.
    fn times(&self) -> Vec<(&str, f64)> {
        if !matches!(self.table.columns.first(), Some(Column::Ns(_))) {
            return Vec::new();
        }
        let lines = self.rows.iter();
        lines
            .filter_map(|line| Some((line.what, median(line.runs.first()?)?)))
            .collect()
    }
}

/// The value in the middle; none of none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::Row;

    const TABLE: Table = Table {
        title: "ways",
        columns: &[Column::Ns("ns"), Column::Millions("millions")],
        compared: true,
        rows: &[
            Row::new("bare", &[Some(|| Ok(200.0)), None]),
            Row::new("slow", &[Some(|| Ok(5000.0)), Some(|| Ok(2.5e6))]),
        ],
    };

    #[test]
    fn a_table_shows_medians_and_multiples_of_its_first_row() {
        let mut report = Report::new("a machine", &[TABLE]);
        (0..3).for_each(|_| report.run().expect("nothing fails"));
        assert_eq!(
            report.markdown(),
            "a machine\n\n| ways | ns | of the first | millions |\n| --- | --- | --- | --- |\n\
             | bare | 200 | 1.00 |  |\n| slow | 5000 | 25.00 | 2.5 |\n"
        );
    }
}
