//! `mirrorball cluster up`: starts the cells of this host.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cell::cluster::hosts::{Hosts, warning};
use cell::cluster::membership;
use config::cluster::{CellPlan, ETCD_KEYS, Site, UserPlan};
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
use super::{POLL_INTERVAL, foreground, keys, notify, users};
use crate::commands::execution_site::{LabChoice, RequiredIsolation, enter_lab};
use crate::commands::vm;

/// Time limit for all cells to start and link to all others.
const UP_LIMIT: Duration = Duration::from_secs(20);
/// As [`UP_LIMIT`], for several hosts: etcd may still be starting.
const UP_LIMIT_HOSTS: Duration = Duration::from_secs(60);

pub(super) fn up(
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
