//! `mirrorball topology`: what is known of the machine, measured and drawn.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cell::known;
use clap::Args;
use knowledge::{Base, Fact, Machine, draw};
use miette::{IntoDiagnostic, Result, miette};

/// Where the facts come from.
#[derive(Debug, Args)]
pub struct FactsArgs {
    /// Of a recorded machine, from a file made by `topology --facts`, instead of this one
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Facts that add to those found, or correct them
    #[arg(long, value_name = "FILE")]
    assert: Option<PathBuf>,
}

/// How the machine is drawn.
#[derive(Debug, Args)]
pub struct TopologyArgs {
    #[command(flatten)]
    facts: FactsArgs,
    /// Measure messages between CPUs first, 2 s at most, and keep what comes of it until this machine starts again
    #[arg(long, conflicts_with = "from")]
    measure: bool,
    /// As JSON
    #[arg(long, group = "form")]
    json: bool,
    /// For Graphviz
    #[arg(long, group = "form")]
    dot: bool,
    /// As a picture
    #[arg(long, group = "form")]
    svg: bool,
    /// As the list of facts it is drawn from
    #[arg(long = "facts", group = "form")]
    as_facts: bool,
}

/// Draws the machine.
pub fn topology(args: &TopologyArgs) -> Result<ExitCode> {
    if args.measure {
        known::measure(false).map_err(|error| miette!("could not measure this machine: {error}"))?;
    }
    let (base, _) = args.facts.base()?;
    if args.as_facts {
        base.facts().for_each(|fact| println!("{fact}"));
        return Ok(ExitCode::SUCCESS);
    }
    let machine = Machine::of(&base);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&machine).into_diagnostic()?);
    } else if args.dot {
        print!("{}", draw::dot(&machine));
    } else if args.svg {
        print!("{}", draw::svg(&machine));
    } else {
        print!("{}", draw::text(&machine));
    }
    Ok(ExitCode::SUCCESS)
}

impl FactsArgs {
    /// What is known of the machine, and which one it is if it is not this one.
    pub fn base(&self) -> Result<(Base, Option<&Path>)> {
        let mut base: Base = match &self.from {
            Some(file) => read(file)?.into_iter().collect(),
            None => known::host().map_err(|error| miette!("{error}"))?,
        };
        if let Some(file) = &self.assert {
            base.learn(read(file)?);
        }
        Ok((base, self.from.as_deref()))
    }
}

fn read(file: &Path) -> Result<Vec<Fact>> {
    known::read(file).map_err(|error| miette!("{error}"))
}
