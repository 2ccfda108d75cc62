//! `mirrorball cluster leave`: removes this host from a running cluster.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cell::cluster::hosts::Hosts;
use cell::cluster::membership;
use config::cluster::CellPlan;
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client::{self, Connection};
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse, SHARD_SEPARATOR, owner_of};
use registry::control::{Request, ask};
use registry::vms::Registry;

use super::cells::{cells_here, one_host};
use super::change::{Change, members, own_file, push};
use super::down::end_cells;
use super::plan::read;
use super::users;

/// Poll interval for running VMs.
const INTERVAL: Duration = Duration::from_millis(200);
/// Time limit for a stopped VM to power off, in seconds. Then it is killed.
const STOP_LIMIT_S: u64 = 30;
/// Time limit for stopped VMs to be gone.
const STOPPED_LIMIT: Duration = Duration::from_secs(STOP_LIMIT_S + 30);

/// Waits up to `within` for the VMs here to end, then ends this host's cells, and removes the host from the
/// cluster's file everywhere.
pub(super) fn leave(within: Duration, stop: bool) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    let plan = match cells_here(&files)? {
        ControlFlow::Continue(plan) => plan,
        ControlFlow::Break(code) => return Ok(code),
    };
    let site = files.site().into_diagnostic()?.ok_or_else(one_host)?;
    let here = site.here.clone();
    let file = own_file(&site)?;
    let (spec, ..) = read(&file)?;
    let (text, _) = spec.without_host(&here)?;
    let hosts = Hosts::open(site.clone()).map_err(|error| miette!("{error}"))?;
    // Without etcd the others could not agree that these cells are gone.
    members(&site)?;

    let numbers: Vec<u16> = plan.iter().map(|cell| cell.number).collect();
    cordon(&files, &numbers, true)?;
    let deadline = Instant::now() + within;
    let mut running = wait(&files, &numbers, deadline)?;
    if stop && !running.is_empty() {
        stop_all(&numbers)?;
        running = wait(&files, &numbers, Instant::now() + STOPPED_LIMIT)?;
    }
    if !running.is_empty() {
        cordon(&files, &numbers, false)?;
        let users = files.users().into_diagnostic()?;
        return Err(miette!(
            help = help(&running),
            "VMs still run on {here}: {}",
            users::names(&running, &users).join(", ")
        ));
    }

    // Live cells that are missing in the others' file would declare the others dead. So they end first.
    end_cells(&files)?;
    membership::retire(&site, &numbers).map_err(|error| {
        miette!(
            help = "give the command again when etcd answers, after `mirrorball cluster up FILE`",
            "the cells have ended, and the cluster does not know that {here} leaves: {error}"
        )
    })?;
    let others: Vec<_> = members(&site)?;
    let others: Vec<_> = others.into_iter().filter(|host| host.name != here).collect();
    let change = Change {
        file: Some(text),
        revoked: None,
    };
    let failed = push(&hosts, &others, &change)?;
    files.remove().into_diagnostic()?;
    if failed.is_empty() {
        println!(
            "{here} has left; `mirrorball cluster remove FILE {here}`, where authority.key is, revokes its \
             key, too"
        );
        return Ok(ExitCode::SUCCESS);
    }
    for (name, why) in &failed {
        eprintln!(
            "mirrorball: host {name} has not taken {here} out of its file: {why}; copy the file from a host \
             that has"
        );
    }
    Ok(ExitCode::FAILURE)
}

/// Stops the VMs of this user in the cells of `plan`, and waits until they have ended. The cells are cordoned
/// meanwhile.
pub(super) fn stop_vms(files: &Files, plan: &[CellPlan]) -> Result<()> {
    let cells: Vec<u16> = plan.iter().map(|cell| cell.number).collect();
    let cordoned: Vec<u16> = cells
        .iter()
        .copied()
        .filter(|number| files.cell(*number).is_cordoned())
        .collect();
    let others: Vec<u16> = cells
        .iter()
        .copied()
        .filter(|cell| !cordoned.contains(cell))
        .collect();
    let stopped = cordon(files, &others, true)
        .and_then(|()| stop_all(&cells))
        .and_then(|()| wait(files, &cells, Instant::now() + STOPPED_LIMIT));
    let failed = match stopped {
        Ok(left) if left.is_empty() => return Ok(()),
        Ok(left) => miette!(help = help(&left), "these VMs still run: {}", left.join(", ")),
        Err(error) => error,
    };
    // The cells run on, so they take VMs again.
    match cordon(files, &others, false) {
        Ok(()) => Err(failed),
        Err(error) => Err(miette!(
            help = "give it again, or `mirrorball cluster uncordon CELL`",
            "{failed}; and the cells take no new VM: {error}"
        )),
    }
}

/// Returns help for VMs that still run, by their names in the cluster.
fn help(running: &[String]) -> String {
    let mut help = "end them, wait for longer with `--within SECONDS`, or stop them with `--stop`; the host \
                    takes VMs again"
        .to_owned();
    if running.iter().any(|name| owner_of(name).is_some()) {
        // Root sends no order to another user's VM.
        help.push_str("; those of other users end with `mirrorball cluster evict USER:VM`");
    }
    help
}

/// Cordons the cells, or ends their cordon.
fn cordon(files: &Files, cells: &[u16], cordoned: bool) -> Result<()> {
    for number in cells {
        let cell = files.cell(*number);
        let answer = Connection::open(&cell).and_then(|mut cell| cell.ask(&CellRequest::Cordon { cordoned }));
        match answer {
            Ok(CellResponse::Done) => {}
            Ok(CellResponse::Refused { why }) => return Err(miette!("{why}")),
            Ok(other) => return Err(miette!("{}", other.unexpected())),
            // A dead cell admits no VM; its VMs are found below.
            Err(_) if !cell.runs() => {}
            Err(error) => {
                return Err(miette!(
                    help = "try again when `mirrorball cluster status` shows that it runs",
                    "cell {number} does not answer: {error}"
                ));
            }
        }
    }
    Ok(())
}

/// Waits until no VM and no shard is in these cells, and returns the names of those left at the deadline.
fn wait(files: &Files, cells: &[u16], deadline: Instant) -> Result<Vec<String>> {
    loop {
        let running = running(files, cells)?;
        if running.is_empty() || Instant::now() >= deadline {
            return Ok(running.into_iter().collect());
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Returns the VMs in these cells, by the cells, the host's registry, and the records of users' VMs.
fn running(files: &Files, cells: &[u16]) -> Result<BTreeSet<String>> {
    let status = client::status(files).into_diagnostic()?.unwrap_or_default();
    let here = status
        .cells
        .into_iter()
        .filter(|cell| cells.contains(&cell.plan.number));
    let mut names: BTreeSet<String> = here
        .flat_map(|cell| cell.vms)
        .map(|name| match name.split_once(SHARD_SEPARATOR) {
            Some((vm, _)) => vm.to_owned(),
            None => name,
        })
        .collect();
    names.extend(of_users(files, cells)?);
    for record in Registry::open().into_diagnostic()?.list().into_diagnostic()? {
        if cells.iter().any(|cell| record.depends_on(*cell)) {
            names.insert(record.name);
        }
    }
    Ok(names)
}

/// Returns the VMs of admitted users in these cells, whether or not the cells reply.
fn of_users(files: &Files, cells: &[u16]) -> Result<impl Iterator<Item = String>> {
    let vms = files.user_vms().into_diagnostic()?.into_iter();
    let here = vms.filter(|vm| cells.iter().any(|cell| vm.depends_on(*cell)));
    Ok(here.map(|vm| vm.owned_name()))
}

/// Presses the power buttons of all VMs in these cells concurrently.
fn stop_all(cells: &[u16]) -> Result<()> {
    let registry = Registry::open().into_diagnostic()?;
    let mut stops = Vec::new();
    for record in registry.list().into_diagnostic()? {
        if !record.cell.is_some_and(|cell| cells.contains(&cell)) {
            continue;
        }
        let folder = registry.folder_of(&record.name).into_diagnostic()?;
        let request = Request::Stop {
            limit_s: STOP_LIMIT_S,
        };
        let stop = move || ask(&folder, &request, Some(STOPPED_LIMIT));
        let stop = std::thread::Builder::new().name("stop".into()).spawn(stop);
        stops.push((record.name, stop.into_diagnostic()?));
    }
    for (name, stop) in stops {
        if let Ok(Err(error)) = stop.join() {
            eprintln!("mirrorball: {name} is not stopped: {error}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use registry::cluster::interface::VmShare;
    use registry::cluster::user_vms::UserVm;

    use super::*;

    #[test]
    fn vm_of_another_user_is_named_although_its_cell_does_not_answer() {
        let runtime = tempfile::tempdir().unwrap();
        let files = Files::at(runtime.path());
        for (name, cell) in [("web", 1), ("db", 2)] {
            let share = VmShare {
                vcpus: 1,
                memory_bytes: 1 << 30,
                ..VmShare::default()
            };
            let vm = UserVm {
                uid: 1001,
                name: name.to_owned(),
                cell,
                share,
                borrowed: Vec::new(),
                session: 1,
                group: None,
            };
            files.keep_user_vm(&vm).unwrap();
        }
        let here: Vec<String> = of_users(&files, &[0, 1]).unwrap().collect();
        assert_eq!(here, ["1001:web"]);
        assert!(help(&here).contains("cluster evict USER:VM"));
        assert!(!help(&["web".to_owned()]).contains("evict"));
    }
}
