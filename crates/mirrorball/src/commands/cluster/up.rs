//! `mirrorball cluster up`: starts the cells of this host.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cell::cluster::guard::last_error::last_error;
use cell::cluster::hosts::{Hosts, warning};
use cell::cluster::membership;
use config::cluster::{CellPlan, ETCD_KEYS, Site};
use hostinfo::facts;
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client::Connection;
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse, Status};
use urpc::tls::Identity;

use super::background::{measure_meanwhile, start};
use super::cells::cells;
use super::plan::{Planned, planned};
use super::status::print;
use super::{POLL_INTERVAL, foreground, keys, notify, scope, users};
use crate::commands::execution_site::{LabChoice, RequiredIsolation, enter_lab};
use crate::commands::vm;

/// Time limit for all cells to start and link to all others.
const UP_LIMIT: Duration = Duration::from_secs(20);
/// Time without a process of a cell after which it counts as one that does not start. Its guard pauses for at
/// most a second between two attempts.
const DEAD_LIMIT: Duration = Duration::from_secs(5);
/// As [`UP_LIMIT`], for several hosts: etcd may still be starting.
const UP_LIMIT_HOSTS: Duration = Duration::from_secs(60);

/// Starts the cells by `cluster up`, here or in the lab, in a control group of their own where a service
/// manager makes one.
pub(super) fn by_command(
    file: Option<&PathBuf>,
    count: Option<u16>,
    name: Option<&str>,
    foreground: bool,
    lab: LabChoice,
) -> Result<ExitCode> {
    if let Some(code) = enter_lab(lab, RequiredIsolation::default())? {
        return Ok(code);
    }
    scope::enter(foreground)?;
    up(file, count, name, foreground)
}

/// Starts the cells. The caller has made sure that this machine can run guests ([`enter_lab`]).
pub(super) fn up(
    file: Option<&PathBuf>,
    count: Option<u16>,
    name: Option<&str>,
    foreground: bool,
) -> Result<ExitCode> {
    if foreground {
        // Before there are cells, which a signal would leave behind.
        foreground::catch_signals()?;
    }
    // The cells have the same environment.
    process_log::Settings::of_environment().into_diagnostic()?;
    let planned = planned(file, count, name)?;
    if let Some(site) = &planned.site
        && !check_host(site)?
    {
        return foreground::end(&Files::open().into_diagnostic()?);
    }
    let files = Files::open().into_diagnostic()?;
    // A cell that has no former facts would not start with a wrong file.
    facts::InForce::read(&files)
        .map_err(|error| miette!(help = "correct the line, or remove the file", "{error}"))?;
    let StartPlan { cells, to_start } = begin(&files, &planned, foreground)?;
    for number in to_start {
        start(&files, number).map_err(|error| {
            miette!(
                help = "`mirrorball cluster down` ends the cells that have started",
                "cell {number} does not start: {error}"
            )
        })?;
    }
    let Planned { site, users, .. } = planned;
    let limit = if site.is_some() { UP_LIMIT_HOSTS } else { UP_LIMIT };
    // A failed cell has no process until the next `up` after `down`.
    let met: Vec<CellPlan> = cells
        .into_iter()
        .filter(|cell| !files.cell(cell.number).has_failed())
        .collect();
    let Some(status) = wait_until_met(&files, &met, limit)? else {
        return foreground::end(&files);
    };
    if !users::wait_until_admitted(&files, &users)? {
        return foreground::end(&files);
    }
    print(&status, &users);
    scope::report_absent_limits();
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
    // A start may take long. A VM that is being started when this process ends, ends with it.
    let starts = std::thread::Builder::new().name("starts".into());
    starts.spawn(vm::start_all_beside_threads).into_diagnostic()?;
    foreground::stay(&files)
}

/// Checks that this host can run its cells of a cluster of several hosts: a cell without keys or memory would
/// crash repeatedly. Prints warnings on certificates. False if a signal asked a foreground process to end
/// meanwhile.
fn check_host(site: &Site) -> Result<bool> {
    let hosts = Hosts::open(site.clone()).map_err(|error| miette!("{error}"))?;
    hosts.warning().iter().for_each(|warning| eprintln!("{warning}"));
    if site.runs_etcd {
        let etcd = Identity::load(&site.keys, ETCD_KEYS).map_err(|error| miette!("{error}"))?;
        warning("etcd", etcd.end())
            .iter()
            .for_each(|warning| eprintln!("{warning}"));
    }
    if !check_age(site)? {
        return Ok(false);
    }
    hosts.with_shared_memory().map_err(|error| {
        miette!(
            help = "`shared_memory` is a file that this user may write, of memory that the hosts share, \
                    and large enough",
            "{error}"
        )
    })?;
    Ok(true)
}

/// All cells of this host, and those that have to be started.
struct StartPlan {
    cells: Vec<CellPlan>,
    /// Numbers of the cells to start.
    to_start: Vec<u16>,
}

/// Records the planned cluster, or continues one that is up in part, or in whole if this process stays in the
/// foreground.
///
/// # Errors
/// If another cluster is up.
fn begin(files: &Files, planned: &Planned, foreground: bool) -> Result<StartPlan> {
    let occupied = files.occupied().into_diagnostic()?;
    let former = files.plan().into_diagnostic()?;
    if occupied.is_empty() {
        users::check(&planned.cells, &planned.users)?;
        files.admit(&planned.users).into_diagnostic()?;
        files.set_borrowing(&planned.borrowing).into_diagnostic()?;
        files.set_pressure(&planned.pressure).into_diagnostic()?;
        files.set_scheduling(&planned.scheduling).into_diagnostic()?;
        files.set_regions(&planned.regions).into_diagnostic()?;
        files.set_networks(&planned.networks).into_diagnostic()?;
        files
            .create(&planned.cells, planned.site.as_ref())
            .into_diagnostic()?;
        return Ok(StartPlan {
            cells: planned.cells.clone(),
            to_start: planned.cells.iter().map(|cell| cell.number).collect(),
        });
    }
    let missing = missing(files, &former, &occupied);
    let is_same = is_same_plan(&former, &planned.cells, &planned.shares)
        && files.site().into_diagnostic()? == planned.site
        && files.users().into_diagnostic()? == planned.users
        && files.borrowing().into_diagnostic()? == planned.borrowing
        && files.pressure().into_diagnostic()? == planned.pressure
        && files.scheduling().into_diagnostic()? == planned.scheduling
        && files.regions().into_diagnostic()? == planned.regions
        && files.networks().into_diagnostic()? == planned.networks;
    if !is_same || !foreground && missing.is_empty() {
        return Err(miette!(
            help = "end it with `mirrorball cluster down`",
            "a cluster of {} is up already",
            cells(occupied.len())
        ));
    }
    for number in &missing {
        files.cell(*number).begin_again().into_diagnostic()?;
    }
    Ok(StartPlan {
        cells: former,
        to_start: missing,
    })
}

/// Whether the plan of the running cluster is the planned one, so that this process continues with it. The
/// memory of cells in `shares` is what the host had when they started, which may be a little more or less
/// than it has now.
fn is_same_plan(running: &[CellPlan], planned: &[CellPlan], shares: &BTreeSet<u16>) -> bool {
    let is_same = |(running, planned): (&CellPlan, &CellPlan)| {
        let memory_bytes = match shares.contains(&planned.number) {
            true => running.memory_bytes,
            false => planned.memory_bytes,
        };
        let planned = CellPlan {
            memory_bytes,
            ..planned.clone()
        };
        *running == planned
    };
    running.len() == planned.len() && running.iter().zip(planned).all(is_same)
}

/// Numbers of the cells of a running cluster that have neither a process nor a guard, and have not failed.
fn missing(files: &Files, plan: &[CellPlan], occupied: &[CellPlan]) -> Vec<u16> {
    let numbers = plan.iter().map(|cell| cell.number);
    let is_missing = |number: &u16| {
        !occupied.iter().any(|cell| cell.number == *number) && !files.cell(*number).has_failed()
    };
    numbers.filter(is_missing).collect()
}

/// Checks that this host has not left the cluster, and that the file lists every live cell: otherwise the
/// file is outdated. False if a signal asked a foreground process to end meanwhile.
fn check_age(site: &Site) -> Result<bool> {
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
            return Ok(true);
        };
        if foreground::is_to_end() {
            return Ok(false);
        }
        if Instant::now() > deadline {
            return Err(miette!(
                help = "copy the cluster file from a host that is up: a host has joined since this one was \
                        written",
                "the cluster has a cell {unknown}, and this cluster file does not"
            ));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Waits until every cell has a link to all others. None if a signal asked a foreground process to end
/// meanwhile.
fn wait_until_met(files: &Files, plan: &[CellPlan], limit: Duration) -> Result<Option<Status>> {
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
    let mut ran = Instant::now();
    loop {
        let mut last = None;
        let missing = plan.iter().find(|cell| {
            last = met(cell);
            last.is_none()
        });
        let number = match (missing, last) {
            (None, Some(status)) => return Ok(Some(status)),
            _ if foreground::is_to_end() => return Ok(None),
            (Some(cell), _) => cell.number,
            (None, None) => {
                return Err(miette!(
                    help = "give this host a cell in the cluster's file",
                    "the cluster has no cell to wait for"
                ));
            }
        };
        let (cell, now) = (files.cell(number), Instant::now());
        if cell.runs() {
            ran = now;
        }
        if now > deadline || now > ran + DEAD_LIMIT {
            let reason = last_error(&cell.log()).unwrap_or_else(|| "see its log".to_owned());
            return Err(match now > deadline {
                true => miette!(
                    help = "end the others with `mirrorball cluster down`",
                    "cell {number} has not met the others after {} s: {reason}",
                    limit.as_secs()
                ),
                false => miette!(
                    help = "end the cluster with `mirrorball cluster down` before the next `up`",
                    "cell {number} does not start: {reason}",
                ),
            });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(number: u16, memory_bytes: u64) -> CellPlan {
        CellPlan {
            number,
            host: None,
            cpus: vec![usize::from(number)],
            nodes: vec![0],
            memory_bytes,
        }
    }

    #[test]
    fn plan_is_the_same_though_the_host_has_another_amount_of_memory() {
        let running = [cell(0, 1 << 30), cell(1, 2 << 30)];
        let planned = [cell(0, 1 << 30), cell(1, (2 << 30) - 4096)];
        assert!(is_same_plan(&running, &planned, &BTreeSet::from([1])));
        // The file names the amount.
        assert!(!is_same_plan(&running, &planned, &BTreeSet::from([0])));
        let mut others = planned.clone();
        others[1].cpus = vec![7];
        for other in [&others[..], &planned[..1], &[cell(0, 0), cell(2, 0)]] {
            assert!(
                !is_same_plan(&running, other, &BTreeSet::from([0, 1, 2])),
                "{other:?}"
            );
        }
    }

    #[test]
    fn missing_cells_have_no_guard_and_have_not_failed() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::at(folder.path());
        let plan: Vec<CellPlan> = (0..4).map(|number| cell(number, 1 << 30)).collect();
        files.create(&plan, None).unwrap();
        let _process = files.cell(0).claim(0).unwrap();
        let _guard = files.cell(1).claim_guard(1).unwrap();
        files.cell(2).fail().unwrap();
        let occupied = files.occupied().unwrap();
        assert_eq!(missing(&files, &plan, &occupied), [3]);
    }
}
