//! `mirrorball vm`: defined VMs, which start with their host's cluster.

mod store;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use config::start_order::{self, StartOrderError};
use config::{VmFile, VmSpec};
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::files::Files;
use registry::lease::{Lease, OWN_PROGRAM};
use registry::monitor::{Batch, Event};
use registry::vms::{BOOT_LIMIT_S, Record, Registry};
use serde_json::json;

use self::store::{Defined, Store};
use super::execution_site::{LabChoice, RequiredIsolation, enter_lab};
use super::{check, host_file};

/// Maximum time between two reports of a VM's monitor until the VM runs.
const START_LIMIT: Duration = Duration::from_secs(300);

/// Subcommands of `mirrorball vm`.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Keep VMs that start when the cluster comes up; those of the same names are replaced
    Define {
        /// VM files, each with a name
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Remove the definition of a VM; a running one continues
    Undefine {
        /// Name of the VM
        name: String,
    },
    /// List the VMs that are defined
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Start a VM that is defined, and leave it running
    Start {
        /// Name of the VM
        name: String,
        /// Whether to run in the lab
        #[arg(long, value_enum, default_value = "auto")]
        lab: LabChoice,
    },
}

impl VmCommand {
    /// Whether it only prints information.
    pub fn only_prints(&self) -> bool {
        matches!(self, Self::Ls { .. })
    }
}

/// Runs a `vm` subcommand.
pub fn vm(command: &VmCommand) -> Result<ExitCode> {
    match command {
        VmCommand::Define { files } => define(files),
        VmCommand::Undefine { name } => undefine(name),
        VmCommand::Ls { json } => list(*json),
        VmCommand::Start { name, lab } => start(name, *lab),
    }
}

fn define(paths: &[PathBuf]) -> Result<ExitCode> {
    let mut new = BTreeMap::new();
    for file in check::read(paths)? {
        let (name, spec) = definable(file)?;
        new.insert(name, spec);
    }
    let store = Store::open()?;
    let _lock = store.lock()?;
    let mut all = store.read()?.vms;
    all.extend(new.clone());
    start_order::order(&all).map_err(|error| miette!("{error}"))?;
    for (name, spec) in &new {
        store.write(name, spec)?;
        println!("{name}: defined");
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a file's VM in a form that can be started from any directory.
fn definable(file: VmFile) -> Result<(String, VmSpec)> {
    let (source, mut spec) = (file.source_name, file.spec);
    let Some(name) = spec.name.clone() else {
        return Err(miette!(
            help = "add `name = \"NAME\"`: the VM is kept by it",
            "{source}: a defined VM has no name"
        ));
    };
    if spec.command.is_some() {
        return Err(miette!(
            help = "leave out `command`, or start it with `mirrorball run`",
            "{source}: a defined VM is left running, and one with a command ends with that"
        ));
    }
    if spec.warm {
        return Err(miette!(
            help = "leave out `warm`, or start it with `mirrorball run`",
            "{source}: a defined VM boots, and does not start from a template"
        ));
    }
    let kernel = spec.kernel.iter_mut();
    let kernel = kernel.flat_map(|kernel| [&mut kernel.path, &mut kernel.initrd].into_iter().flatten());
    let folders = spec.folders.iter_mut().map(|folder| &mut folder.path);
    let disks = spec.disks.iter_mut().map(|disk| &mut disk.path);
    for path in kernel.chain(disks).chain(folders) {
        *path = std::path::absolute(&*path).into_diagnostic()?;
    }
    Ok((name, spec))
}

fn undefine(name: &str) -> Result<ExitCode> {
    let store = Store::open()?;
    let _lock = store.lock()?;
    let mut defined = store.read()?;
    let is_known = defined.vms.remove(name).is_some();
    if let Err(StartOrderError::Unknown { vm, after }) = start_order::order(&defined.vms)
        && after == name
    {
        return Err(miette!(
            help = "undefine that first, or define it without `after`",
            "{vm} starts after {name}"
        ));
    }
    // A VM with an invalid file can be removed, too.
    match config::is_name(name).then(|| store.remove(name)) {
        Some(Ok(())) => {
            println!("{name}: not defined any more");
            Ok(ExitCode::SUCCESS)
        }
        Some(Err(error)) if is_known => Err(miette!("{name}: {error}")),
        _ => Err(unknown(name)),
    }
}

fn unknown(name: &str) -> miette::Report {
    miette!(
        help = "`mirrorball vm ls` lists them",
        "no VM named {name} is defined"
    )
}

fn list(json: bool) -> Result<ExitCode> {
    let Defined { vms, broken } = Store::open()?.read()?;
    let running = running()?;
    let is_running = |name: &str| running.iter().any(|record| record.name == name);
    if json {
        let all: Vec<_> = vms
            .iter()
            .map(|(name, spec)| {
                let running = is_running(name);
                json!({ "name": name, "running": running, "after": spec.after, "spec": spec })
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&all).into_diagnostic()?);
    } else {
        println!(
            "{:<20} {:<8} {:>4} {:>8} {:<20} IMAGE",
            "NAME", "STATE", "CPUS", "MEMORY", "AFTER"
        );
        for (name, spec) in &vms {
            let state = if is_running(name) { "runs" } else { "-" };
            let after = match &spec.after[..] {
                [] => "-".to_owned(),
                after => after.join(","),
            };
            let image = spec.image.as_deref().unwrap_or("-");
            let memory = format!("{}M", spec.memory.0 >> 20);
            println!(
                "{name:<20} {state:<8} {:>4} {memory:>8} {after:<20} {image}",
                spec.cpus
            );
        }
    }
    broken.iter().for_each(|line| eprintln!("mirrorball: {line}"));
    Ok(ExitCode::SUCCESS)
}

fn running() -> Result<Vec<Record>> {
    Registry::open()
        .and_then(|registry| registry.list())
        .into_diagnostic()
}

fn start(name: &str, lab: LabChoice) -> Result<ExitCode> {
    let mut defined = Store::open()?.read()?;
    let spec = defined.vms.remove(name).ok_or_else(|| unknown(name))?;
    if let Some(code) = enter_lab(lab, RequiredIsolation::of([&spec], true))? {
        return Ok(code);
    }
    start_detached(name, &spec, by_fork)?;
    println!("{name}");
    Ok(ExitCode::SUCCESS)
}

/// A way to start the monitor of a VM.
type StartMonitor = fn(&Batch) -> std::io::Result<Lease>;

/// Forks the monitor from this process, whose other threads may only wait.
fn by_fork(batch: &Batch) -> std::io::Result<Lease> {
    cell::monitor::start(batch.clone(), shard::PLATFORM)
}

/// Starts the monitor from another process. This one may have threads that work: a fork would copy the files
/// that they have open, and the locks that they hold, into the monitor.
fn by_own_program(batch: &Batch) -> std::io::Result<Lease> {
    Lease::by_program(Path::new(OWN_PROGRAM), batch)
}

/// Starts the defined VMs that do not run, one after the other, when their cluster has come up. Prints a line
/// for each start or failure; no failure prevents another VM's start.
pub(super) fn start_all() {
    start_each(by_fork);
}

/// As [`start_all`], in a process with other threads.
pub(super) fn start_all_beside_threads() {
    start_each(by_own_program);
}

fn start_each(start_monitor: StartMonitor) {
    let defined = match Store::open().and_then(|store| store.read()) {
        Ok(defined) => defined,
        Err(error) => return crate::complain(&error),
    };
    defined
        .broken
        .iter()
        .for_each(|line| eprintln!("mirrorball: {line}"));
    let running = running().unwrap_or_default();
    for name in order(&defined.vms) {
        if running.iter().any(|record| record.name == name) {
            continue;
        }
        match start_detached(&name, &defined.vms[&name], start_monitor) {
            Ok(()) => println!("{name}: started"),
            Err(error) => crate::complain(&error),
        }
    }
}

/// Returns the start order. Only files that were edited by hand can have none; those start by name.
fn order(vms: &BTreeMap<String, VmSpec>) -> Vec<String> {
    start_order::order(vms).unwrap_or_else(|error| {
        eprintln!("mirrorball: {error}; defined VMs start in the order of their names");
        vms.keys().cloned().collect()
    })
}

/// Starts a VM that outlives this process; returns when its vCPUs run.
fn start_detached(name: &str, spec: &VmSpec, start_monitor: StartMonitor) -> Result<()> {
    let site = Files::open().and_then(|files| files.site()).into_diagnostic()?;
    let elsewhere = site
        .zip(spec.home_cell())
        .filter(|(site, cell)| site.is_elsewhere(*cell));
    if let Some((_, cell)) = elsewhere {
        return Err(miette!(
            help = "define it there",
            "{name}: cell {cell} is on another host"
        ));
    }
    let mut spec = spec.clone();
    spec.list_default_card();
    let batch = Batch {
        vms: vec![(name.to_owned(), spec)],
        source: None,
        share_between: host_file::share_between()?,
        member: None,
        names: None,
        boot_limit_s: BOOT_LIMIT_S,
    };
    let lease = start_monitor(&batch).map_err(|error| {
        miette!(
            help = "see whether the host is out of processes",
            "{name}: the monitor does not start: {error}"
        )
    })?;
    lease.limit_wait(START_LIMIT).into_diagnostic()?;
    for event in lease.events().into_diagnostic()? {
        match event {
            Event::Running { sandbox_missing, .. } => {
                for line in &sandbox_missing {
                    eprintln!("mirrorball: {name}: sandbox without {line}");
                }
                return lease.detach().into_diagnostic();
            }
            Event::Failed { why, .. } => return Err(miette!("{name}: {why}")),
            Event::Ended { ending, .. } => {
                let why = cell::ending::reason(&ending);
                let why = why.unwrap_or_else(|| "the guest powered off".to_owned());
                return Err(miette!("{name}: it ended before it ran: {why}"));
            }
            Event::Started { .. }
            | Event::FullDisks { .. }
            | Event::Paused { .. }
            | Event::StartsAgain { .. } => {}
        }
    }
    Err(miette!(
        help = "see `mirrorball ps` for its state, and start it again with `mirrorball vm start`",
        "{name}: the processes that start it died, or sent nothing for {} s",
        START_LIMIT.as_secs()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> VmFile {
        VmFile {
            source_name: "web.toml".to_owned(),
            text: text.to_owned(),
            spec: config::parse("web.toml", text).unwrap(),
        }
    }

    #[test]
    fn defined_vm_has_a_name_no_command_and_paths_from_the_root() {
        let (name, spec) = definable(file(
            "name = \"web\"\n[kernel]\npath = \"k\"\ninitrd = \"/i\"\n[[disks]]\npath = \"sub/d\"\n",
        ))
        .unwrap();
        assert_eq!(name, "web");
        let here = std::env::current_dir().unwrap();
        assert_eq!(
            spec.kernel_files(),
            Some((&*here.join("k"), Some(Path::new("/i"))))
        );
        assert_eq!(spec.disks[0].path, here.join("sub/d"));
        for (text, why, help) in [
            (
                "image = \"x\"\n",
                "web.toml: a defined VM has no name",
                "add `name",
            ),
            (
                "name = \"web\"\nimage = \"x\"\ncommand = [\"ls\"]\n",
                "web.toml: a defined VM is left running",
                "leave out `command`",
            ),
        ] {
            let error = definable(file(text)).unwrap_err();
            assert!(error.to_string().starts_with(why), "{error}");
            assert!(
                error
                    .help()
                    .is_some_and(|said| said.to_string().starts_with(help))
            );
        }
    }

    #[test]
    fn vms_with_a_cyclic_start_order_start_by_name() {
        let circle = [("a", "b"), ("b", "a"), ("c", "b")].map(|(name, after)| {
            let text = format!("name = {name:?}\nimage = \"x\"\nafter = [{after:?}]\n");
            (name.to_owned(), config::parse("vm.toml", &text).unwrap())
        });
        assert_eq!(order(&circle.into()), ["a", "b", "c"]);
    }
}
