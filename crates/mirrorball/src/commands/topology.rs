//! `mirrorball topology`: shows the facts about the machine, measured and drawn.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use hostinfo::facts;
use knowledge::{Base, Fact, Machine, draw};
use miette::{IntoDiagnostic, Result, miette};
use serde_json::Value;

/// Sources of the facts.
#[derive(Debug, Args)]
pub struct FactsArgs {
    /// Of a recorded machine, from a file made by `topology --facts`, instead of this one
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Facts that add to those found, or correct them
    #[arg(long, value_name = "FILE")]
    assert: Option<PathBuf>,
}

/// Output formats.
#[derive(Debug, Args)]
pub struct TopologyArgs {
    #[command(flatten)]
    facts: FactsArgs,
    /// Measure messages between CPUs first, 2 s at most, and keep the result until this machine restarts
    #[arg(long, conflicts_with = "from")]
    measure: bool,
    /// As JSON
    #[arg(long, group = "form")]
    json: bool,
    /// As a graph for Graphviz (`dot`)
    #[arg(long, group = "form")]
    dot: bool,
    /// As a picture
    #[arg(long, group = "form")]
    svg: bool,
    /// As the list of facts it is drawn from
    #[arg(long = "facts", group = "form")]
    as_facts: bool,
}

/// Shows the machine.
pub fn topology(args: &TopologyArgs) -> Result<ExitCode> {
    if args.measure {
        facts::measure(false).map_err(|error| {
            miette!(
                help = "its runtime directory must be writable",
                "could not measure this machine: {error}"
            )
        })?;
    }
    let (base, from) = args.facts.base()?;
    let in_lab = from.is_none() && lab::auto::inside();
    if let Some(note) = note(in_lab).filter(|_| !args.json) {
        eprintln!("{note}");
    }
    if args.as_facts {
        base.facts().for_each(|fact| println!("{fact}"));
        return Ok(ExitCode::SUCCESS);
    }
    let machine = Machine::of(&base);
    if args.json {
        let machine = as_json(&machine, in_lab).into_diagnostic()?;
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

/// Formats the machine, and whether it is a lab's host.
fn as_json(machine: &Machine, in_lab: bool) -> serde_json::Result<Value> {
    let mut value = serde_json::to_value(machine)?;
    value["lab"] = in_lab.into();
    Ok(value)
}

/// Note for people that the machine is a lab's host.
fn note(in_lab: bool) -> Option<&'static str> {
    in_lab.then_some("mirrorball: this is a lab's host, not the machine that runs the lab")
}

impl FactsArgs {
    /// Returns the facts about the machine, and its file if it is not this machine.
    pub fn base(&self) -> Result<(Base, Option<&Path>)> {
        let mut base: Base = match &self.from {
            Some(file) => read(file)?.into_iter().collect(),
            None => facts::host().map_err(|error| miette!("{error}"))?,
        };
        if let Some(file) = &self.assert {
            base.learn(read(file)?);
        }
        Ok((base, self.from.as_deref()))
    }
}

fn read(file: &Path) -> Result<Vec<Fact>> {
    facts::read(file).map_err(|error| miette!("{error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_labs_host_is_marked_for_people_and_programs() {
        let machine = Machine::default();
        for in_lab in [false, true] {
            let value = as_json(&machine, in_lab).unwrap();
            assert_eq!(value["lab"], in_lab);
            assert!(value["hosts"].is_array());
        }
        assert_eq!(note(false), None);
        assert!(note(true).is_some_and(|note| note.contains("lab's host") && !note.contains('\n')));
    }
}
