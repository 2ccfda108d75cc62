//! `mirrorball dsm`: one memory for processes on several hosts: other nodes, benchmarks, memory-order tests.

mod bench;
mod kernels;
mod litmus;
mod nodes;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use dsm::{End, Node, Polls, Settings};
use dsm_bench::{Peer, Security, StreamOptions};
use miette::{Result, miette};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Subcommands of `mirrorball dsm`.
#[derive(Debug, Subcommand)]
pub enum DsmCommand {
    /// Be a node of a shared memory, for one `dsm bench` or `dsm litmus` that names this host
    Serve(ServeArgs),
    /// Measure the shared memory, between processes on this host or with other hosts
    Bench(bench::BenchArgs),
    /// Look for outcomes that x86's memory order forbids, between threads of different nodes
    Litmus(litmus::LitmusArgs),
}

/// A node that waits for node 0.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Where to listen, as 0.0.0.0:7000
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: String,
    #[command(flatten)]
    host: HostArgs,
    /// End with the process that started this one
    #[arg(long, hide = true)]
    with_parent: bool,
}

/// Polling mode of page servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Poll {
    /// For a while after any request was served
    #[default]
    Always,
    /// While a thread waits for a page, as for a VM with one vCPU on each node
    Waiting,
    /// Not at all: where nodes share CPUs
    Never,
}

impl From<Poll> for Polls {
    fn from(poll: Poll) -> Self {
        match poll {
            Poll::Always => Self::Always,
            Poll::Waiting => Self::Waiting(1),
            Poll::Never => Self::Never,
        }
    }
}

/// Use of the host by a node.
#[derive(Clone, Debug, Args)]
pub struct HostArgs {
    /// Run on these CPUs only, as 0,2
    #[arg(long, value_name = "CPUS", value_delimiter = ',')]
    cpus: Vec<usize>,
    /// Serve faults at ordinary priority
    #[arg(long)]
    no_realtime: bool,
    /// When to poll before sleeping, if there is nothing to serve
    #[arg(long, value_enum, default_value_t)]
    poll: Poll,
    /// Fetch no pages before a thread wants them
    #[arg(long)]
    no_ahead: bool,
    /// A file of memory that all nodes see, of this host or of a device that several have; then only wake-ups
    /// go by the network
    #[arg(long, value_name = "FILE")]
    shared_memory: Option<PathBuf>,
    /// The keys of a cluster (`mirrorball cluster keys`): everything between nodes is encrypted
    #[arg(long, value_name = "FOLDER", requires = "name")]
    keys: Option<PathBuf>,
    /// This host's name on its key
    #[arg(long, requires = "keys")]
    name: Option<String>,
}

impl DsmCommand {
    /// Whether only its reader needs it. A command that sends to other nodes needs errors instead of signals.
    pub fn only_prints(&self) -> bool {
        matches!(self, Self::Bench(_) | Self::Litmus(_))
    }
}

/// Runs a subcommand.
pub fn dsm(command: &DsmCommand) -> Result<ExitCode> {
    match command {
        DsmCommand::Serve(args) => serve(args),
        DsmCommand::Bench(args) => bench::bench(args),
        DsmCommand::Litmus(args) => litmus::litmus(args),
    }
}

fn serve(args: &ServeArgs) -> Result<ExitCode> {
    if args.with_parent {
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
            .map_err(|error| miette!("{error}"))?;
    }
    args.host.keep_to_cpus()?;
    let security = args.host.security()?;
    let options = args.host.options(&security);
    let listener = dsm_bench::listen(&args.listen).map_err(|error| miette!("{error}"))?;
    let address = listener.local_addr().map_err(|error| miette!("{error}"))?;
    println!("{address}");
    dsm_bench::serve(&listener, options, &args.host.settings(), lost, print_notes)
        .map_err(|error| miette!("{error}"))?;
    Ok(ExitCode::SUCCESS)
}

impl HostArgs {
    /// Restricts this process to its CPUs, future threads included.
    fn keep_to_cpus(&self) -> Result<()> {
        if self.cpus.is_empty() {
            return Ok(());
        }
        let mut set = CpuSet::new();
        for cpu in &self.cpus {
            set.set(*cpu)
                .map_err(|_| miette!("--cpus {cpu}: no such CPU; name some of this host's"))?;
        }
        sched_setaffinity(Pid::from_raw(0), &set).map_err(|_| {
            miette!(
                "--cpus {:?}: this host lets us use none of them; name some of its CPUs",
                self.cpus
            )
        })
    }

    fn settings(&self) -> Settings {
        Settings {
            cpus: self.cpus.clone(),
            realtime: !self.no_realtime,
            enough_ns: None,
            polls: self.poll.into(),
            ahead: !self.no_ahead,
            ..Settings::default()
        }
    }

    fn options<'a>(&'a self, security: &'a Security) -> StreamOptions<'a> {
        StreamOptions {
            security,
            memory: self.shared_memory.as_deref(),
        }
    }

    fn security(&self) -> Result<Security> {
        match (&self.keys, &self.name) {
            (Some(keys), Some(name)) => {
                let identity = urpc::tls::Identity::load(keys, name).map_err(|error| miette!("{error}"))?;
                Ok(Security::Tls(Box::new(identity)))
            }
            _ => Ok(Security::Plain),
        }
    }
}

/// Handles the loss of a node: threads wait for its pages, so only ending is left.
fn lost(end: &End) {
    eprintln!("mirrorball: {end}");
    // The page server that detected the loss reports it to the other nodes; no thread needs to be joined.
    std::process::exit(i32::from(crate::exit::FAILED));
}

fn print_notes(node: &Node) {
    for note in node.notes() {
        eprintln!("mirrorball: node {}: {note}", node.me());
    }
}

fn peers(texts: &[String]) -> Result<Vec<Peer>> {
    texts
        .iter()
        .map(|text| text.parse().map_err(|error| miette!("--peers: {error}")))
        .collect()
}
