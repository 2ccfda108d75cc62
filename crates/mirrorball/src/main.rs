//! The `mirrorball` command: argument parsing and printing.

mod attach;
mod commands;
mod exit;
mod guest;
mod idempotency;
mod process;
mod progress;
mod remote;
mod subnet_gateway;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};
use commands::select::Selection;
use commands::{
    check, clients, clone, cluster, copy, disk, dsm, events, generate, heat, image, knowledge, lab as labs,
    list, mem, net, run, top, topology, update, vm,
};
use config::{Selector, Size};
use idempotency::RequestArgs;
use miette::{Result, miette};

#[derive(Debug, Parser)]
#[command(
    name = "mirrorball",
    version,
    about = "Runs Linux virtual machines that share what they can",
    after_help = "Exit status of run: 0 power-off, the command's own with a command, 1 bad input, 2 usage, \
                  70 panic, 71 triple fault, 72 KVM failed, 73 shard failed, 74 killed, 75 reboots too fast, \
                  124 a limit ran out, 125 the lab died."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run VMs: from files, or one from flags
    Run(Box<commands::flags::RunArgs>),
    /// List running VMs
    Ps {
        /// As JSON
        #[arg(long)]
        json: bool,
        /// Only those with this label: KEY or KEY=VALUE; given several times, those with all of them
        #[arg(long, value_name = "KEY[=VALUE]")]
        label: Vec<Selector>,
    },
    /// Attach to a VM's console; Ctrl-] leaves it
    Console {
        /// Name of the VM
        vm: String,
    },
    /// Run a program in a VM
    Exec {
        /// Name of the VM
        vm: String,
        /// Give the program no terminal
        #[arg(long, short = 'T')]
        no_tty: bool,
        /// Time limit for the guest's agent to answer, in seconds: 20 by default, more while the guest boots
        #[arg(long, value_name = "SECONDS")]
        wait: Option<u64>,
        /// Keep the program for a minute if the connection to it is lost, under this id
        #[arg(long, value_name = "ID", conflicts_with = "attach")]
        keep: Option<String>,
        /// Go on with the program that `--keep` keeps under this id
        #[arg(long, value_name = "ID", conflicts_with_all = ["no_tty", "command"])]
        attach: Option<String>,
        /// The program and its arguments
        #[arg(last = true, required_unless_present = "attach")]
        command: Vec<String>,
    },
    /// Copy a file into a VM or out of it
    Cp {
        /// FILE or VM:FILE
        source: String,
        /// VM:FILE or FILE
        target: String,
    },
    /// Press a VM's power button; kill it when it does not end in time
    Stop {
        #[command(flatten)]
        vms: Selection,
        /// Time limit for the guest, in seconds
        #[arg(long, default_value_t = 30)]
        limit: u64,
        #[command(flatten)]
        request: RequestArgs,
    },
    /// End a VM at once
    Kill {
        #[command(flatten)]
        vms: Selection,
        #[command(flatten)]
        request: RequestArgs,
    },
    /// Pause a VM until it is resumed, or one of its vCPUs for a moment
    Pause {
        #[command(flatten)]
        vms: Selection,
        /// Only this vCPU; again before the time is over, it renews it
        #[arg(long, value_name = "N")]
        vcpu: Option<u8>,
        /// Time after which the vCPU goes on by itself: 1ms to 100ms; 100ms when not given
        #[arg(long = "for", value_name = "TIME", requires = "vcpu", value_parser = clients::stop_length)]
        length: Option<u16>,
    },
    /// Resume a paused VM, or one of its vCPUs
    Resume {
        #[command(flatten)]
        vms: Selection,
        /// Only this vCPU, which `pause --vcpu` has stopped
        #[arg(long, value_name = "N")]
        vcpu: Option<u8>,
    },
    /// Start a VM again without a request to its guest, as by a machine's reset button
    Reset {
        #[command(flatten)]
        vms: Selection,
        #[command(flatten)]
        request: RequestArgs,
    },
    /// Send each vCPU of a VM a non-maskable interrupt
    Nmi {
        /// Name of the VM
        vm: String,
    },
    /// Wait until a VM runs, its agent answers, or it has ended
    Wait {
        #[command(flatten)]
        vms: Selection,
        /// State to wait for
        #[arg(long = "for", value_enum, default_value_t = clients::Awaited::End)]
        awaited: clients::Awaited,
        /// Seconds to wait at most; then the exit status is 124. Without it, as long as it takes
        #[arg(long, value_name = "SECONDS")]
        limit: Option<u64>,
    },
    /// Print the output of a VM's console
    Logs {
        /// Name of the VM
        vm: String,
        /// Print further output as it comes
        #[arg(long, short)]
        follow: bool,
    },
    /// Print a VM's record and counters, as JSON
    Inspect {
        /// Name of the VM
        vm: String,
    },
    /// Print the events of VMs and cells of this host, from now on or from a token
    Events(events::EventsArgs),
    /// Show the page-fault stalls of a VM with coherent memory, and its hottest pages
    Heat(heat::HeatArgs),
    /// Show the host memory that VMs use, and how much of it they share; or the pages of one VM by their use
    Mem {
        /// Names of VMs, with --explain
        #[arg(value_name = "VM", requires = "explain")]
        vms: Vec<String>,
        /// Show the pages of these VMs by their use in the guest and the reason why the host has memory for
        /// them
        #[arg(long, requires = "vms", conflicts_with = "watch")]
        explain: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
        /// Again every 2 s, until Ctrl-C; with --json a line each
        #[arg(long)]
        watch: bool,
    },
    /// Show the use of CPUs and memory by cells, VMs and vCPUs on a terminal, again and again; keys sort,
    /// filter, move vCPUs and limit CPUs
    Top(top::TopArgs),
    /// Make running copies of a running VM, which share its memory and disks until they write
    Clone(clone::CloneArgs),
    /// Write a running VM into a directory; it runs on
    Snapshot {
        /// Name of the VM
        vm: String,
        /// A directory that does not exist yet
        directory: PathBuf,
        #[command(flatten)]
        request: RequestArgs,
    },
    /// Start VMs that resume from a snapshot
    Restore(clone::RestoreArgs),
    /// Have a VM return memory to the host, or give it back to the VM
    Balloon {
        /// Name of the VM
        vm: String,
        /// Amount to return, as 256M; 0M for none
        size: Size,
    },
    /// Change a running VM's limits, pins and memory nodes
    Update(update::UpdateArgs),
    /// Move a vCPU to a CPU of the host, or, if its VM spans cells, to another of them; or a shared region's
    /// memory to that of a cell
    Move(clients::MoveArgs),
    /// Check VM files without starting anything
    Check {
        /// VM files
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Draw this machine: nodes, CPUs, caches, memory, distances, devices
    Topology(topology::TopologyArgs),
    /// Query the facts on this machine
    #[command(subcommand)]
    Knowledge(knowledge::KnowledgeCommand),
    /// Check whether this machine's KVM can run guests
    Probe,
    /// Several cells under one name space
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// VMs that are kept, and start when the cluster comes up
    #[command(subcommand)]
    Vm(vm::VmCommand),
    /// Networks of this user's VMs on this host: list, inspect, capture
    #[command(subcommand)]
    Net(net::NetCommand),
    /// Build, list and remove images
    #[command(subcommand)]
    Image(image::ImageCommand),
    /// Commit, compare, compact and check disks that no VM uses
    #[command(subcommand)]
    Disk(disk::DiskCommand),
    /// One memory for processes on several hosts
    #[command(subcommand)]
    Dsm(dsm::DsmCommand),
    /// Hosts in software, for machines without a usable KVM
    Lab(labs::LabArgs),
    /// Write shell completions, man pages and the reference of commands
    #[command(subcommand)]
    Generate(generate::GenerateCommand),
}

impl Command {
    /// Returns the id of `--request`.
    fn request(&self) -> Option<&str> {
        let request = match self {
            Self::Run(args) => return args.request.as_deref(),
            Self::Clone(args) => &args.request,
            Self::Restore(args) => &args.request,
            Self::Stop { request, .. }
            | Self::Kill { request, .. }
            | Self::Reset { request, .. }
            | Self::Snapshot { request, .. } => request,
            _ => return None,
        };
        request.id.as_deref()
    }

    /// Whether it may be given on another host of the cluster. Such a command acts on VMs, and
    /// opens files that it names by [`remote`].
    fn is_for_other_hosts(&self) -> bool {
        match self {
            Self::Run(_)
            | Self::Ps { .. }
            | Self::Console { .. }
            | Self::Exec { .. }
            | Self::Cp { .. }
            | Self::Stop { .. }
            | Self::Kill { .. }
            | Self::Pause { .. }
            | Self::Resume { .. }
            | Self::Reset { .. }
            | Self::Nmi { .. }
            | Self::Wait { .. }
            | Self::Logs { .. }
            | Self::Inspect { .. }
            | Self::Heat(_)
            | Self::Clone(_)
            | Self::Snapshot { .. }
            | Self::Restore(_)
            | Self::Balloon { .. }
            | Self::Update(_)
            | Self::Move(_) => true,
            Self::Cluster(command) => command.is_for_other_hosts(),
            Self::Events(_)
            | Self::Mem { .. }
            | Self::Top(_)
            | Self::Check { .. }
            | Self::Topology(_)
            | Self::Knowledge(_)
            | Self::Probe
            | Self::Vm(_)
            | Self::Net(_)
            | Self::Image(_)
            | Self::Disk(_)
            | Self::Dsm(_)
            | Self::Lab(_)
            | Self::Generate(_) => false,
        }
    }

    /// Refuses a command of another host that is not for other hosts.
    fn check_origin(&self) -> Result<()> {
        if remote::rules()?.is_none() || self.is_for_other_hosts() {
            return Ok(());
        }
        Err(remote::not_for_other_hosts())
    }

    /// Whether it only prints information.
    fn only_prints(&self) -> bool {
        matches!(
            self,
            Self::Ps { .. }
                | Self::Logs { .. }
                | Self::Inspect { .. }
                | Self::Events(_)
                | Self::Heat(_)
                | Self::Mem { .. }
                | Self::Check { .. }
                | Self::Topology(_)
                | Self::Knowledge(_)
                | Self::Probe
                | Self::Generate(_)
                | Self::Net(_)
        ) || matches!(self, Self::Vm(command) if command.only_prints())
            || matches!(self, Self::Cluster(command) if command.only_prints())
            || matches!(self, Self::Image(command) if command.only_prints())
            || matches!(self, Self::Disk(command) if command.only_prints())
            || matches!(self, Self::Dsm(command) if command.only_prints())
    }
}

fn main() -> ExitCode {
    agent::panic::ends_the_process();
    keep_one_arena();
    if !remote::is_for_another_host() {
        lab::take_over();
    }
    if let Some(served) = process::take_over() {
        return ended(served.map(|()| ExitCode::SUCCESS));
    }
    let command = command();
    if let Err(error) = command.check_origin() {
        return ended(Err(error));
    }
    if let Some(id) = command.request().filter(|_| idempotency::is_outermost()) {
        return ended(idempotency::run_once(id));
    }
    if command.only_prints() {
        end_quietly_with_the_reader();
    }
    ended(obey(command))
}

/// Parses the command line. A `run` waits for hours, so the memory for the description of all commands is
/// returned to the kernel: some 200 KiB of allocations, and 100 KiB of stack, by parsing on a separate
/// thread.
fn command() -> Command {
    let parsed = std::thread::Builder::new().spawn(|| Cli::parse().command);
    // A host without spare threads parses here.
    let command = match parsed.map(std::thread::JoinHandle::join) {
        Ok(Ok(command)) => command,
        Ok(Err(_)) | Err(_) => Cli::parse().command,
    };
    // SAFETY: makes the allocator release unused memory.
    unsafe { libc::malloc_trim(0) };
    command
}

fn ended(result: Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        complain(&error);
        ExitCode::from(exit::FAILED)
    })
}

/// Keeps the allocator from making an arena for each thread: every process here allocates too little to
/// justify arenas.
fn keep_one_arena() {
    // SAFETY: sets a number of the allocator's before any other thread exists.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Ends `mirrorball ps | head` like any tool, instead of failing to print.
fn end_quietly_with_the_reader() {
    // SAFETY: no other thread runs, and the default action needs no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Converts an operation's failure to a report.
fn failed(failure: operations::Failure) -> miette::Report {
    match failure.help {
        Some(help) => miette!(help = help, "{}", failure.what),
        None => miette!("{}", failure.what),
    }
}

/// Prints an error: with the text that it points into if it has one, else in one line with its help.
pub fn complain(error: &miette::Report) {
    if error.source_code().is_some() {
        eprintln!("{error:?}");
        return;
    }
    match error.help() {
        Some(help) => eprintln!("mirrorball: {error}; {help}"),
        None => eprintln!("mirrorball: {error}"),
    }
}

fn obey(command: Command) -> Result<ExitCode> {
    match command {
        Command::Run(args) => run::run(&args),
        Command::Ps { json, label } => list::ps(json, &label),
        Command::Console { vm } => clients::console(&vm),
        Command::Exec {
            vm,
            no_tty,
            wait,
            keep,
            attach,
            command,
        } => {
            let program = match &attach {
                Some(id) => clients::Program::Kept(id),
                None => clients::Program::New {
                    argv: &command,
                    has_terminal: !no_tty,
                    keep: keep.as_deref(),
                },
            };
            clients::exec(&vm, wait.map(Duration::from_secs), &program)
        }
        Command::Cp { source, target } => copy::cp(&source, &target),
        Command::Stop { vms, limit, .. } => {
            vms.each("stopped", |vm, folder| clients::stop(vm, folder, limit))
        }
        Command::Kill { vms, .. } => vms.each("killed", clients::kill),
        Command::Pause { vms, vcpu, length } => vms.each("paused", |name, folder| {
            clients::pause(name, folder, vcpu.map(|vcpu| (vcpu, length)))
        }),
        Command::Resume { vms, vcpu } => {
            vms.each("resumed", |name, folder| clients::resume(name, folder, vcpu))
        }
        Command::Reset { vms, .. } => vms.each("reset", clients::reset),
        Command::Nmi { vm } => clients::nmi(&vm),
        Command::Wait { vms, awaited, limit } => vms.each(awaited.done(), |vm, folder| {
            clients::wait(vm, folder, awaited, limit.unwrap_or(u64::MAX))
        }),
        Command::Logs { vm, follow } => clients::logs(&vm, follow),
        Command::Inspect { vm } => list::inspect(&vm),
        Command::Events(args) => events::events(&args),
        Command::Heat(args) => heat::heat(&args),
        Command::Mem {
            vms,
            explain: true,
            json,
            ..
        } => mem::explain(&vms, json),
        Command::Mem { json, watch, .. } => mem::mem(json, watch),
        Command::Top(args) => top::top(&args),
        Command::Clone(args) => clone::clone(&args),
        Command::Snapshot { vm, directory, .. } => clone::snapshot(&vm, &directory),
        Command::Restore(args) => clone::restore(&args),
        Command::Balloon { vm, size } => clients::balloon(&vm, size.0),
        Command::Update(args) => update::update(args),
        Command::Move(args) => clients::move_by(&args),
        Command::Check { files } => check::check(&files),
        Command::Topology(args) => topology::topology(&args),
        Command::Knowledge(command) => knowledge::knowledge(&command),
        Command::Probe => Ok(probe()),
        Command::Cluster(command) => cluster::cluster(&command),
        Command::Vm(command) => vm::vm(&command),
        Command::Image(command) => image::run(command),
        Command::Net(command) => net::run(&command).map(|()| ExitCode::SUCCESS),
        Command::Disk(command) => disk::run(command),
        Command::Dsm(command) => dsm::dsm(&command),
        Command::Lab(args) => Ok(labs::run(args)),
        Command::Generate(what) => generate::generate(&what, Cli::command()),
    }
}

fn probe() -> ExitCode {
    let verdict = shard::probe::probe();
    println!("{verdict}");
    match verdict {
        shard::probe::Verdict::Usable => ExitCode::SUCCESS,
        _ => ExitCode::from(exit::FAILED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_start_end_or_copy_vms_take_an_id_and_a_run_only_with_detach() {
        let request = |line: &str| {
            let words = std::iter::once("mirrorball").chain(line.split(' '));
            let parsed = Cli::try_parse_from(words);
            parsed.map(|cli| cli.command.request().map(str::to_owned))
        };
        for line in [
            "run --image tiny -d",
            "clone web",
            "snapshot web there",
            "restore there",
            "stop web",
            "kill web",
            "reset web",
        ] {
            assert_eq!(request(line).unwrap(), None);
            let asked = request(&format!("{line} --request k1")).unwrap();
            assert_eq!(asked.as_deref(), Some("k1"), "{line}");
        }
        assert!(request("run --image tiny --request k1").is_err());
        assert!(request("ps --request k1").is_err());
    }

    #[test]
    fn other_hosts_give_commands_on_vms_and_none_on_files_of_this_host() {
        let is_for_others = |line: &str| {
            let words = std::iter::once("mirrorball").chain(line.split(' '));
            let command = Cli::try_parse_from(words).unwrap().command;
            command.is_for_other_hosts()
        };
        for line in [
            "ps --json",
            "run --image tiny --cell 1",
            "cp a web:/b",
            "cluster cordon 1",
            "cluster take",
        ] {
            assert!(is_for_others(line), "{line}");
        }
        for line in [
            "disk rm old",
            "image ls",
            "vm define web.toml",
            "check web.toml",
            "cluster up",
            "cluster down",
            "probe",
            "mem",
        ] {
            assert!(!is_for_others(line), "{line}");
        }
    }

    #[test]
    fn only_commands_that_print_end_with_their_reader() {
        let only_prints = |line: &str| {
            let words = std::iter::once("mirrorball").chain(line.split(' '));
            Cli::try_parse_from(words).unwrap().command.only_prints()
        };
        for line in [
            "ps",
            "events --json",
            "heat big --json",
            "disk ls",
            "image ls",
            "vm ls",
            "cluster status",
            "dsm bench",
            "dsm litmus --seconds 60",
        ] {
            assert!(only_prints(line), "{line} fails to print into `head`");
        }
        // Other commands would die when their reader closes the pipe.
        for line in ["dsm serve", "cluster up", "disk rm old", "vm start web"] {
            assert!(!only_prints(line), "{line}");
        }
    }
}
