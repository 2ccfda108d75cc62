//! `mirrorball run`: starts VMs, each with a monitor of its own, and follows them.

mod command;
mod follow;
mod scope;
mod table;

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::process::ExitCode;
use std::time::Duration;

use config::vm::NetKind;
use config::{SpanSpec, VmSpec};
use miette::{IntoDiagnostic, Result, miette};

use registry::monitor::Batch;

use super::execution_site::{self, RequiredIsolation};
use super::flags::{self, RunArgs};
use super::template::{self, Warm};
use super::{check, host_file, hosts};
use crate::remote;

/// Starts the VMs; returns the exit status of the first that failed.
pub fn run(args: &RunArgs) -> Result<ExitCode> {
    if args.scope {
        return Err(scope::enter());
    }
    let spanned = args.span.as_ref().and_then(SpanSpec::cells);
    let home = args.cell.or_else(|| spanned?.first().copied());
    if let Some(code) = home.map(hosts::at_cell).transpose()?.flatten() {
        return Ok(code);
    }
    let rules = remote::rules()?;
    let mut specs = specs(args)?;
    if rules.is_some() {
        specs.iter_mut().try_for_each(name_absolutely)?;
    }
    specs.iter_mut().for_each(VmSpec::list_default_card);
    join_one_network(&mut specs);
    let vms = name(specs, args.count);
    if home.is_none()
        && let Some(code) = at_another_host(&vms)?
    {
        return Ok(code);
    }
    if let Some(code) = execution_site::enter_lab(
        args.lab,
        RequiredIsolation::of(vms.iter().map(|(_, spec)| spec), args.detach),
    )? {
        return Ok(code);
    }
    let warm = template::of_vms(&vms, args.boot_limit)?;
    let batch = Batch {
        vms: vms.clone(),
        source: warm.as_ref().map(Warm::source),
        share_between: host_file::share_between()?,
        member: None,
        names: rules.cloned(),
        boot_limit_s: args.boot_limit,
    };
    let lease = cell::monitor::start(batch, shard::PLATFORM).map_err(|error| {
        miette!(
            help = "see whether the host is out of processes",
            "the monitor does not start: {error}"
        )
    })?;
    if args.detach
        && let Some(unit) = scope::ends_with()
    {
        eprintln!(
            "mirrorball: what is left running ends with {unit}; help: `run -d --scope` leaves it running in \
             a scope of its own"
        );
    }
    let boot_limit = Duration::from_secs(args.boot_limit);
    // The monitors have opened the template.
    let parent = warm.map(Warm::into_parent);
    follow::follow(lease, vms, boot_limit, args.detach, parent)
}

/// Puts the subnet's cards without a network on one of this command alone. A VM of a share group stays on the
/// network of its group.
fn join_one_network(specs: &mut [VmSpec]) {
    // Keys of hashes are random.
    let number = RandomState::new().build_hasher().finish() as u32;
    let network = config::command_network(number);
    let alone = specs.iter_mut().filter(|spec| spec.share_group.is_none());
    let cards = alone.flat_map(|spec| spec.nets.iter_mut().flatten());
    for card in cards.filter(|card| card.kind == NetKind::Subnet && card.network.is_none()) {
        card.network = Some(network.clone());
    }
}

/// Runs this command on the host that the VM files name, if that is another host.
fn at_another_host(vms: &[(String, VmSpec)]) -> Result<Option<ExitCode>> {
    let cells: BTreeSet<u16> = vms.iter().filter_map(|(_, spec)| spec.home_cell()).collect();
    match cells.first() {
        Some(cell) if cells.len() == 1 && vms.iter().all(|(_, spec)| spec.home_cell().is_some()) => {
            hosts::at_cell(*cell)
        }
        _ => Ok(None),
    }
}

/// Makes the paths of a spec absolute: rules for names of files take no other ones.
fn name_absolutely(spec: &mut VmSpec) -> Result<()> {
    let kernel = spec.kernel.iter_mut();
    let boot = kernel.flat_map(|kernel| [&mut kernel.path, &mut kernel.initrd]);
    let disks = spec.disks.iter_mut().map(|disk| &mut disk.path);
    let folders = spec.folders.iter_mut().map(|folder| &mut folder.path);
    for path in boot.flatten().chain(disks).chain(folders) {
        *path = std::path::absolute(&*path).into_diagnostic()?;
    }
    Ok(())
}

fn specs(args: &RunArgs) -> Result<Vec<VmSpec>> {
    if !args.files.is_empty() {
        let mut specs: Vec<VmSpec> = check::read(&args.files)?
            .into_iter()
            .map(|file| file.spec)
            .collect();
        if !args.command.is_empty() {
            specs
                .iter_mut()
                .for_each(|spec| spec.command = Some(args.command.clone()));
        }
        return Ok(specs);
    }
    let spec = flags::spec(args)?;
    config::check_host(&spec, None, &remote::host_facts()?)?;
    Ok(vec![spec])
}

/// Names every VM: its own name, with a number when there are several of it, or a name made from the image's.
fn name(specs: Vec<VmSpec>, count: Option<u16>) -> Vec<(String, VmSpec)> {
    let pid = std::process::id();
    let mut vms = Vec::new();
    for (index, spec) in specs.into_iter().enumerate() {
        let base = spec.name.clone().unwrap_or_else(|| {
            let image = spec.image.as_deref().unwrap_or("vm");
            if index == 0 {
                format!("{image}-{pid}")
            } else {
                format!("{image}-{pid}-{index}")
            }
        });
        match count {
            None => vms.push((base, spec)),
            Some(count) => vms.extend((0..count).map(|number| (format!("{base}-{number}"), spec.clone()))),
        }
    }
    vms
}
