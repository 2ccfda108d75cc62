//! Measurements by program and kind of run, with the check that all results are equal. Pure.

use std::fmt::Write;

use bench::Outcome;
use bench::tables::median;
use serde::Serialize;

/// Kind of run of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// A thread of one node.
    OneNode,
    /// A thread on each of two nodes.
    TwoNodes,
    /// MPI, one process.
    OneRank,
    /// MPI, two processes and TCP.
    TwoRanksTcp,
    /// MPI, two processes and shared memory.
    TwoRanksMemory,
}

/// Figures of one run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// Duration, milliseconds.
    pub ms: f64,
    /// Messages of all nodes.
    pub messages: f64,
    /// Bytes in them.
    pub bytes: f64,
}

/// All samples.
#[derive(Debug, Default)]
pub struct Figures(Vec<Program>);

#[derive(Debug)]
struct Program {
    kernel: String,
    size: u32,
    sum: String,
    runs: Vec<(Way, Vec<Sample>)>,
}

/// A row of the record.
#[derive(Debug, Serialize)]
pub struct Told<'a> {
    kernel: &'a str,
    size: u32,
    /// The sum of the result, the same in all runs.
    sum: &'a str,
    ways: Vec<ToldWay>,
}

#[derive(Debug, Serialize)]
struct ToldWay {
    way: Way,
    median_ms: f64,
    low_ms: f64,
    high_ms: f64,
    messages: f64,
    bytes: f64,
    /// The time of one process of the same kind, divided by this one.
    speedup: f64,
    samples_ms: Vec<f64>,
}

impl Way {
    const ALL: [Self; 5] = [
        Self::OneNode,
        Self::TwoNodes,
        Self::OneRank,
        Self::TwoRanksTcp,
        Self::TwoRanksMemory,
    ];

    /// The same kind with one process.
    fn alone(self) -> Self {
        match self {
            Self::OneNode | Self::TwoNodes => Self::OneNode,
            Self::OneRank | Self::TwoRanksTcp | Self::TwoRanksMemory => Self::OneRank,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::OneNode => "one node",
            Self::TwoNodes => "two nodes",
            Self::OneRank => "MPI, one",
            Self::TwoRanksTcp => "MPI, two, TCP",
            Self::TwoRanksMemory => "MPI, two, memory",
        }
    }
}

impl Figures {
    /// Adds a run of a program, of this size, with this sum of its result.
    ///
    /// # Errors
    /// If another run gave another result.
    pub fn add(&mut self, (kernel, size, sum): (&str, u32, &str), way: Way, sample: Sample) -> Outcome<()> {
        let at = match self.0.iter().position(|program| program.kernel == kernel) {
            Some(at) => at,
            None => {
                self.0.push(Program {
                    kernel: kernel.to_owned(),
                    size,
                    sum: sum.to_owned(),
                    runs: Way::ALL.map(|way| (way, Vec::new())).to_vec(),
                });
                self.0.len() - 1
            }
        };
        let program = &mut self.0[at];
        if (program.size, program.sum.as_str()) != (size, sum) {
            return Err(format!(
                "{kernel} of size {size}, {}: the result's sum is {sum}, but that of size {} was {}",
                way.name(),
                program.size,
                program.sum
            )
            .into());
        }
        let runs = program.runs.iter_mut().filter(|(other, _)| *other == way);
        runs.for_each(|(_, samples)| samples.push(sample));
        Ok(())
    }

    /// The size of a program that ran.
    pub fn size(&self, kernel: &str) -> Option<u32> {
        self.0
            .iter()
            .find(|program| program.kernel == kernel)
            .map(|program| program.size)
    }

    /// The rows: medians, lowest and highest.
    ///
    /// # Errors
    /// If something did not run.
    pub fn told(&self) -> Outcome<Vec<Told<'_>>> {
        self.0.iter().map(Program::told).collect()
    }

    /// The rows as a table.
    ///
    /// # Errors
    /// As [`Figures::told`].
    pub fn text(&self) -> Outcome<String> {
        let mut text = format!(
            "{:15} {:>6} {:17} {:>9} {:>22} {:>9} {:>9} {:>10}\n",
            "program", "size", "way", "ms", "(lowest - highest)", "speed-up", "messages", "KB"
        );
        for program in self.told()? {
            for way in &program.ways {
                writeln!(
                    text,
                    "{:15} {:6} {:17} {:9.1} {:>10.1} - {:<9.1} {:9.2} {:9.0} {:10.0}",
                    program.kernel,
                    program.size,
                    way.way.name(),
                    way.median_ms,
                    way.low_ms,
                    way.high_ms,
                    way.speedup,
                    way.messages,
                    way.bytes / 1e3
                )?;
            }
        }
        Ok(text)
    }
}

impl Program {
    fn told(&self) -> Outcome<Told<'_>> {
        let of = |way: Way, what: fn(&Sample) -> f64| -> Outcome<(f64, Vec<f64>)> {
            let runs = self.runs.iter().filter(|(other, _)| *other == way);
            let values: Vec<f64> = runs.flat_map(|(_, samples)| samples.iter().map(what)).collect();
            let middle = median(&values).ok_or(format!("{}, {}: it has not run", self.kernel, way.name()))?;
            Ok((middle, values))
        };
        let way = |way: Way| -> Outcome<ToldWay> {
            let (median_ms, samples_ms) = of(way, |sample| sample.ms)?;
            Ok(ToldWay {
                way,
                median_ms,
                low_ms: samples_ms.iter().copied().fold(f64::INFINITY, f64::min),
                high_ms: samples_ms.iter().copied().fold(0.0, f64::max),
                messages: of(way, |sample| sample.messages)?.0,
                bytes: of(way, |sample| sample.bytes)?.0,
                speedup: of(way.alone(), |sample| sample.ms)?.0 / median_ms,
                samples_ms,
            })
        };
        let ways: Outcome<Vec<ToldWay>> = Way::ALL.into_iter().map(way).collect();
        Ok(Told {
            kernel: &self.kernel,
            size: self.size,
            sum: &self.sum,
            ways: ways?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(ms: f64, messages: f64) -> Sample {
        Sample {
            ms,
            messages,
            bytes: messages * 100.0,
        }
    }

    fn figures() -> Figures {
        let mut figures = Figures::default();
        for way in Way::ALL {
            for ms in [30.0, 10.0, 20.0] {
                let half = if way == way.alone() { 1.0 } else { 0.5 };
                figures
                    .add(("SOR", 64, "ab"), way, sample(ms * half, 8.0))
                    .unwrap();
            }
        }
        figures
    }

    #[test]
    fn a_speedup_is_by_the_median_of_one_process_of_the_same_kind() {
        let figures = figures();
        let told = figures.told().unwrap();
        let ways = &told[0].ways;
        assert_eq!(
            (
                ways[0].median_ms,
                ways[0].low_ms,
                ways[0].high_ms,
                ways[0].speedup
            ),
            (20.0, 10.0, 30.0, 1.0)
        );
        assert_eq!(
            (ways[3].median_ms, ways[3].speedup, ways[3].messages),
            (10.0, 2.0, 8.0)
        );
    }

    #[test]
    fn another_result_ends_the_bench_and_names_both() {
        let mut figures = figures();
        let error = figures
            .add(("SOR", 64, "cd"), Way::OneRank, sample(1.0, 0.0))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("SOR") && error.contains("cd") && error.contains("ab"),
            "{error}"
        );
        assert!(
            figures
                .add(("SOR", 65, "ab"), Way::OneRank, sample(1.0, 0.0))
                .is_err()
        );
    }

    #[test]
    fn row_is_refused_where_a_run_is_missing() {
        let mut figures = Figures::default();
        figures
            .add(("TSP", 9, "1"), Way::OneNode, sample(1.0, 0.0))
            .unwrap();
        assert!(figures.told().is_err());
    }
}
