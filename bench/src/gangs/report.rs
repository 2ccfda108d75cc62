//! The measurements: a record for programs, tables for people.

use std::fmt::{self, Write};

use bench::Outcome;
use bench::tables::median;
use serde::Serialize;

use crate::kinds::{Guest, Program, Scheduling};
use crate::sample::{LIMIT_MS, ROUNDS, Sample, Work};

/// Number of VMs that share the CPUs.
const VMS: f64 = 2.0;
/// Longest time of a round of a VM alone that spins, for a comparison of schedulers: twice the calibrated 100
/// us. Beyond it other work had taken the CPUs away, and decided more than the schedulers did.
const QUIET_US: f64 = 200.0;

/// Times of a program under one way of scheduling.
#[derive(Debug, Serialize)]
struct Row {
    program: &'static str,
    guest: &'static str,
    scheduling: &'static str,
    /// Mean of the VMs in each run.
    round_us: Vec<f64>,
    /// The slowest VM in each run.
    slowest_vm_us: Vec<f64>,
    /// Multiple of the time of a VM that has its share of the CPUs: as long as alone, times the VMs.
    times_fair_share: Option<f64>,
}

/// Gangs beside their rivals: medians of a rival's time, each divided by that of gangs.
#[derive(Debug, Serialize)]
struct Gain {
    program: &'static str,
    guest: &'static str,
    linux_by_gangs: Option<f64>,
    balance_by_gangs: Option<f64>,
    /// Least value of both.
    goal: f64,
    verdict: Verdict,
}

/// Outcome of a comparison with the goal.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
enum Verdict {
    #[serde(rename = "met")]
    Met,
    #[serde(rename = "not met")]
    Missed,
    #[serde(rename = "not shown: the machine was busy")]
    Busy,
}

impl fmt::Display for Verdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Met => "met",
            Self::Missed => "not met",
            Self::Busy => "not shown: the machine was busy",
        })
    }
}

/// All figures.
#[derive(Debug, Serialize)]
pub struct Report<'a> {
    machine: &'a str,
    rounds: u64,
    limit_ms: u64,
    /// Work of a round, by calibration.
    iterations_each_round: u64,
    calls_each_round: u64,
    gains: Vec<Gain>,
    figures: Vec<Row>,
}

impl<'a> Report<'a> {
    /// A report on all samples.
    ///
    /// # Errors
    /// If a kind has no sample.
    pub fn of(machine: &'a str, work: Work, samples: &[Sample]) -> Outcome<Self> {
        let (mut gains, mut figures) = (Vec::new(), Vec::new());
        let mut is_quiet = true;
        for guest in Guest::ALL {
            let alone = Times::of(samples, Program::Spin, guest, Scheduling::Alone)?;
            is_quiet &= alone.median().is_some_and(|us| us <= QUIET_US);
        }
        for program in Program::ALL {
            for guest in Guest::ALL {
                let of_kind = |scheduling| Times::of(samples, program, guest, scheduling);
                let [alone, linux, balance, gangs] = Scheduling::ALL.map(of_kind);
                let [alone, linux, balance, gangs] = [alone?, linux?, balance?, gangs?];
                gains.push(Gain::of(program, guest, is_quiet, [&linux, &balance, &gangs]));
                for (scheduling, times) in Scheduling::ALL
                    .into_iter()
                    .zip([&alone, &linux, &balance, &gangs])
                {
                    let fair_us = alone.median().map(|us| us * VMS);
                    let is_shared = scheduling != Scheduling::Alone;
                    figures.push(Row {
                        program: program.name(),
                        guest: guest.name(),
                        scheduling: scheduling.name(),
                        round_us: times.mean_us.clone(),
                        slowest_vm_us: times.slowest_us.clone(),
                        times_fair_share: ratio(times.median(), fair_us).filter(|_| is_shared),
                    });
                }
            }
        }
        Ok(Self {
            machine,
            rounds: ROUNDS,
            limit_ms: LIMIT_MS,
            iterations_each_round: work.iterations,
            calls_each_round: work.calls,
            gains,
            figures,
        })
    }

    /// The medians as tables.
    ///
    /// # Errors
    /// None but those of a writer, which a text is not.
    pub fn markdown(&self) -> Outcome<String> {
        let mut text = format!("{}\n", self.machine);
        text += "\n| program | guest | scheduling | a round, us | slowest VM | of its fair share |\n\
                 | --- | --- | --- | --- | --- | --- |\n";
        for row in &self.figures {
            let [round, slowest] = [&row.round_us, &row.slowest_vm_us].map(|us| shown(median(us), 0));
            let share = shown(row.times_fair_share, 2);
            let (program, guest, scheduling) = (row.program, row.guest, row.scheduling);
            writeln!(
                text,
                "| {program} | {guest} | {scheduling} | {round} | {slowest} | {share} |"
            )?;
        }
        text += "\n| program | guest | Linux / gangs | balance / gangs | goal |\n\
                 | --- | --- | --- | --- | --- |\n";
        for gain in &self.gains {
            let [linux, balance] = [gain.linux_by_gangs, gain.balance_by_gangs].map(|by| shown(by, 2));
            let (program, guest, goal, verdict) = (gain.program, gain.guest, gain.goal, gain.verdict);
            writeln!(
                text,
                "| {program} | {guest} | {linux} | {balance} | {goal:.1}: {verdict} |"
            )?;
        }
        Ok(text)
    }
}

impl Gain {
    fn of(program: Program, guest: Guest, is_quiet: bool, [linux, balance, gangs]: [&Times; 3]) -> Self {
        let by_gangs = |rival: &Times| ratio(rival.median(), gangs.median());
        let both = [by_gangs(linux), by_gangs(balance)];
        let goal = guest.goal();
        let verdict = match both.iter().all(|by| by.is_some_and(|by| by >= goal)) {
            _ if !is_quiet => Verdict::Busy,
            true => Verdict::Met,
            false => Verdict::Missed,
        };
        Self {
            program: program.name(),
            guest: guest.name(),
            linux_by_gangs: both[0],
            balance_by_gangs: both[1],
            goal,
            verdict,
        }
    }
}

/// Times of a round, one for each run.
struct Times {
    mean_us: Vec<f64>,
    slowest_us: Vec<f64>,
}

impl Times {
    fn of(samples: &[Sample], program: Program, guest: Guest, scheduling: Scheduling) -> Outcome<Self> {
        let is_kind = |sample: &&Sample| {
            (sample.program, sample.guest, sample.scheduling) == (program, guest, scheduling)
        };
        let mut times = Self {
            mean_us: Vec::new(),
            slowest_us: Vec::new(),
        };
        for sample in samples.iter().filter(is_kind) {
            let (kind, vms) = (scheduling.name(), &sample.round_us);
            let slowest = vms.iter().copied().max_by(f64::total_cmp);
            times
                .slowest_us
                .push(slowest.ok_or_else(|| format!("{kind}: a sample of no VM"))?);
            times.mean_us.push(vms.iter().sum::<f64>() / vms.len() as f64);
        }
        match times.mean_us.is_empty() {
            true => Err(format!(
                "{}, {}, {}: no sample",
                program.name(),
                guest.name(),
                scheduling.name()
            )
            .into()),
            false => Ok(times),
        }
    }

    fn median(&self) -> Option<f64> {
        median(&self.mean_us)
    }
}

/// A multiple, unless it is of nothing.
fn ratio(of: Option<f64>, by: Option<f64>) -> Option<f64> {
    Some(of? / by.filter(|by| *by > 0.0)?)
}

fn shown(figure: Option<f64>, places: usize) -> String {
    figure.map_or_else(String::new, |figure| format!("{figure:.places$}"))
}

#[cfg(test)]
mod tests;
