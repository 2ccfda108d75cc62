//! Tables of the experiments, as text and as JSON for `bench/results`.

use std::fmt;
use std::fmt::Write as _;

use super::balancing::{self, Cost};
use super::experiment::{self, CPUS, Run, Scheduler, VCPUS, WORK_NS, Wait};
use super::{sleepers, spanning};
use crate::{MILLISECOND, SECOND, Time};

/// Work of each vCPU in the experiment: long beside a slice, so that the start weighs little.
const WORK_PER_VCPU_NS: Time = 2 * SECOND;
/// Rounds of each timing, of which the shortest counts.
const ROUNDS: u32 = 20;

/// Row of the experiment with gangs.
#[derive(Clone, Copy, Debug)]
struct GangRow {
    scheduler: Scheduler,
    wait: Wait,
    vms: u16,
    run: Option<Run>,
    /// Time beside that of one VM under the same scheduler, thousandths.
    ratio: Option<f64>,
}

/// Row of the experiment with VMs that span cells.
#[derive(Clone, Copy, Debug)]
struct SpanningRow {
    scheduler: spanning::Scheduler,
    cells: u16,
    vms: u16,
    time: Option<Time>,
    /// Time beside that of one VM under the same scheduler.
    ratio: Option<f64>,
}

/// Row of the experiment with threads that sleep beside threads that spin.
#[derive(Clone, Debug)]
struct SleeperRow {
    waits: &'static [sleepers::Wait],
    scheduler: sleepers::Scheduler,
    /// Barriers of each VM in a second.
    per_s: Option<Vec<f64>>,
}

/// Results of the experiments.
#[derive(Clone, Debug, Default)]
pub struct Report {
    gangs: Vec<GangRow>,
    spanning: Vec<SpanningRow>,
    sleepers: Vec<SleeperRow>,
    balancing: Vec<Cost>,
}

impl Report {
    /// Runs the experiments.
    pub fn measure(gangs: bool, balancing: bool, seed: u64) -> Self {
        let mut report = Self::default();
        if gangs {
            for wait in [Wait::Spin, Wait::SpinThenHalt] {
                for scheduler in [Scheduler::Gang, Scheduler::Balance, Scheduler::RoundRobin] {
                    report.gang_rows(scheduler, wait, seed);
                }
            }
            for cells in [2, 4] {
                use spanning::Scheduler::{CellGangs, RoundRobin, Windows};
                for scheduler in [Windows, CellGangs, RoundRobin] {
                    report.spanning_rows(scheduler, cells, seed);
                }
            }
        }
        if gangs {
            report.sleeper_rows(seed);
        }
        if balancing {
            report.balancing = [8, 64, 512, 1024]
                .map(|cpus| balancing::measure(cpus, ROUNDS))
                .to_vec();
        }
        report
    }

    fn gang_rows(&mut self, scheduler: Scheduler, wait: Wait, seed: u64) {
        let mut one = None;
        for vms in [1, 4, 8] {
            let run = experiment::run(vms, scheduler, wait, WORK_PER_VCPU_NS, seed);
            let time = run.map(|run| run.last_ns as f64);
            one = one.or(time);
            let ratio = time.zip(one).map(|(time, one)| time / one);
            self.gangs.push(GangRow {
                scheduler,
                wait,
                vms,
                run,
                ratio,
            });
        }
    }

    fn sleeper_rows(&mut self, seed: u64) {
        use sleepers::Scheduler::{Gangs, Linux, StrictGangs};
        use sleepers::Wait::{Sleep, Spin};
        let mixes: [&[sleepers::Wait]; 4] = [
            &[Spin, Spin],
            &[Sleep, Sleep],
            &[Sleep, Spin],
            &[Sleep, Sleep, Spin],
        ];
        for waits in mixes {
            for scheduler in [Linux, StrictGangs, Gangs] {
                let per_s = sleepers::run(waits, scheduler, seed);
                self.sleepers.push(SleeperRow {
                    waits,
                    scheduler,
                    per_s,
                });
            }
        }
    }

    fn spanning_rows(&mut self, scheduler: spanning::Scheduler, cells: u16, seed: u64) {
        let mut one = None;
        for vms in [1, 2, 4, 8] {
            let time = spanning::run(vms, cells, scheduler, seed);
            one = one.or(time);
            let ratio = time.zip(one).map(|(time, one)| time as f64 / one as f64);
            self.spanning.push(SpanningRow {
                scheduler,
                cells,
                vms,
                time,
                ratio,
            });
        }
    }

    /// The figures as a JSON object with the machine, without date and commit.
    pub fn json(&self) -> String {
        let gangs = self.gangs.iter().map(|row| {
            // Only the drivers count.
            let counted = row.run.filter(|_| row.scheduler != Scheduler::RoundRobin);
            let number = |value: Option<f64>| value.map_or("null".to_owned(), |value| format!("{value:.3}"));
            format!(
                "    {{\"scheduler\": \"{}\", \"waiting\": \"{}\", \"vms\": {}, \"seconds\": {}, \
                 \"times_one\": \
                 {}, \"moves\": {}, \"messages\": {}, \"switches\": {}}}",
                scheduler(row.scheduler),
                wait(row.wait),
                row.vms,
                number(row.run.map(|run| run.last_ns as f64 / SECOND as f64)),
                number(row.ratio),
                number(counted.map(|run| run.moves as f64)),
                number(counted.map(|run| run.messages as f64)),
                number(counted.map(|run| run.switches as f64)),
            )
        });
        let spanning = self.spanning.iter().map(|row| {
            let number = |value: Option<f64>| value.map_or("null".to_owned(), |value| format!("{value:.3}"));
            format!(
                "    {{\"scheduler\": \"{}\", \"cells\": {}, \"vms\": {}, \"seconds\": {}, \
                 \"times_one\": {}}}",
                spanning_scheduler(row.scheduler),
                row.cells,
                row.vms,
                number(row.time.map(|time| time as f64 / SECOND as f64)),
                number(row.ratio),
            )
        });
        let balancing = self.balancing.iter().map(|cost| {
            format!(
                "    {{\"cpus\": {}, \"tree_update_ns\": {:.1}, \"region_pass_ns\": {:.1}, \
                 \"machine_pass_ns\": \
                 {:.1}, \"idle_search_ns\": {:.1}, \"busy_cpu_us_per_s\": {:.3}, \
                  \"idle_cpu_us_per_s\": {:.3}}}",
                cost.cpus,
                cost.update_ns,
                cost.region_ns,
                cost.machine_ns,
                cost.search_ns,
                cost.busy_ns / 1e3,
                cost.idle_ns / 1e3,
            )
        });
        let array = |rows: Vec<String>| format!("[\n{}\n  ]", rows.join(",\n"));
        format!(
            "{{\"machine\": \"{}\",\n  \"simulated\": \"{CPUS} CPUs in four nodes; VMs of {VCPUS} \
             vCPUs; a barrier every {} us of \
             work; {} s of work for each vCPU\",\n  \"gangs\": {},\n  \"spanning\": {},\n  \
             \"balancing\": {}\n}}\n",
            machine(),
            WORK_NS / 1_000,
            WORK_PER_VCPU_NS / SECOND,
            array(gangs.collect()),
            array(spanning.collect()),
            array(balancing.collect()),
        )
    }
}

/// The machine of the timings, in words.
fn machine() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .unwrap_or("unknown");
    let model: String = model
        .trim_start_matches([' ', '\t', ':'])
        .chars()
        .filter(|c| !matches!(c, '"' | '\\'))
        .collect();
    format!("gangs: simulated; balancing: virtual machine with {cpus} CPUs, {model}")
}

fn scheduler(scheduler: Scheduler) -> &'static str {
    match scheduler {
        Scheduler::Gang => "gangs",
        Scheduler::Balance => "no gangs, VMs by virtual time",
        Scheduler::RoundRobin => "round robin on each CPU",
    }
}

fn spanning_scheduler(scheduler: spanning::Scheduler) -> &'static str {
    match scheduler {
        spanning::Scheduler::Windows => "windows in all cells",
        spanning::Scheduler::CellGangs => "gangs of each cell alone",
        spanning::Scheduler::RoundRobin => "round robin on each CPU",
    }
}

fn sleeper_scheduler(scheduler: sleepers::Scheduler) -> &'static str {
    match scheduler {
        sleepers::Scheduler::Linux => "ideal Linux",
        sleepers::Scheduler::Gangs => "gangs",
        sleepers::Scheduler::StrictGangs => "gangs, halts not counted",
    }
}

fn sleeper_wait(wait: sleepers::Wait) -> &'static str {
    match wait {
        sleepers::Wait::Spin => "spins",
        sleepers::Wait::Sleep => "sleeps",
    }
}

fn wait(wait: Wait) -> &'static str {
    match wait {
        Wait::Spin => "spin",
        Wait::SpinThenHalt => "halt after 50 us",
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.gangs.is_empty() {
            writeln!(
                f,
                "| scheduler | at a barrier | VMs | time, ms | times one VM | moves | switches |"
            )?;
            writeln!(f, "| --- | --- | --- | --- | --- | --- | --- |")?;
        }
        for row in &self.gangs {
            let mut cells = String::new();
            match row.run.zip(row.ratio) {
                Some((run, ratio)) => write!(
                    cells,
                    "{} | {ratio:.3} | {} | {}",
                    run.last_ns / MILLISECOND,
                    run.moves,
                    run.switches
                )?,
                None => cells.push_str("not done after 60 times the work | | |"),
            }
            writeln!(
                f,
                "| {} | {} | {} | {cells} |",
                scheduler(row.scheduler),
                wait(row.wait),
                row.vms
            )?;
        }
        if !self.spanning.is_empty() {
            writeln!(
                f,
                "\n| VMs that span cells | cells | VMs | time, ms | times one VM |"
            )?;
            writeln!(f, "| --- | --- | --- | --- | --- |")?;
        }
        for row in &self.spanning {
            let figures = match row.time.zip(row.ratio) {
                Some((time, ratio)) => format!("{} | {ratio:.3}", time / MILLISECOND),
                None => format!("not done after {} times the work |", spanning::LIMIT),
            };
            let name = spanning_scheduler(row.scheduler);
            writeln!(f, "| {name} | {} | {} | {figures} |", row.cells, row.vms)?;
        }
        if !self.sleepers.is_empty() {
            writeln!(
                f,
                "\n| VMs of two threads on two CPUs | scheduler | barriers of each in a second |"
            )?;
            writeln!(f, "| --- | --- | --- |")?;
        }
        for row in &self.sleepers {
            let waits = row
                .waits
                .iter()
                .map(|wait| sleeper_wait(*wait))
                .collect::<Vec<_>>();
            let figures = row
                .per_s
                .as_ref()
                .map_or("a rule was broken".to_owned(), |per_s| {
                    let figures = per_s.iter().map(|figure| format!("{figure:.0}"));
                    figures.collect::<Vec<_>>().join(", ")
                });
            let name = sleeper_scheduler(row.scheduler);
            writeln!(f, "| {} | {name} | {figures} |", waits.join(", "))?;
        }
        if !self.balancing.is_empty() {
            writeln!(
                f,
                "| CPUs | tree update, ns | region pass, ns | machine pass, ns | idle search, ns | \
                 busy CPU, us \
                 per s | idle CPU, us per s |"
            )?;
            writeln!(f, "| --- | --- | --- | --- | --- | --- | --- |")?;
        }
        for cost in &self.balancing {
            writeln!(
                f,
                "| {} | {:.0} | {:.0} | {:.0} | {:.0} | {:.1} | {:.1} |",
                cost.cpus,
                cost.update_ns,
                cost.region_ns,
                cost.machine_ns,
                cost.search_ns,
                cost.busy_ns / 1e3,
                cost.idle_ns / 1e3
            )?;
        }
        Ok(())
    }
}
