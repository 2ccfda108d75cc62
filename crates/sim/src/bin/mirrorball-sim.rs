//! `mirrorball-sim`: runs stories of clusters, and measures the time that VMs waited for their places.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use config::ConfigError;
use knowledge::Base;
use knowledge::fact::{self, FactError};
use knowledge::route::Revocation;
use sim::adoption;
use sim::machine::Cells;
use sim::scheduling::report as scheduling_report;
use sim::story::{Plot, run_story};
use sim::trace::Violation;

#[derive(Debug, Parser)]
#[command(
    name = "mirrorball-sim",
    version,
    about = "Simulates clusters of cells, from seeds"
)]
struct Cli {
    /// Machines, as `mirrorball topology --facts` writes them
    #[arg(required_unless_present_any = ["protocols", "adoptions", "gangs", "balancing"])]
    machines: Vec<PathBuf>,
    /// Cells; one for each node when absent
    #[arg(long)]
    cells: Option<u16>,
    /// Instead, this many stories of the table that all cells have, alone, from --seed on
    #[arg(long)]
    protocols: Option<u64>,
    /// Instead, this many stories of the VMs of one cell, whose processes die, hang and are replaced, from
    /// --seed on
    #[arg(long)]
    adoptions: Option<u64>,
    /// Instead, 1, 4 and 8 VMs on 32 CPUs with gang scheduling and without, and VMs that span cells
    #[arg(long)]
    gangs: bool,
    /// Instead, the real time that balancing of CPUs takes, for 8 to 1,024 CPUs
    #[arg(long)]
    balancing: bool,
    /// With --gangs, --balancing or both: write the figures to this file, too
    #[arg(long)]
    json: Option<PathBuf>,
    /// Hosts that share the cells
    #[arg(long, default_value_t = 1)]
    hosts: u16,
    /// The cells borrow memory by themselves
    #[arg(long)]
    borrow: bool,
    /// Only this story
    #[arg(long)]
    seed: Option<u64>,
    /// Instead of stories, the time until all cells have received a change, for 2 cells, 4, and so on
    #[arg(long)]
    revocation: bool,
    /// Seconds for the stories of each machine
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

fn main() -> ExitCode {
    match obey(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mirrorball-sim: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The reason why a run of the program fails.
#[derive(Debug, thiserror::Error)]
enum SimError {
    #[error("{path}: {error}")]
    Read { path: String, error: std::io::Error },
    #[error("{path}: {error}; help: name a file in a directory that exists and may be written")]
    Write { path: String, error: std::io::Error },
    #[error("{path}: {error}")]
    Facts { path: String, error: FactError },
    #[error("{machine}: {error}")]
    Cells { machine: String, error: ConfigError },
    #[error("{violation}\nagreement: run it again with --protocols 1 --seed {seed}")]
    Agreement {
        violation: protocol::agreement::stories::Violation,
        seed: u64,
    },
    #[error("{violation}\nadoption: run it again with --adoptions 1 --seed {seed}")]
    Adoption { violation: Violation, seed: u64 },
    #[error("{violation}\n{machine}: seed {seed}: run it again with --seed {seed}")]
    Machine {
        machine: String,
        violation: Violation,
        seed: u64,
    },
}

fn obey(cli: &Cli) -> Result<(), SimError> {
    if let Some(count) = cli.protocols {
        return protocols(cli.seed.unwrap_or(0), count);
    }
    if let Some(count) = cli.adoptions {
        return adoptions(cli.seed.unwrap_or(0), count);
    }
    if cli.gangs || cli.balancing {
        let report = scheduling_report::Report::measure(cli.gangs, cli.balancing, cli.seed.unwrap_or(1));
        print!("{report}");
        let write = |path: &PathBuf| {
            std::fs::write(path, report.json()).map_err(|error| SimError::Write {
                path: path.display().to_string(),
                error,
            })
        };
        return cli.json.as_ref().map_or(Ok(()), write);
    }
    if cli.revocation {
        println!("| machine | cells | broadcast, us | one by one | tree | tree that gathers receipts |");
        println!("| --- | --- | --- | --- | --- | --- |");
    } else {
        println!(
            "| machine | cells | stories | deaths | messages | place, us: median | 99% | one by one | 99% |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    }
    for file in &cli.machines {
        let name = file
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let path = || file.display().to_string();
        let text = std::fs::read_to_string(file).map_err(|error| SimError::Read { path: path(), error })?;
        let facts = fact::parse(&text).map_err(|error| SimError::Facts { path: path(), error })?;
        let base: Base = facts.into_iter().collect();
        let cells = Cells::of(&base, cli.cells).map_err(|error| SimError::Cells {
            machine: name.clone(),
            error,
        })?;
        if cli.revocation {
            revocation(&name, &cells);
        } else {
            let cells = cells.on_hosts(cli.hosts);
            let cells = if cli.borrow { cells.that_borrow() } else { cells };
            machine(cli, &name, &cells)?;
        }
    }
    Ok(())
}

/// Runs stories of the table that all cells have.
fn protocols(first: u64, count: u64) -> Result<(), SimError> {
    let begin = Instant::now();
    for seed in first..first.saturating_add(count) {
        protocol::agreement::stories::tell(seed)
            .map_err(|violation| SimError::Agreement { violation, seed })?;
    }
    println!(
        "agreement: {count} stories in {:.0} s",
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Runs stories of the VMs of one cell.
fn adoptions(first: u64, count: u64) -> Result<(), SimError> {
    let begin = Instant::now();
    let mut all = adoption::Counts::default();
    for seed in first..first.saturating_add(count) {
        for plot in [
            &adoption::story::Plot::ROUGH,
            &adoption::story::Plot::QUICK,
            &adoption::story::Plot::POISON,
        ] {
            let counts = adoption::story::run_story(plot, seed, None)
                .map_err(|violation| SimError::Adoption { violation, seed })?;
            all.add(&counts);
        }
    }
    println!(
        "adoption: {} stories in {:.0} s: {} adoptions, {} by monitors, {} deaths of the cell's process, \
         {} upgrades, {} of them undone, {} VMs set aside",
        3 * count,
        begin.elapsed().as_secs_f64(),
        all.adoptions,
        all.monitors,
        all.cell_deaths,
        all.upgrades + all.failed_upgrades,
        all.failed_upgrades,
        all.set_aside,
    );
    Ok(())
}

fn machine(cli: &Cli, name: &str, cells: &Cells) -> Result<(), SimError> {
    let failed = |seed| {
        move |violation| SimError::Machine {
            machine: name.to_owned(),
            violation,
            seed,
        }
    };
    // The times of places in a run without faults.
    let waits_us = |cells: &Cells| {
        let calm = run_story(cells, &Plot::CALM, 1).map_err(failed(1))?;
        let mut waits = calm.waits_ns;
        waits.sort_unstable();
        let us = |permille: usize| {
            waits
                .get(waits.len() * permille / 1000)
                .map_or(0.0, |ns| *ns as f64 / 1e3)
        };
        Ok::<_, SimError>([us(500), us(990)])
    };
    let [median, most] = waits_us(cells)?;
    let mut one_by_one = cells.clone();
    one_by_one.known = one_by_one.known.one_by_one();
    let [median_one, most_one] = waits_us(&one_by_one)?;
    let end = Instant::now() + Duration::from_secs(cli.seconds);
    let (mut stories, mut deaths, mut messages) = (0_u64, 0, 0);
    for seed in cli.seed.unwrap_or(0).. {
        let counts = run_story(cells, &Plot::ROUGH, seed).map_err(failed(seed))?;
        stories += 1;
        deaths += counts.deaths;
        messages += counts.messages;
        if cli.seed.is_some() || Instant::now() > end {
            break;
        }
    }
    println!(
        "| {name} | {} | {stories} | {deaths} | {messages} | {median:.1} | {most:.1} | \
         {median_one:.1} | {most_one:.1} |",
        cells.plans.len(),
    );
    Ok(())
}

/// Prints the costs for the first two cells, four, and so on.
fn revocation(name: &str, cells: &Cells) {
    let all: Vec<u16> = cells.plans.iter().map(|plan| plan.number).collect();
    let doubled = std::iter::successors(Some(2), |count| Some(count * 2));
    for count in doubled.take_while(|count| *count <= all.len()) {
        let costs = cells.ways.costs(&all[..count]);
        let Revocation {
            broadcast_ns,
            unicast_ns,
            multicast_ns,
            gathered_ns,
        } = Revocation::of(&costs, 0);
        let [broadcast, unicast, multicast, gathered] =
            [broadcast_ns, unicast_ns, multicast_ns, gathered_ns].map(|ns| ns as f64 / 1e3);
        println!("| {name} | {count} | {broadcast:.1} | {unicast:.1} | {multicast:.1} | {gathered:.1} |");
    }
}
