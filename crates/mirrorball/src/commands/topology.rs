//! `mirrorball topology` and `mirrorball knowledge`: what is known of the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use knowledge::{Base, Fact, Machine, draw, fact, rules};
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

/// What is asked.
#[derive(Debug, Subcommand)]
pub enum KnowledgeCommand {
    /// Ask a question in Datalog, as 'near(Host, 0, Node)' or 'big(N) <- memory_bytes(_, N, B), B > 1000000000'
    Query {
        /// The question
        question: String,
        /// As JSON: an array for each answer
        #[arg(long)]
        json: bool,
        /// A file of rules, beside the built-in ones
        #[arg(long, value_name = "FILE")]
        rules: Option<PathBuf>,
        #[command(flatten)]
        facts: FactsArgs,
    },
    /// Print the built-in rules
    Rules,
}

/// Draws the machine.
pub fn topology(args: &TopologyArgs) -> Result<ExitCode> {
    let base = base(&args.facts)?;
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

/// Answers a question.
pub fn knowledge(command: &KnowledgeCommand) -> Result<ExitCode> {
    let (question, json, more, facts) = match command {
        KnowledgeCommand::Query {
            question,
            json,
            rules,
            facts,
        } => (question, *json, rules, facts),
        KnowledgeCommand::Rules => {
            print!("{}", rules::BUILT_IN);
            return Ok(ExitCode::SUCCESS);
        }
    };
    let asked = rules::parse(question).map_err(|error| miette!("the question: {error}"))?;
    let [asked] = &asked[..] else {
        return Err(miette!(
            "{} questions; ask one at a time, and put rules into a file (--rules)",
            asked.len()
        ));
    };
    let mut known = rules::parse(rules::BUILT_IN).map_err(|error| miette!("the built-in rules: {error}"))?;
    if let Some(file) = more {
        let text = read(file)?;
        known.extend(rules::parse(&text).map_err(|error| miette!("{}: {error}", file.display()))?);
    }
    let answers = rules::ask(&base(facts)?, &known, asked).map_err(|error| miette!("{error}"))?;
    if json {
        let answers: Vec<Vec<serde_json::Value>> = answers.iter().map(values).collect();
        println!("{}", serde_json::to_string(&answers).into_diagnostic()?);
    } else {
        answers.iter().for_each(|fact| println!("{fact}"));
    }
    Ok(ExitCode::SUCCESS)
}

fn values(fact: &Fact) -> Vec<serde_json::Value> {
    let value = |term: &knowledge::Term| match term {
        knowledge::Term::Number(number) => (*number).into(),
        knowledge::Term::Text(text) => text.as_str().into(),
    };
    fact.terms.iter().map(value).collect()
}

fn base(args: &FactsArgs) -> Result<Base> {
    let mut base: Base = match &args.from {
        Some(file) => facts(file)?.into_iter().collect(),
        None => cell::topology::discover().into_iter().collect(),
    };
    if let Some(file) = &args.assert {
        base.learn(facts(file)?);
    }
    Ok(base)
}

fn facts(file: &Path) -> Result<Vec<Fact>> {
    fact::parse(&read(file)?).map_err(|error| miette!("{}: {error}", file.display()))
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).map_err(|error| miette!("could not read {}: {error}", file.display()))
}
