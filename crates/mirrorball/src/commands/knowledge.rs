//! `mirrorball knowledge`: queries on the facts about the machine and the cells on it.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use cell::cluster::routes;
use clap::{Args, Subcommand};
use config::Size;
use hostinfo::{capacity, facts};
use knowledge::route::Tree;
use knowledge::route_costs::RouteCosts;
use knowledge::rules::{self, Rule};
use knowledge::{Base, Fact, Machine};
use miette::{IntoDiagnostic, Result, miette};
use policy::placement::{Candidate, Verdict, Want, rank, refusals};
use registry::cluster::client;
use registry::cluster::files::Files;
use serde::Serialize;

use super::execution_site::in_lab;
use super::topology::FactsArgs;

/// Subcommands of `mirrorball knowledge`.
#[derive(Debug, Subcommand)]
pub enum KnowledgeCommand {
    /// Evaluate a query in Datalog, as 'near(Host, 0, Node)' or 'big(N) <- memory_bytes(_, N, B), B >
    /// 1000000000'
    Query {
        /// The query
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
    /// Show where `run` would place a VM: all cells, the best first, each with the reason
    Place {
        /// Number of vCPUs
        #[arg(long, default_value_t = 1)]
        cpus: u16,
        /// Memory of the VM
        #[arg(long, default_value = "512M")]
        memory: Size,
        /// As JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        facts: FactsArgs,
    },
    /// Show how a message from a cell reaches all others soonest, and when
    Route(RouteArgs),
    /// Print the built-in rules
    Rules,
}

/// Arguments of `route`.
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
        KnowledgeCommand::Place {
            cpus,
            memory,
            json,
            facts,
        } => place(*cpus, *memory, *json, facts),
        KnowledgeCommand::Route(args) => route(args),
        KnowledgeCommand::Rules => {
            print!("{}", rules::BUILT_IN);
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Facts about the machine, its cells, and their free resources.
fn base(args: &FactsArgs) -> Result<Base> {
    let (mut base, recorded) = args.base()?;
    if recorded.is_none() {
        let files = Files::open().into_diagnostic()?;
        let mut cluster: Base = facts::cluster(&files).into_diagnostic()?.into_iter().collect();
        // Asserted facts take precedence.
        cluster.learn(base.facts().cloned());
        base = cluster;
        let plan = files.plan().into_diagnostic()?;
        if !plan.is_empty() {
            // Cells that do not reply have no free resources.
            let status = client::status(&files).unwrap_or_default().unwrap_or_default();
            let is_here = |number| plan.iter().any(|cell| cell.number == number);
            base = capacity::merge(&base, capacity::of_status(&status, is_here));
        }
    }
    Ok(base)
}

fn query(question: &str, json: bool, more: Option<&PathBuf>, facts: &FactsArgs) -> Result<ExitCode> {
    let asked = rules::parse(question).map_err(|error| miette!("the query: {error}"))?;
    let [asked] = &asked[..] else {
        return Err(miette!(
            "{} queries; give one at a time, and put rules into a file (--rules)",
            asked.len()
        ));
    };
    let mut known = built_in()?;
    if let Some(file) = more {
        let text = fs::read_to_string(file)
            .map_err(|error| miette!("could not read {}: {error}", file.display()))?;
        known.extend(rules::parse(&text).map_err(|error| miette!("{}: {error}", file.display()))?);
    }
    let answers = ask(base(facts)?, &known, asked)?;
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
    let costs = RouteCosts::of(&base).facts();
    base.learn(costs);
    let conclusions = capacity::conclusions(&base);
    base.learn(conclusions);
    rules::ask(&base, rules, question).map_err(|error| miette!("{error}"))
}

fn values(fact: &Fact) -> Vec<serde_json::Value> {
    let value = |term: &knowledge::Term| match term {
        knowledge::Term::Number(number) => (*number).into(),
        knowledge::Term::Text(text) => text.as_str().into(),
    };
    fact.terms.iter().map(value).collect()
}

fn place(cpus: u16, memory: Size, json: bool, facts: &FactsArgs) -> Result<ExitCode> {
    let rooms = capacity::of_facts(&base(facts)?);
    if rooms.is_empty() {
        if let Some(code) = in_lab()? {
            return Ok(code);
        }
        return Err(no_cells());
    }
    let want = Want {
        vcpus: u32::from(cpus),
        memory_bytes: memory.0,
    };
    let ranked: Vec<Ranked> = rank(&rooms, want).iter().map(Ranked::of).collect();
    if json {
        println!("{}", serde_json::to_string_pretty(&ranked).into_diagnostic()?);
    } else if ranked.iter().any(|cell| cell.has_room) {
        println!("{:<5} {:>10} WITH THE VM, THE CELL", "CELL", "FREE MIB");
        for cell in &ranked {
            let note = if cell.here { "" } else { ", on another host" };
            println!(
                "{:<5} {:>10} {}{note}",
                cell.cell,
                cell.free_bytes >> 20,
                cell.why
            );
        }
    }
    if ranked.iter().any(|cell| cell.has_room) {
        return Ok(ExitCode::SUCCESS);
    }
    Err(miette!(
        help = "`mirrorball cluster status` shows what each has given out",
        "no cell has {memory} for it: {}",
        refusals(&rooms, want)
    ))
}

/// A cell in the ranking of `run`.
#[derive(Serialize)]
struct Ranked {
    cell: u16,
    has_room: bool,
    here: bool,
    cpus: u32,
    vcpus: u32,
    free_bytes: u64,
    why: String,
}

impl Ranked {
    fn of(candidate: &Candidate) -> Self {
        let room = candidate.room;
        Self {
            cell: room.cell,
            has_room: matches!(candidate.verdict, Verdict::Fits { .. }),
            here: room.is_here,
            cpus: room.cpus,
            vcpus: room.vcpus,
            free_bytes: room.free_bytes,
            why: candidate.verdict.to_string(),
        }
    }
}

fn no_cells() -> miette::Report {
    miette!(
        help = "start a cluster with `mirrorball cluster up`, or assert facts such as cell_runs(Cell)",
        "no cells run here"
    )
}

/// Arrival of a message at one cell.
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
    let mut base = base(&args.facts)?;
    if args.cells.is_some() || base.named("cell").next().is_none() {
        let machine = Machine::of(&base);
        let plans = facts::division(&machine, args.cells)?;
        let host = machine.hosts.first().map_or("", |host| &host.name);
        let without = base
            .facts()
            .filter(|fact| !fact.name.starts_with("cell"))
            .cloned();
        base = without.collect();
        base.learn(facts::cells(&plans, host, None));
    }
    let cells: Vec<u16> = RouteCosts::of(&base).cells().collect();
    if !cells.contains(&args.cell) {
        let all: Vec<usize> = cells.iter().map(|cell| usize::from(*cell)).collect();
        return Err(miette!(
            "there is no cell {}; the cells are {}",
            args.cell,
            config::cpulist::write(&all)
        ));
    }
    let others = cells.iter().copied().filter(|cell| *cell != args.cell);
    let cells: Vec<u16> = [args.cell].into_iter().chain(others).collect();
    let arrivals = arrivals(&routes::MulticastRoutes::of(&base), &cells);
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

/// Returns each cell after the one that sends to it, in the order of sending. The first cell is the source.
fn arrivals(costs: &routes::MulticastRoutes, cells: &[u16]) -> Vec<Arrival> {
    let (tree, costs) = costs.tree(cells);
    let by_tree = tree.arrivals_ns(&costs, 0);
    let one_by_one = Tree::unicast(&costs, 0).arrivals_ns(&costs, 0);
    let mut arrivals = Vec::new();
    let mut next = vec![(0, None, 0)];
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
