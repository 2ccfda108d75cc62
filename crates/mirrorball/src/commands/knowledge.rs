//! `mirrorball knowledge`: queries on the facts about the machine and the cells on it.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use cell::cluster::routes;
use clap::{Args, Subcommand};
use config::Size;
use hostinfo::known;
use knowledge::route::{Costs, Tree};
use knowledge::rules::{self, Rule};
use knowledge::ways::Ways;
use knowledge::{Base, Fact, Machine};
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client;
use registry::cluster::files::Files;
use serde::Serialize;

use super::place::in_lab;
use super::topology::FactsArgs;

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
    /// Tell in which cells a VM has room, the best ones first
    Place {
        /// Its vCPUs
        #[arg(long, default_value_t = 1)]
        cpus: u16,
        /// Its memory
        #[arg(long, default_value = "512M")]
        memory: Size,
        #[command(flatten)]
        facts: FactsArgs,
    },
    /// Show how a message from a cell reaches all others soonest, and when
    Route(RouteArgs),
    /// Print the built-in rules
    Rules,
}

/// A message to all.
#[derive(Debug, Args)]
pub struct RouteArgs {
    /// The cell that sends it
    cell: u16,
    /// Of a machine without a cluster: divided into so many cells, instead of one for each node
    #[arg(long)]
    cells: Option<u16>,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    facts: FactsArgs,
}

/// Runs a `knowledge` subcommand.
pub fn knowledge(command: &KnowledgeCommand) -> Result<ExitCode> {
    match command {
        KnowledgeCommand::Query {
            question,
            json,
            rules,
            facts,
        } => query(question, *json, rules.as_ref(), facts),
        KnowledgeCommand::Place { cpus, memory, facts } => place(*cpus, *memory, facts),
        KnowledgeCommand::Route(args) => route(args),
        KnowledgeCommand::Rules => {
            print!("{}", rules::BUILT_IN);
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Facts about the machine, the cells on it, and the messages between them. `vcpus` is the number of further
/// vCPUs that are to run there.
fn base(args: &FactsArgs, vcpus: u16) -> Result<Base> {
    let (mut base, recorded) = args.base()?;
    if recorded.is_none() {
        let files = Files::open().into_diagnostic()?;
        let mut cluster: Base = known::cluster(&files).into_diagnostic()?.into_iter().collect();
        // Cells that do not answer have no room.
        let status = client::status(&files).unwrap_or_default().unwrap_or_default();
        cluster.learn(known::room(&status, u32::from(vcpus)));
        // What is asserted counts more.
        cluster.learn(base.facts().cloned());
        base = cluster;
    }
    Ok(base)
}

fn query(question: &str, json: bool, more: Option<&PathBuf>, facts: &FactsArgs) -> Result<ExitCode> {
    let asked = rules::parse(question).map_err(|error| miette!("the question: {error}"))?;
    let [asked] = &asked[..] else {
        return Err(miette!(
            "{} questions; ask one at a time, and put rules into a file (--rules)",
            asked.len()
        ));
    };
    let mut known = built_in()?;
    if let Some(file) = more {
        let text = fs::read_to_string(file)
            .map_err(|error| miette!("could not read {}: {error}", file.display()))?;
        known.extend(rules::parse(&text).map_err(|error| miette!("{}: {error}", file.display()))?);
    }
    let answers = ask(base(facts, 0)?, &known, asked)?;
    if json {
        let answers: Vec<Vec<serde_json::Value>> = answers.iter().map(values).collect();
        println!("{}", serde_json::to_string(&answers).into_diagnostic()?);
    } else {
        answers.iter().for_each(|fact| println!("{fact}"));
    }
    Ok(ExitCode::SUCCESS)
}

fn built_in() -> Result<Vec<Rule>> {
    rules::parse(rules::BUILT_IN).map_err(|error| miette!("the built-in rules: {error}"))
}

fn ask(mut base: Base, rules: &[Rule], question: &Rule) -> Result<Vec<Fact>> {
    let ways = Ways::of(&base).facts();
    base.learn(ways);
    rules::ask(&base, rules, question).map_err(|error| miette!("{error}"))
}

fn values(fact: &Fact) -> Vec<serde_json::Value> {
    let value = |term: &knowledge::Term| match term {
        knowledge::Term::Number(number) => (*number).into(),
        knowledge::Term::Text(text) => text.as_str().into(),
    };
    fact.terms.iter().map(value).collect()
}

fn place(cpus: u16, memory: Size, facts: &FactsArgs) -> Result<ExitCode> {
    let mut base = base(facts, cpus)?;
    let bytes = i64::try_from(memory.0).into_diagnostic()?;
    base.learn([Fact::new("wants", [i64::from(cpus).into(), bytes.into()])]);
    if base.named("cell_runs").next().is_none() {
        if let Some(code) = in_lab()? {
            return Ok(code);
        }
        return Err(no_cells());
    }
    let question = rules::parse("q(Load, Cell) <- has_room(Cell, Load)").into_diagnostic()?;
    let answers = ask(base, &built_in()?, &question[0])?;
    if answers.is_empty() {
        return Err(miette!(
            help = "`mirrorball cluster status` shows what each has given out",
            "no cell has that much memory left"
        ));
    }
    println!("{:<5} {:>22}", "CELL", "VCPUS PER 100 CPUS");
    for answer in &answers {
        if let (Some(load), Some(cell)) = (answer.number(0), answer.number(1)) {
            println!("{cell:<5} {load:>22}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn no_cells() -> miette::Report {
    miette!(
        help = "start a cluster with `mirrorball cluster up`, or assert cell_runs(Cell) and the like",
        "no cells run here"
    )
}

/// How a message reaches one cell.
#[derive(Serialize)]
struct Arrival {
    cell: u16,
    /// The cell that sends the message to this cell; none for the first cell.
    from: Option<u16>,
    /// Number of hops from the first cell.
    depth: usize,
    tree_ns: u64,
    one_by_one_ns: u64,
}

fn route(args: &RouteArgs) -> Result<ExitCode> {
    let mut base = base(&args.facts, 0)?;
    if args.cells.is_some() || base.named("cell").next().is_none() {
        let machine = Machine::of(&base);
        let plans = known::division(&machine, args.cells)?;
        let host = machine.hosts.first().map_or("", |host| &host.name);
        let without = base
            .facts()
            .filter(|fact| !fact.name.starts_with("cell"))
            .cloned();
        base = without.collect();
        base.learn(known::cells(&plans, host, None));
    }
    let cells: Vec<u16> = Ways::of(&base).cells().collect();
    let Some(source) = cells.iter().position(|cell| *cell == args.cell) else {
        let all: Vec<usize> = cells.iter().map(|cell| usize::from(*cell)).collect();
        return Err(miette!(
            "there is no cell {}; the cells are {}",
            args.cell,
            config::cpulist::write(&all)
        ));
    };
    let arrivals = arrivals(&routes::Ways::of(&base).costs(&cells), &cells, source);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&arrivals).into_diagnostic()?);
        return Ok(ExitCode::SUCCESS);
    }
    println!("{:<14} {:>8} {:>14}", "CELL", "TREE, NS", "ONE BY ONE, NS");
    for arrival in &arrivals {
        let name = format!("{}{}", "  ".repeat(arrival.depth), arrival.cell);
        println!("{name:<14} {:>8} {:>14}", arrival.tree_ns, arrival.one_by_one_ns);
    }
    Ok(ExitCode::SUCCESS)
}

/// Each cell after the one that sends to it, in the order of sending.
fn arrivals(costs: &Costs, cells: &[u16], source: usize) -> Vec<Arrival> {
    let tree = Tree::best(costs, source);
    let by_tree = tree.arrivals_ns(costs, source);
    let one_by_one = Tree::unicast(costs, source).arrivals_ns(costs, source);
    let mut arrivals = Vec::new();
    let mut next = vec![(source, None, 0)];
    while let Some((at, from, depth)) = next.pop() {
        arrivals.push(Arrival {
            cell: cells[at],
            from,
            depth,
            tree_ns: by_tree[at],
            one_by_one_ns: one_by_one[at],
        });
        let children = tree.children[at].iter().rev();
        next.extend(children.map(|child| (*child, Some(cells[at]), depth + 1)));
    }
    arrivals
}
