//! `clone`, `snapshot`, `restore`: VMs that resume from another VM's state.

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use cell::frozen::{FrozenVm, check_cloneable};
use cell::snapshot::directory::{Directory, caller};
use cell::snapshot::trust::{Allowed, Granted, Places, Resources, grant};
use config::vm::NetSpec;
use config::{ConfigError, IoLimitSpec, Size, VmSpec};
use diskstore::image::data_directory;
use miette::{IntoDiagnostic, Result, miette};
use registry::lease::Lease;
use registry::monitor::{Batch, Event, NameRules, Source};
use registry::vms::{self, BOOT_LIMIT_S, Registry};

use super::clone_identity::{self, Clone};
use super::execution_site::{self, Found, LabChoice, RequiredIsolation, find};
use super::{flags, host_file, hosts};
use crate::idempotency::RequestArgs;
use crate::{progress, remote};

/// Placeholder for the number in a pattern of names.
const NUMBER: &str = "{}";

/// Arguments of `clone`.
#[derive(Debug, clap::Args)]
pub struct CloneArgs {
    /// The VM to copy
    pub vm: String,
    /// How many copies
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub count: u16,
    /// The copies' names; {} stands for a number. VM-{} when absent
    #[arg(long)]
    pub name: Option<String>,
    /// Leave the guests who they are: host name, hardware addresses, random numbers and time stay the
    /// parent's
    #[arg(long)]
    pub as_is: bool,
    #[command(flatten)]
    pub request: RequestArgs,
}

/// Arguments of `restore`.
#[derive(Debug, clap::Args)]
pub struct RestoreArgs {
    /// The snapshot
    pub directory: PathBuf,
    /// How many VMs are to go on from it
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub count: u16,
    /// Their names; {} stands for a number. The name of the snapshot's VM, with a number if it is taken, when
    /// absent
    #[arg(long)]
    pub name: Option<String>,
    /// A disk of the snapshot and the file that it is: NUMBER=PATH, counted from 0 without the image's own
    #[arg(long, value_name = "NUMBER=PATH", value_parser = numbered_path)]
    pub disk: Vec<(usize, PathBuf)>,
    /// The kernel's file, of a VM that was started from one
    #[arg(long)]
    pub kernel: Option<PathBuf>,
    /// Initramfs for that kernel
    #[arg(long)]
    pub initrd: Option<PathBuf>,
    /// auto, require or off; the snapshot's own when that is stronger
    #[arg(long, default_value = "auto")]
    pub sandbox: String,
    /// Its part of CPUs that VMs share, 1 to 10000; never the snapshot's own
    #[arg(long, value_name = "WEIGHT")]
    pub cpu_weight: Option<u16>,
    /// As many of the host's CPUs it uses at most, as 1.5; the snapshot's own when absent
    #[arg(long, value_name = "CPUS")]
    pub cpu_limit: Option<f64>,
    /// Memory of the host that its processes use at most, the guest's included; the snapshot's own when
    /// absent
    #[arg(long, value_name = "SIZE")]
    pub memory_limit: Option<Size>,
    /// I/O of the host's devices at most each second, as `run` has it; the snapshot's own when absent
    #[arg(long, value_name = "LIMITS")]
    pub io_limit: Option<IoLimitSpec>,
    /// Maximum size of each disk's temporary overlay, as 4G; the snapshot's own when absent
    #[arg(long, value_name = "SIZE")]
    pub scratch_limit: Option<Size>,
    /// Nothing else runs on a core of the host while the VM does; also when the snapshot asks for it
    #[arg(long)]
    pub core_scheduling: bool,
    /// The share group of the snapshot's VM, which it may join again
    #[arg(long)]
    pub share_group: Option<String>,
    /// The network of its cards of a subnet; with --as-is the snapshot's own when absent, else one of its own
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// The cell of the cluster to run in; never the snapshot's own
    #[arg(long)]
    pub cell: Option<u16>,
    /// Leave the guests who they are: host name, hardware addresses, random numbers and time stay the
    /// snapshot's; and give it the TAP devices, ports and nodes of the host that it asks for
    #[arg(long)]
    pub as_is: bool,
    /// Whether to run in the lab
    #[arg(long, value_enum, default_value = "auto")]
    pub lab: LabChoice,
    #[command(flatten)]
    pub request: RequestArgs,
}

/// A running copy.
pub(super) struct Running {
    pub name: String,
    pub folder: PathBuf,
}

/// Makes the copies and prints their names.
pub fn clone(args: &CloneArgs) -> Result<ExitCode> {
    let folder = match find(&args.vm)? {
        Found::Here(folder) => folder,
        Found::Elsewhere(code) => return Ok(code),
    };
    let parent = vms::read(&folder).into_diagnostic()?;
    if let Some(why) = check_cloneable(&parent.spec) {
        return Err(miette!("{}: {why}", args.vm));
    }
    let pattern = args
        .name
        .clone()
        .unwrap_or_else(|| format!("{}-{NUMBER}", args.vm));
    let start = Instant::now();
    let (running, paused_us) = go_on(
        (&args.vm, &parent.spec),
        Source::Running(folder),
        names(&pattern, args.count)?,
        args.as_is,
        // The files are its parent's, named by the same user.
        parent.names.clone(),
    )?;
    eprintln!(
        "mirrorball: {} stood still for {:.1} ms; {} after {:.1} s",
        args.vm,
        paused_us as f64 / 1e3,
        match running {
            1 => "the clone runs".to_owned(),
            count => format!("the {count} clones run"),
        },
        start.elapsed().as_secs_f64()
    );
    if parent
        .spec
        .nets
        .iter()
        .flatten()
        .any(|net| !net.forward.is_empty())
    {
        eprintln!(
            "mirrorball: the ports of the host lead to {} alone, not to its clones",
            args.vm
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a snapshot of a running VM, which continues.
pub fn snapshot(name: &str, directory: &Path) -> Result<ExitCode> {
    let folder = match find(name)? {
        Found::Here(folder) => folder,
        Found::Elsewhere(code) => return Ok(code),
    };
    let place =
        remote::new_place(directory, None).map_err(|error| miette!("{}: {error}", directory.display()))?;
    if place.path.symlink_metadata().is_ok() {
        return Err(miette!(
            "{} exists; name a directory that does not",
            directory.display()
        ));
    }
    let frozen = FrozenVm::of(&folder).map_err(|error| miette!("{name}: {error}"))?;
    let bar = std::io::stderr()
        .is_terminal()
        .then(|| progress::spinner("the snapshot is written"));
    let written = cell::snapshot::write(&frozen, name, &place.path);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let bytes = written.map_err(|error| miette!("{error}"))?;
    eprintln!(
        "mirrorball: {name} stood still for {:.1} ms; {} holds {} MiB",
        frozen.paused_us as f64 / 1e3,
        directory.display(),
        bytes >> 20
    );
    Ok(ExitCode::SUCCESS)
}

/// Starts VMs from a snapshot, and prints their names.
pub fn restore(args: &RestoreArgs) -> Result<ExitCode> {
    if let Some(code) = args.cell.map(hosts::at_cell).transpose()?.flatten() {
        return Ok(code);
    }
    let at = args.directory.display();
    let path = remote::directory(&args.directory)
        .map_err(|error| miette!("{at}: {error}; name a directory made by `mirrorball snapshot`"))?;
    let owners: Vec<u32> = [Some(caller()), lab::auto::owner()]
        .into_iter()
        .flatten()
        .collect();
    let directory = Directory::open(&path, &owners).map_err(|error| miette!("{error}"))?;
    let rules = remote::rules()?;
    if rules.is_some() && !directory.stays_in_place() {
        return Err(miette!(
            help = "keep it where only its owner may change the directories",
            "{at}: other users may put another snapshot in its place"
        ));
    }
    let (name, spec) = cell::snapshot::about(&directory).map_err(|error| miette!("{error}"))?;
    let granted = granted(args, &spec, &directory)?;
    if let Some(code) = execution_site::enter_lab(args.lab, RequiredIsolation::of([&granted.spec], true))? {
        return Ok(code);
    }
    eprintln!(
        "mirrorball: the snapshot of {name} gets {}",
        granted.opens.join(", ")
    );
    for line in &granted.withheld {
        eprintln!("mirrorball: the snapshot of {name}: {line}");
    }
    let pattern = match &args.name {
        Some(pattern) => pattern.clone(),
        None if args.count == 1 && names(&name, 1).is_ok() => name.clone(),
        None => format!("{name}-{NUMBER}"),
    };
    let start = Instant::now();
    let source = Source::Snapshot {
        directory: path,
        owners,
    };
    let names = names(&pattern, args.count)?;
    let (running, _) = go_on((&name, &granted.spec), source, names, args.as_is, rules.cloned())?;
    eprintln!(
        "mirrorball: {running} {} from the snapshot of {name} after {:.1} s",
        if running == 1 { "VM goes on" } else { "VMs go on" },
        start.elapsed().as_secs_f64()
    );
    Ok(ExitCode::SUCCESS)
}

/// Returns the resources that the flags grant to the snapshot in `directory`, whose manifest requests `spec`.
fn granted(args: &RestoreArgs, spec: &VmSpec, directory: &Directory) -> Result<Granted> {
    let absolute = |path: &PathBuf| std::path::absolute(path).into_diagnostic();
    let mut allowed = Allowed {
        kernel: args.kernel.as_ref().map(absolute).transpose()?,
        initrd: args.initrd.as_ref().map(absolute).transpose()?,
        sandbox: flags::word("sandbox", &args.sandbox)?,
        as_is: args.as_is,
        network: args.network.clone(),
        resources: resources(args),
        ..Allowed::default()
    };
    for (number, path) in &args.disk {
        if allowed.disks.insert(*number, absolute(path)?).is_some() {
            return Err(miette!("--disk {number}: named twice; name each disk once"));
        }
    }
    let images = data_directory().map(|data| data.join("images"));
    let places = Places {
        directory,
        images: images.as_deref(),
    };
    let granted =
        grant(spec, &places, &allowed).map_err(|error| miette!("{}: {error}", args.directory.display()))?;
    let one_only = |net: &NetSpec| net.tap.is_some() || !net.forward.is_empty();
    if args.count > 1 && granted.spec.nets.iter().flatten().any(one_only) {
        return Err(miette!(
            "--count {} --as-is: only one VM can have the snapshot's TAP devices and ports \
             of the host; leave one of the two out",
            args.count
        ));
    }
    Ok(granted)
}

/// Returns the host resources that the flags grant.
fn resources(args: &RestoreArgs) -> Resources {
    Resources {
        cpu_weight: args.cpu_weight,
        cpu_limit: args.cpu_limit,
        memory_limit: args.memory_limit,
        io_limit: args.io_limit,
        scratch_limit: args.scratch_limit,
        core_scheduling: args.core_scheduling,
        share_group: args.share_group.clone(),
        cell: args.cell,
    }
}

/// Parses a disk's number and its file.
fn numbered_path(text: &str) -> Result<(usize, PathBuf), String> {
    let parsed = text
        .split_once('=')
        .and_then(|(number, path)| Some((number.parse().ok()?, path)))
        .filter(|(_, path)| !path.is_empty());
    parsed
        .map(|(number, path)| (number, path.into()))
        .ok_or_else(|| "write NUMBER=PATH, as 0=data.raw; disks are counted from 0".to_owned())
}

/// Starts VMs of these names from `source`, in their parent's state, and prints the names. Returns their
/// number, and the parent's pause.
fn go_on(
    parent: (&str, &VmSpec),
    source: Source,
    names: Vec<String>,
    as_is: bool,
    rules: Option<NameRules>,
) -> Result<(usize, u64)> {
    let vms: Vec<_> = names
        .into_iter()
        .map(|name| {
            let mut spec = spec_of(parent.1, &name);
            match source {
                Source::Snapshot { .. } if as_is => spec.nets = clone_identity::kept_cards(parent)?,
                Source::Running(_) if as_is => {
                    clone_identity::keep_addresses_on_own_network(parent, &mut spec)?
                }
                _ => {}
            }
            Ok((name, spec))
        })
        .collect::<Result<_>>()?;
    for (_, spec) in &vms {
        config::check(spec).map_err(|fault| ConfigError::from_flags(&fault))?;
    }
    let batch = Batch {
        vms: vms.clone(),
        source: Some(source),
        share_between: host_file::share_between()?,
        member: None,
        names: rules,
        boot_limit_s: BOOT_LIMIT_S,
    };
    let lease = cell::monitor::start(batch, shard::PLATFORM).map_err(|error| {
        miette!(
            help = "see whether the host is out of processes",
            "the monitor does not start: {error}"
        )
    })?;
    let (running, paused_us) = wait(&lease, vms.len())?;
    let clones = running.iter().filter_map(|clone| {
        let (name, spec) = vms.iter().find(|(name, _)| *name == clone.name)?;
        Some(Clone {
            name,
            spec,
            folder: &clone.folder,
        })
    });
    let clones: Vec<_> = clones.collect();
    if as_is {
        clone_identity::warn_of_silent_cards(parent, &clones);
    } else {
        clone_identity::identify(parent, &clones);
    }
    lease.detach().into_diagnostic()?;
    for clone in &running {
        println!("{}", clone.name);
    }
    Ok((running.len(), paused_us))
}

/// Returns `count` names by `pattern` that no running VM has.
fn names(pattern: &str, count: u16) -> Result<Vec<String>> {
    let taken: BTreeSet<String> = Registry::open()
        .and_then(|registry| registry.list())
        .into_diagnostic()?
        .into_iter()
        .map(|record| record.name)
        .collect();
    if count == 1 && !pattern.contains(NUMBER) {
        return if taken.contains(pattern) {
            Err(miette!(
                "a VM named {pattern} is running already; choose another name with --name"
            ))
        } else {
            Ok(vec![pattern.to_owned()])
        };
    }
    let pattern = if pattern.contains(NUMBER) {
        pattern.to_owned()
    } else {
        format!("{pattern}-{NUMBER}")
    };
    Ok((1..)
        .map(|number: u32| pattern.replace(NUMBER, &number.to_string()))
        .filter(|name| !taken.contains(name))
        .take(usize::from(count))
        .collect())
}

/// Returns the parent's spec, without resources that two VMs can't share.
fn spec_of(parent: &VmSpec, name: &str) -> VmSpec {
    let mut spec = VmSpec {
        name: Some(name.to_owned()),
        command: None,
        // It takes CPU time from other VMs.
        cpu_reservation: None,
        // It resumes from its parent, not from a template.
        warm: false,
        ..parent.clone()
    };
    for net in spec.nets.iter_mut().flatten() {
        net.forward.clear();
        (net.mac, net.address) = (None, None);
    }
    spec
}

/// Waits until all run; returns the parent's pause.
pub(super) fn wait(lease: &Lease, count: usize) -> Result<(Vec<Running>, u64)> {
    let (mut started, mut running, mut still) = (Vec::new(), BTreeSet::new(), 0);
    for event in lease.events().into_diagnostic()? {
        match event {
            Event::Started { name, folder, .. } => started.push(Running { name, folder }),
            Event::Running {
                name,
                sandbox_missing,
                paused_us,
                ..
            } => {
                for line in &sandbox_missing {
                    eprintln!("mirrorball: {name}: sandbox without {line}");
                }
                still = paused_us.unwrap_or(still);
                running.insert(name);
                if running.len() == count {
                    started.sort_by(|a, b| a.name.cmp(&b.name));
                    return Ok((started, still));
                }
            }
            Event::FullDisks { .. } | Event::Paused { .. } | Event::StartsAgain { .. } => {}
            Event::Failed { name, why } => {
                lease.end();
                return Err(miette!("{name}: {why}"));
            }
            Event::Ended { name, .. } => {
                lease.end();
                return Err(miette!(
                    help = "`mirrorball logs` of its parent may say why",
                    "the clone {name} ended at once"
                ));
            }
        }
    }
    Err(miette!(
        help = "see `mirrorball events` for their ends, and clone again",
        "the monitor of the clones died; they died with it"
    ))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Restore {
        #[command(flatten)]
        args: RestoreArgs,
    }

    #[test]
    fn a_restore_gives_the_resources_that_its_flags_name_and_no_others() {
        let given = |flags: &str| {
            let words = ["restore", "web.snap"]
                .into_iter()
                .chain(flags.split_whitespace());
            resources(&Restore::try_parse_from(words).unwrap().args)
        };
        assert_eq!(given(""), Resources::default());
        let all = "--cpu-weight 50 --cpu-limit 1.5 --memory-limit 2G --io-limit reads=500 --scratch-limit 4G \
                   --core-scheduling --share-group lessons --cell 1";
        let wanted = Resources {
            cpu_weight: Some(50),
            cpu_limit: Some(1.5),
            memory_limit: Some(Size(2 << 30)),
            io_limit: Some("reads=500".parse().unwrap()),
            scratch_limit: Some(Size(4 << 30)),
            core_scheduling: true,
            share_group: Some("lessons".to_owned()),
            cell: Some(1),
        };
        assert_eq!(given(all), wanted);
    }
}
