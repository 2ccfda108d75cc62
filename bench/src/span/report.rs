//! The measurements: a record for programs, tables for people.

use std::collections::BTreeMap;
use std::fmt::Write;

use bench::Outcome;
use bench::tables::median;
use serde::Serialize;

use crate::kinds::Kind;
use crate::sample::Sample;

/// Goal: the time of a compilation in two shards, as a multiple of that in a plain VM.
const GOAL: f64 = 1.05;
/// The figure of the goal.
const COMPILE: &str = "bzip2 compiled, `make -j4`";
/// A vCPU's move between cells (Cellular Disco, SOSP '99, section 4.1).
const PAPER_MOVE_US: f64 = 1520.0;

/// A figure, and its place in a sample.
struct Figure {
    what: &'static str,
    unit: &'static str,
    of: Source,
}

enum Source {
    Sample(fn(&Sample) -> Vec<f64>),
    /// A measurement of the guest, under this name, nanoseconds.
    Guest(&'static str),
}

impl Figure {
    const fn seconds(what: &'static str, of: fn(&Sample) -> Vec<f64>) -> Self {
        Self {
            what,
            unit: "s",
            of: Source::Sample(of),
        }
    }

    const fn guest(what: &'static str, name: &'static str) -> Self {
        Self {
            what,
            unit: "us",
            of: Source::Guest(name),
        }
    }

    fn of(&self, sample: &Sample) -> Option<Vec<f64>> {
        Some(match self.of {
            Source::Sample(of) => of(sample),
            Source::Guest(name) => vec![sample.guest[name].as_f64()? / 1e3],
        })
    }
}

const FIGURES: &[Figure] = &[
    Figure::seconds("start until the agent answers", |sample| vec![sample.answer_s]),
    Figure::seconds(COMPILE, |sample| sample.compile_s.clone()),
    Figure::guest(
        "interrupt of a CPU and its answer, CPUs 0 and 3",
        "interrupt_far_ns",
    ),
    Figure::guest("the same, CPUs 0 and 1", "interrupt_near_ns"),
    Figure::guest("two threads wake each other, CPUs 0 and 3", "wake_far_ns"),
    Figure::guest("the same, CPUs 0 and 1", "wake_near_ns"),
    Figure::guest("switch between two processes on a CPU", "switch_ns"),
    Figure::guest("page fault, memory new to the guest", "fault_fresh_ns"),
    Figure::guest("page fault, memory that it had before", "fault_again_ns"),
    Figure::guest("by how much a sleep of 1 ms is too long", "late_ns"),
    Figure::guest("timer set and stopped", "arm_ns"),
];

/// A figure of all kinds, in their order.
#[derive(Serialize)]
struct Row {
    what: String,
    unit: &'static str,
    samples: [Vec<f64>; Kind::ALL.len()],
    /// Multiples of the first kind's median.
    of_the_first: [Option<f64>; Kind::ALL.len()],
}

impl Row {
    fn new(what: &str, unit: &'static str, samples: [Vec<f64>; Kind::ALL.len()]) -> Self {
        let medians = samples.each_ref().map(|samples| median(samples));
        Self {
            what: what.to_owned(),
            unit,
            of_the_first: medians.map(|own| Some(own? / medians[0].filter(|first| *first > 0.0)?)),
            samples,
        }
    }

    fn medians(&self) -> [Option<f64>; Kind::ALL.len()] {
        self.samples.each_ref().map(|samples| median(samples))
    }
}

/// Figures of moves, which only the last kind has.
#[derive(Serialize)]
struct Moves {
    what: &'static str,
    pauses_us: Vec<f64>,
    of_a_channel_round_trip: Option<f64>,
}

/// All figures.
#[derive(Serialize)]
pub struct Report<'a> {
    machine: &'a str,
    kinds: [&'static str; Kind::ALL.len()],
    goal: f64,
    figures: Vec<Row>,
    exits: Vec<Row>,
    channel_round_trip_us: Vec<f64>,
    moves: Vec<Moves>,
}

impl<'a> Report<'a> {
    /// A report on the samples of each kind, and a channel's round trips.
    ///
    /// # Errors
    /// If a sample lacks a figure.
    pub fn of(
        machine: &'a str,
        samples: &[Vec<Sample>; Kind::ALL.len()],
        round_trips_us: &[f64],
    ) -> Outcome<Self> {
        let mut figures = Vec::new();
        for figure in FIGURES {
            let mut all = Kind::ALL.map(|_| Vec::new());
            for (list, all) in samples.iter().zip(&mut all) {
                for sample in list {
                    let missing =
                        || format!("{}: the guest has no such figure: {}", figure.what, sample.guest);
                    all.extend(figure.of(sample).ok_or_else(missing)?);
                }
            }
            figures.push(Row::new(figure.what, figure.unit, all));
        }
        let round_trip = median(round_trips_us);
        let [.., last] = samples;
        let moves = |what, of: fn(&Sample) -> &Vec<f64>| {
            let pauses_us: Vec<f64> = last.iter().flat_map(of).copied().collect();
            Moves {
                what,
                of_a_channel_round_trip: median(&pauses_us).zip(round_trip).map(|(own, one)| own / one),
                pauses_us,
            }
        };
        Ok(Self {
            machine,
            kinds: Kind::ALL.map(Kind::name),
            goal: GOAL,
            figures,
            exits: exits(samples),
            channel_round_trip_us: round_trips_us.to_vec(),
            moves: vec![
                moves("a vCPU of an idle guest", |sample| &sample.idle_moves_us),
                moves("while all vCPUs interrupt one another", |sample| {
                    &sample.storm_moves_us
                }),
            ],
        })
    }

    /// The medians as tables.
    ///
    /// # Errors
    /// None but those of a writer, which a text is not.
    pub fn markdown(&self) -> Outcome<String> {
        let mut text = format!("{}\n", self.machine);
        let [first, own, two] = self.kinds;
        for (title, rows) in [("medians", &self.figures), ("exits of all vCPUs", &self.exits)] {
            write!(
                text,
                "\n| {title} | {first} | {own} | of the first | {two} | of the first |\n|{}\n",
                " --- |".repeat(6)
            )?;
            for row in rows {
                let shown = row.medians().map(|figure| shown(figure, row.unit));
                let [_, own, two] = row.of_the_first.map(shown_ratio);
                writeln!(
                    text,
                    "| {} | {} | {} | {own} | {} | {two} |",
                    row.what, shown[0], shown[1], shown[2]
                )?;
            }
        }
        text += "\n| a vCPU moves to the other cell | it stands still, us | least | most \
                 | of a channel's round trip |\n| --- | --- | --- | --- | --- |\n";
        for moves in &self.moves {
            let least = moves.pauses_us.iter().copied().reduce(f64::min);
            let most = moves.pauses_us.iter().copied().reduce(f64::max);
            let [middle, least, most, ratio] = [
                median(&moves.pauses_us),
                least,
                most,
                moves.of_a_channel_round_trip,
            ]
            .map(|figure| figure.map_or_else(String::new, |figure| format!("{figure:.0}")));
            writeln!(text, "| {} | {middle} | {least} | {most} | {ratio} |", moves.what)?;
        }
        writeln!(text, "| Cellular Disco | {PAPER_MOVE_US:.0} | | | |")?;
        if let Some(round_trip) = median(&self.channel_round_trip_us) {
            writeln!(
                text,
                "\nA channel's round trip, both polling: {round_trip:.2} us."
            )?;
        }
        let compile = self.figures.iter().find(|row| row.what == COMPILE);
        if let Some(ratio) = compile.and_then(|row| row.of_the_first[2]) {
            let verdict = if ratio <= self.goal { "met" } else { "not met" };
            writeln!(
                text,
                "Goal: compiling in two shards takes at most {:.2} of the first's time. \
                 {verdict}: {ratio:.2}.",
                self.goal
            )?;
        }
        Ok(text)
    }
}

/// A row for each kind of exit in a start and in a compilation.
fn exits(samples: &[Vec<Sample>; Kind::ALL.len()]) -> Vec<Row> {
    let mut rows: BTreeMap<(&str, &str), [Vec<f64>; Kind::ALL.len()]> = BTreeMap::new();
    for (kind, list) in samples.iter().enumerate() {
        for sample in list {
            let start = [("a start", &sample.start_exits)];
            let compilations = sample.compile_exits.iter().map(|exits| ("a compilation", exits));
            for (when, exits) in start.into_iter().chain(compilations) {
                for (what, count) in &exits.0 {
                    rows.entry((when, what)).or_default()[kind].push(*count as f64);
                }
            }
        }
    }
    let row =
        |((when, what), samples): ((&str, &str), _)| Row::new(&format!("{when}: {what}"), "count", samples);
    // A start comes before a compilation.
    rows.into_iter().rev().map(row).collect()
}

fn shown(figure: Option<f64>, unit: &str) -> String {
    match (figure, unit) {
        (None, _) => String::new(),
        (Some(figure), "count") => format!("{figure:.0}"),
        (Some(figure), unit) => format!("{figure:.2} {unit}"),
    }
}

fn shown_ratio(ratio: Option<f64>) -> String {
    ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}"))
}

#[cfg(test)]
mod tests;
