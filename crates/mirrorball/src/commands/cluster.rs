//! `mirrorball cluster`: starts, shows and ends the cells of this host.

mod change;
mod cordon;
mod fail;
mod foreground;
mod forget;
mod invite;
mod join;
mod keys;
mod leave;
mod notify;
mod upgrade;
mod users;
mod vcpus;

use std::fs::OpenOptions;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use cell::cluster::hosts::{Hosts, warning};
use cell::cluster::membership;
use clap::{Args, Subcommand};
use config::Size;
use config::cluster::{CellPlan, ClusterSpec, ETCD_KEYS, HostNodes, OnLost, Site, UserPlan};
use config::cpulist;
use hostfiles::passwd;
use hostinfo::facts;
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client::{self, Connection};
use registry::cluster::files::Files;
use registry::cluster::interface::{
    CellRequest, CellResponse, CellStatus, LentMemory, SHARD_SEPARATOR, Status,
};
use registry::vms::{self, Record, Registry};
use urpc::tls::Identity;

use super::execution_site::{LabChoice, RequiredIsolation, enter_lab, in_lab};
use super::vm;

/// Time limit for all cells to start and link to all others.
const UP_LIMIT: Duration = Duration::from_secs(20);
/// As [`UP_LIMIT`], for several hosts: etcd may still be starting.
const UP_LIMIT_HOSTS: Duration = Duration::from_secs(60);
/// Time limit for the cells to end.
const DOWN_LIMIT: Duration = Duration::from_secs(10);
/// Poll interval for the cells' state.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Start the cells: as a file says, or one for each NUMA node of this host
    Up {
        /// The cluster file
        file: Option<PathBuf>,
        /// This many, instead of a file
        #[arg(long, conflicts_with = "file")]
        cells: Option<u16>,
        /// Which of the file's hosts this is, when not the one that has its host name
        #[arg(long, requires = "file")]
        host: Option<String>,
        /// Stay until the cluster is down, for a service manager; SIGTERM ends the cells, and VMs run on
        #[arg(long)]
        foreground: bool,
        /// Whether to run in the lab
        #[arg(long, value_enum, default_value = "auto")]
        lab: LabChoice,
    },
    /// Make the keys of a cluster of several hosts; each host needs its own and authority.pem
    Keys {
        /// The cluster file, which says where they go
        file: PathBuf,
        /// Make new keys for all hosts and etcd, by the same authority; each is valid for a year
        #[arg(long)]
        renew: bool,
    },
    /// Remove a host: revoke its keys, and have all other hosts end their links to it
    Remove {
        /// The cluster file, which says where the keys are
        file: PathBuf,
        /// The host
        host: String,
    },
    /// Show the cells, what they have and what runs there
    Status {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the vCPUs of the VMs in this host's cells: where each is, and how long it has run
    Vcpus {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Lend memory of one cell to another one of the same host
    Lend(Loan),
    /// Have back what was lent, as far as no VM uses it
    Reclaim(Loan),
    /// Have a VM's cell serve it, though the cell has set it aside
    Adopt {
        /// The VM
        vm: String,
    },
    /// Have a cell take no new VM; those that run there run on
    Cordon {
        /// The cell
        cell: u16,
    },
    /// Have a cordoned cell take VMs again
    Uncordon {
        /// The cell
        cell: u16,
    },
    /// End a VM of another user that the cluster has admitted, without asking its processes
    Evict {
        /// The VM, as `cluster status` shows it: USER:VM
        vm: String,
    },
    /// Have a cell of this host fail, as if its CPUs and memory were lost: end the VMs that depend on it, and
    /// those alone
    Fail {
        /// The cell
        cell: u16,
    },
    /// Replace the program of this host's cells by this one, while their VMs run; a program that can't adopt
    /// them is taken back
    Upgrade,
    /// Invite a further host, where authority.key is: print the command that joins it, and wait for it
    Invite {
        /// The cluster file
        file: PathBuf,
        /// The host's name
        host: String,
        /// Its address, as 10.77.0.3 or 10.77.0.3:7400
        address: String,
        /// Where the host calls this machine
        #[arg(long, value_name = "ADDRESS:PORT")]
        listen: Option<SocketAddr>,
    },
    /// Make this machine a host of the cluster that has invited it, and start its cells
    Join(join::JoinArgs),
    /// Have this host leave the cluster: take no new VM, wait for its VMs to end, and end its cells
    Leave {
        /// How long VMs have to end, in seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 0)]
        within: u64,
        /// Stop VMs that run then, by the power button; each is killed 30 s later
        #[arg(long)]
        stop: bool,
    },
    /// Take a change of the cluster's hosts, for another host
    #[command(hide = true)]
    Take,
    /// Free the names of the VMs of a host that is lost, and off
    Forget {
        /// The host
        host: String,
        /// The host is off, or can't run its VMs for another reason that you know
        #[arg(long)]
        fenced: bool,
    },
    /// End the cells
    Down {
        /// Let VMs run on, alone; they join the cluster again when it is up again
        #[arg(long, conflicts_with = "stop")]
        leave: bool,
        /// Stop the VMs first; those that do not power off within 30 s are killed
        #[arg(long)]
        stop: bool,
    },
}

impl ClusterCommand {
    /// Whether it only prints information.
    pub fn only_prints(&self) -> bool {
        matches!(self, Self::Status { .. } | Self::Vcpus { .. })
    }
}

/// A loan of memory from one cell to another.
#[derive(Debug, Args)]
pub struct Loan {
    /// How much, as 512M
    size: Size,
    /// The cell that has it
    #[arg(long, value_name = "CELL")]
    from: u16,
    /// The cell that is to have it
    #[arg(long, value_name = "CELL")]
    to: u16,
}

/// Runs a `cluster` subcommand.
pub fn cluster(command: &ClusterCommand) -> Result<ExitCode> {
    match command {
        ClusterCommand::Up {
            file,
            cells,
            host,
            foreground,
            lab,
        } => up(file.as_ref(), *cells, host.as_deref(), *foreground, *lab),
        ClusterCommand::Keys { file, renew } => keys::keys(file, *renew),
        ClusterCommand::Remove { file, host } => keys::remove(file, host),
        ClusterCommand::Status { json } => status(*json),
        ClusterCommand::Vcpus { json } => vcpus::vcpus(*json),
        ClusterCommand::Lend(loan) => self::loan(|| operations::cells::lend(loan.from, loan.to, loan.size.0)),
        ClusterCommand::Reclaim(loan) => {
            self::loan(|| operations::cells::reclaim(loan.to, loan.from, loan.size.0))
        }
        ClusterCommand::Adopt { vm } => adopt(vm),
        ClusterCommand::Cordon { cell } => cordon::cordon(*cell, true),
        ClusterCommand::Uncordon { cell } => cordon::cordon(*cell, false),
        ClusterCommand::Evict { vm } => users::evict(vm),
        ClusterCommand::Fail { cell } => fail::fail(*cell),
        ClusterCommand::Upgrade => upgrade::upgrade(),
        ClusterCommand::Invite {
            file,
            host,
            address,
            listen,
        } => invite::invite(file, host, address, *listen),
        ClusterCommand::Join(args) => join::join(args),
        ClusterCommand::Leave { within, stop } => leave::leave(Duration::from_secs(*within), *stop),
        ClusterCommand::Take => change::take_from_input(),
        ClusterCommand::Forget { host, fenced } => forget::forget(host, *fenced),
        ClusterCommand::Down { leave, stop } => down(*leave, *stop),
    }
}

fn up(
    file: Option<&PathBuf>,
    count: Option<u16>,
    name: Option<&str>,
    foreground: bool,
    lab: LabChoice,
) -> Result<ExitCode> {
    if let Some(code) = enter_lab(lab, RequiredIsolation::default())? {
        return Ok(code);
    }
    if foreground {
        // Before there are cells, which a signal would leave behind.
        foreground::catch_signals()?;
    }
    // The cells have the same environment.
    process_log::Settings::of_environment().into_diagnostic()?;
    let Planned {
        cells: plan,
        site,
        users,
    } = planned(file, count, name)?;
    if let Some(site) = &site {
        // A cell without keys or memory would crash repeatedly.
        let hosts = Hosts::open(site.clone()).map_err(|error| miette!("{error}"))?;
        hosts.warning().iter().for_each(|warning| eprintln!("{warning}"));
        if site.runs_etcd {
            let etcd = Identity::load(&site.keys, ETCD_KEYS).map_err(|error| miette!("{error}"))?;
            warning("etcd", etcd.end())
                .iter()
                .for_each(|warning| eprintln!("{warning}"));
        }
        check_age(site)?;
        hosts.with_shared_memory().map_err(|error| {
            miette!(
                help = "`shared_memory` is a file that this user may write, of memory that the hosts share, and large enough",
                "{error}"
            )
        })?;
    }
    let files = Files::open().into_diagnostic()?;
    let running = files.running().into_diagnostic()?;
    if running.is_empty() {
        users::check(&plan, &users)?;
        files.admit(&users).into_diagnostic()?;
        files.create(&plan, site.as_ref()).into_diagnostic()?;
        for cell in &plan {
            start(&files, cell.number)
                .map_err(|error| miette!("cell {} does not start: {error}", cell.number))?;
        }
    } else if !foreground || !is_this_one(&files, &plan, site.as_ref(), &users)? {
        return Err(miette!(
            help = "end it with `mirrorball cluster down`",
            "a cluster of {} is up already",
            cells(running.len())
        ));
    }
    let limit = if site.is_some() { UP_LIMIT_HOSTS } else { UP_LIMIT };
    // A failed cell has no process until the next `up` after `down`.
    let met: Vec<CellPlan> = plan
        .into_iter()
        .filter(|cell| !files.cell(cell.number).has_failed())
        .collect();
    let status = wait_until_met(&files, &met, limit)?;
    users::wait_until_admitted(&files, &users)?;
    print(&status, &users);
    if let Some(site) = &site {
        keys::print_fingerprints(&site.keys, [&site.here[..]]);
    }
    if !facts::is_measured() {
        measure_meanwhile();
    }
    if !foreground {
        vm::start_all();
        return Ok(ExitCode::SUCCESS);
    }
    notify::notify("READY=1\nSTATUS=The cells run.");
    vm::start_all();
    foreground::stay(&files)
}

/// Whether the running cluster has this plan: its former foreground process was killed, and this one replaces
/// it.
fn is_this_one(files: &Files, plan: &[CellPlan], site: Option<&Site>, users: &[UserPlan]) -> Result<bool> {
    Ok(files.plan().into_diagnostic()? == plan
        && files.site().into_diagnostic()?.as_ref() == site
        && files.users().into_diagnostic()? == users)
}

/// Checks that this host has not left the cluster, and that the file lists every live cell: otherwise the
/// file is outdated.
fn check_age(site: &Site) -> Result<()> {
    // The entries of a host that has just left expire after a while.
    let deadline = Instant::now() + Duration::from_secs(membership::lease_seconds(site.silence_ms) + 1);
    loop {
        // Etcd may only start with these cells.
        let present = membership::present(site).unwrap_or_default();
        let own = site.hosts.iter().find(|host| host.name == site.here);
        let mut own = own.into_iter().flat_map(|host| &host.cells);
        if let Some(left) = own.find(|cell| present.is_retired(**cell)) {
            return Err(miette!(
                help = "invite it again, where authority.key is, with `mirrorball cluster invite`",
                "{} has left the cluster, and cell {left} belongs to no host any more",
                site.here
            ));
        }
        let Some(unknown) = present.members.keys().find(|cell| site.host_of(**cell).is_none()) else {
            return Ok(());
        };
        if Instant::now() > deadline {
            return Err(miette!(
                help = "copy the cluster file from a host that is up: a host has joined since this one was written",
                "the cluster has a cell {unknown}, and this cluster file does not"
            ));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Plan of a cluster for this host.
struct Planned {
    cells: Vec<CellPlan>,
    /// None if the file names no hosts.
    site: Option<Site>,
    /// Users that it admits.
    users: Vec<UserPlan>,
}

/// Returns the file's plan for this host, or the default plan without a file.
fn planned(file: Option<&PathBuf>, count: Option<u16>, here: Option<&str>) -> Result<Planned> {
    let host = host_nodes()?;
    let Some(file) = file else {
        let spec = match count {
            Some(count) => ClusterSpec::of_count(&host, count)?,
            None => ClusterSpec::of_nodes(&host),
        };
        return Ok(Planned {
            cells: spec.cells(&host, None, "this host", "")?,
            site: None,
            users: Vec::new(),
        });
    };
    let (spec, name, text) = read(file)?;
    let own = nix::unistd::gethostname().into_diagnostic()?;
    let own = own.to_string_lossy();
    let mut site = spec.site(here.unwrap_or(&own), &folder(file)?)?;
    if let Some(site) = &mut site {
        site.file = Some(std::path::absolute(file).into_diagnostic()?);
    }
    let here = site.as_ref().map(|site| &site.here[..]);
    Ok(Planned {
        cells: spec.cells(&host, here, &name, &text)?,
        users: spec.users(passwd::uid_of, &name, &text)?,
        site,
    })
}

/// Reads a cluster file; returns the spec, the file's name, and its text.
fn read(file: &Path) -> Result<(ClusterSpec, String, String)> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        miette!(
            help = "check the path",
            "cluster file {}: {error}",
            file.display()
        )
    })?;
    let name = file.display().to_string();
    Ok((ClusterSpec::parse(&name, &text)?, name, text))
}

/// Returns the folder of a file.
fn folder(file: &Path) -> Result<PathBuf> {
    let file = std::path::absolute(file).into_diagnostic()?;
    Ok(file.parent().map(Path::to_owned).unwrap_or_default())
}

/// Returns this host's nodes, with the CPUs that this process may use.
fn host_nodes() -> Result<HostNodes> {
    let facts: knowledge::Base = hostinfo::topology::discover().into_iter().collect();
    let allowed = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).into_diagnostic()?;
    let is_allowed = |cpu| allowed.is_set(cpu).unwrap_or(false);
    Ok(facts::nodes(&knowledge::Machine::of(&facts), is_allowed))
}

/// Starts a cell's guard.
fn start(files: &Files, number: u16) -> std::io::Result<()> {
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(files.cell(number).log())?;
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["cell-guard", &number.to_string()])
        .stdout(log.try_clone()?)
        .stderr(log);
    outlive(command)
}

/// Starts a measurement of message costs on this machine in the background. Nothing waits for it: without it,
/// costs are derived.
fn measure_meanwhile() {
    let mut command = Command::new("/proc/self/exe");
    command.arg("measure").stdout(Stdio::null()).stderr(Stdio::null());
    let _ = outlive(command);
}

/// Starts a process of this program that outlives this one, in its own session, so that the terminal's
/// signals don't reach it.
fn outlive(mut command: Command) -> std::io::Result<()> {
    command
        .arg0("mirrorball")
        .stdin(Stdio::null())
        .env_remove(notify::VARIABLE);
    // SAFETY: setsid is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            Ok(())
        })
    };
    // Not waited for.
    command.spawn()?;
    Ok(())
}

/// Waits until every cell has a link to all others.
fn wait_until_met(files: &Files, plan: &[CellPlan], limit: Duration) -> Result<Status> {
    let deadline = Instant::now() + limit;
    let met = |cell: &CellPlan| -> Option<Status> {
        let mut connection = Connection::open(&files.cell(cell.number)).ok()?;
        let CellResponse::Status(status) = connection.ask(&CellRequest::Status).ok()? else {
            return None;
        };
        // Other hosts may start later.
        let all_live = plan.iter().all(|planned| {
            let mut known = status.cells.iter();
            known.any(|cell| cell.plan.number == planned.number && cell.life.is_some())
        });
        (all_live && status.ready).then_some(status)
    };
    loop {
        let mut last = None;
        let missing = plan.iter().find(|cell| {
            last = met(cell);
            last.is_none()
        });
        match (missing, last) {
            (None, Some(status)) => return Ok(status),
            (Some(cell), _) if Instant::now() > deadline => {
                let log = files.cell(cell.number).log();
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                let said = said.lines().last().unwrap_or("nothing").to_owned();
                return Err(miette!(
                    help = "end the others with `mirrorball cluster down`",
                    "cell {} has not met the others after {} s; it said: {said}",
                    cell.number,
                    limit.as_secs()
                ));
            }
            _ => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

fn status(json: bool) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    let known = client::status(&files).map_err(|error| miette!("the cells do not answer: {error}"))?;
    let Some(status) = known else {
        if let Some(code) = users::status(json)? {
            return Ok(code);
        }
        if let Some(code) = in_lab()? {
            return Ok(code);
        }
        return Err(no_cluster());
    };
    let site = files.site().into_diagnostic()?;
    if let Some(site) = site.clone() {
        match Hosts::open(site) {
            Ok(hosts) => hosts.warning().iter().for_each(|warning| eprintln!("{warning}")),
            Err(error) => eprintln!("{error}"),
        }
    }
    if json {
        println!(
            "{}",
            serde_json::to_string_pretty(&status.cells).into_diagnostic()?
        );
    } else {
        let users = files.users().into_diagnostic()?;
        print(&status, &users);
        users::print_use(&users);
        if let Some(site) = &site {
            keys::print_fingerprints(&site.keys, [&site.here[..]]);
        }
        print_those_without_cell(&status)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the VMs that monitors serve instead of their cells: the cell's process is gone, has given up on the
/// VM, or has just started.
fn print_those_without_cell(status: &Status) -> Result<()> {
    for record in Registry::open().into_diagnostic()?.list().into_diagnostic()? {
        let Some(number) = record.cell else { continue };
        let cell = status.cells.iter().find(|cell| cell.plan.number == number);
        let is_served = cell.is_some_and(|cell| cell.life.is_some() && cell.pid == record.monitor_pid);
        // A monitor always serves a VM that spans hosts.
        if !is_served && record.shard_pid.is_some() && !spans_hosts(&record, status) {
            println!(
                "{}: served by process {} instead of cell {number}; `mirrorball cluster adopt {}` has the cell serve it",
                record.name, record.monitor_pid, record.name
            );
        }
    }
    Ok(())
}

/// Whether the VM has shards on other hosts than its home.
fn spans_hosts(record: &Record, status: &Status) -> bool {
    let host = |number: u16| {
        let cell = status.cells.iter().find(|cell| cell.plan.number == number);
        cell.and_then(|cell| cell.plan.host.clone())
    };
    record
        .span
        .iter()
        .any(|part| Some(host(part.cell)) != record.cell.map(host))
}

/// Has the VM's cell serve it.
fn adopt(vm: &str) -> Result<ExitCode> {
    let registry = Registry::open().into_diagnostic()?;
    let folder = match registry.find(vm) {
        Ok(folder) => folder,
        Err(error) => match in_lab()? {
            Some(code) => return Ok(code),
            None => return Err(miette!("{error}")),
        },
    };
    let Some(cell) = vms::read(&folder).into_diagnostic()?.cell else {
        return Err(miette!(
            help = "only VMs of a cluster are served by cells",
            "VM {vm} is in no cell"
        ));
    };
    let name = vm.to_owned();
    let files = Files::open().into_diagnostic()?;
    let answer = Connection::open(&files.cell(cell))
        .and_then(|mut connection| connection.ask(&CellRequest::Adopt { name, again: true }))
        .map_err(|error| {
            miette!(
                help = "see `mirrorball cluster status`",
                "cell {cell} does not answer: {error}"
            )
        })?;
    match answer {
        CellResponse::Refused { why } => Err(miette!("{why}")),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Changes a cell's loans.
fn loan(act: impl FnOnce() -> std::result::Result<(), operations::Failure>) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    if let ControlFlow::Break(code) = cells_here(&files)? {
        return Ok(code);
    }
    act().map(|()| ExitCode::SUCCESS).map_err(crate::failed)
}

/// Returns the cells of this host. Without a cluster here, the same command runs in the lab, if one is up;
/// returns its exit status then.
fn cells_here(files: &Files) -> Result<ControlFlow<ExitCode, Vec<CellPlan>>> {
    let plan = files.plan().into_diagnostic()?;
    if !plan.is_empty() {
        return Ok(ControlFlow::Continue(plan));
    }
    in_lab()?.map_or_else(|| Err(no_cluster()), |code| Ok(ControlFlow::Break(code)))
}

/// Refuses a cell that is not in this host's `plan`.
fn check_is_here(plan: &[CellPlan], number: u16, help: &str) -> Result<()> {
    if plan.iter().any(|cell| cell.number == number) {
        return Ok(());
    }
    let numbers: Vec<String> = plan.iter().map(|cell| cell.number.to_string()).collect();
    Err(miette!(
        help = help,
        "this host has no cell {number}; it has {}",
        numbers.join(", ")
    ))
}

fn no_cluster() -> miette::Report {
    miette!(
        help = "start one with `mirrorball cluster up`",
        "no cluster is up here"
    )
}

fn one_host() -> miette::Report {
    miette!(
        help = "name the hosts in the cluster's file, each a [[hosts]] table",
        "the cluster has this host only"
    )
}

fn print(status: &Status, users: &[UserPlan]) {
    println!(
        "{:<5} {:<10} {:<8} {:>8} {:<12} {:<8} {:>8} {:>8} {:>8} {:>6}  VMS",
        "CELL", "HOST", "STATE", "PID", "CPUS", "NODES", "MEMORY", "GIVEN", "LOANS", "VCPUS"
    );
    for cell in &status.cells {
        println!("{}", line(cell, users));
    }
    for cell in &status.cells {
        for LentMemory { cell: to, bytes } in &cell.lent {
            println!("cell {} has lent cell {to} {}M", cell.plan.number, bytes >> 20);
        }
    }
}

fn line(cell: &CellStatus, users: &[UserPlan]) -> String {
    let state = match (cell.failed, cell.life) {
        (true, _) => "failed",
        (false, Some(_)) if cell.cordoned => "cordoned",
        (false, Some(_)) => "runs",
        (false, None) => "dead",
    };
    let nodes: Vec<usize> = cell.plan.nodes.iter().map(|node| *node as usize).collect();
    let mib = |bytes: u64| format!("{}M", bytes >> 20);
    let sum = |parts: &[LentMemory]| parts.iter().map(|part| part.bytes).sum::<u64>();
    let loans = match (sum(&cell.borrowed), sum(&cell.lent)) {
        (borrowed, lent) if borrowed > lent => format!("+{}", mib(borrowed - lent)),
        (borrowed, lent) if lent > borrowed => format!("-{}", mib(lent - borrowed)),
        _ => "-".to_owned(),
    };
    format!(
        "{:<5} {:<10} {state:<8} {:>8} {:<12} {:<8} {:>8} {:>8} {loans:>8} {:>6}  {}",
        cell.plan.number,
        cell.plan.host.as_deref().unwrap_or("-"),
        cell.pid,
        cpulist::write(&cell.plan.cpus),
        cpulist::write(&nodes),
        mib(cell.plan.memory_bytes),
        mib(cell.given_bytes),
        cell.vcpus,
        users::names(&cell.vms, users).join(" ")
    )
}

fn down(leave: bool, stop: bool) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    let plan = match cells_here(&files)? {
        ControlFlow::Continue(plan) => plan,
        ControlFlow::Break(code) => return Ok(code),
    };
    if stop {
        leave::stop_vms(&files, &plan)?;
    }
    end_cluster(&files, leave)?;
    Ok(ExitCode::SUCCESS)
}

/// Ends the cluster on this host. With `leave`, VMs keep running.
fn end_cluster(files: &Files, leave: bool) -> Result<()> {
    let status = client::status(files).unwrap_or_default().unwrap_or_default();
    let plan = files.plan().into_diagnostic()?;
    let is_own = |cell: &CellStatus| plan.iter().any(|own| own.number == cell.plan.number);
    let own = status.cells.into_iter().filter(is_own);
    // A spanning VM ends as a whole.
    let is_whole = |name: &String| !name.contains(SHARD_SEPARATOR);
    let vms: Vec<String> = own.flat_map(|cell| cell.vms).filter(is_whole).collect();
    let users = files.users().into_diagnostic()?;
    if !leave && !vms.is_empty() {
        return Err(miette!(
            help = "stop them with --stop, end those of other users with `mirrorball cluster evict USER:VM`, or add --leave to \
                    let them run on alone",
            "VMs run in the cluster: {}",
            users::names(&vms, &users).join(", ")
        ));
    }
    let site = files.site().into_diagnostic()?;
    if !vms.is_empty() && site.is_some_and(|site| site.on_lost == OnLost::Stop) {
        return Err(miette!(
            help = "end them with `mirrorball stop VM`",
            "with `on_lost = \"stop\"` no VM runs on without its cell, since its name is free then: {}",
            vms.join(", ")
        ));
    }
    end_cells(files)?;
    // The guard of a failed cell keeps the server as long as there is a plan.
    files.remove().into_diagnostic()?;
    if !users.is_empty() {
        users::wait_until_closed()?;
    }
    Ok(())
}

/// Ends the cells of this host. VMs keep running.
fn end_cells(files: &Files) -> Result<()> {
    let deadline = Instant::now() + DOWN_LIMIT;
    loop {
        let running = files.running().into_diagnostic()?;
        if running.is_empty() {
            return Ok(());
        }
        for cell in &running {
            // A starting cell receives the request in the next round, and one that waits for etcd reads the
            // note.
            let asked =
                Connection::open(&files.cell(cell.number)).and_then(|mut cell| cell.ask(&CellRequest::End));
            if asked.is_err() {
                files.cell(cell.number).end().into_diagnostic()?;
            }
        }
        if Instant::now() > deadline {
            return Err(miette!(
                help = "kill the processes that `mirrorball cluster status` lists",
                "{} did not end within {} s",
                cells(running.len()),
                DOWN_LIMIT.as_secs()
            ));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn cells(count: usize) -> String {
    if count == 1 {
        "one cell".to_owned()
    } else {
        format!("{count} cells")
    }
}
