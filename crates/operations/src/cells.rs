//! Operations on the cells of this host.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use config::cluster::CellPlan;
use registry::cluster::client::Connection;
use registry::cluster::files::{CellFiles, Files};
use registry::cluster::interface::{CellRequest, CellResponse, CpuLending, CpuQueue, Vcpu};

use crate::failure::{Failure, Kind};

/// Time limit for a cell's report of its vCPUs: each of its spanning VMs may take 5 s.
const VCPUS_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for a cell's report of its moves between cells: it replies at once.
const LENDING_LIMIT: Duration = Duration::from_secs(2);

type Result<T> = std::result::Result<T, Failure>;

/// The vCPUs of the VMs in this host's cells.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Vcpus {
    /// The vCPUs, by VM and number.
    pub vcpus: Vec<Vcpu>,
    /// VMs whose vCPUs are unknown now, each with the reason.
    pub missing: Vec<(String, String)>,
    /// Run queues of the CPUs of cells that schedule them.
    pub queues: Vec<CpuQueue>,
    /// Moves between cells by decision of the cell; none if it decides on none, or if these are several
    /// cells.
    pub lending: Option<CpuLending>,
}

/// Returns the cluster's files and the cells of this host.
pub(crate) fn cells() -> Result<(Files, Vec<CellPlan>)> {
    let files = Files::open().map_err(Failure::host)?;
    let plan = files.plan().map_err(Failure::host)?;
    if plan.is_empty() {
        let none = Failure::new(Kind::Unknown, "no cluster is up here");
        return Err(none.help("start one with `mirrorball cluster up`"));
    }
    Ok((files, plan))
}

fn numbers(plan: &[CellPlan]) -> String {
    let numbers: Vec<String> = plan.iter().map(|cell| cell.number.to_string()).collect();
    numbers.join(", ")
}

pub(crate) fn does_not_answer(cell: u16, error: &std::io::Error) -> Failure {
    Failure::new(Kind::Late, format!("cell {cell} does not answer: {error}"))
        .help("try again when `mirrorball cluster status` shows that it runs")
}

/// Lends `bytes` of the memory of the cell `lender` to the cell `to` of this host.
///
/// # Errors
/// If there is no such cell here, or the cell refuses or does not reply.
pub fn lend(lender: u16, to: u16, bytes: u64) -> Result<()> {
    ask_lender(lender, &CellRequest::Lend { to, bytes })
}

/// Reclaims `bytes` of the memory that the cell `lender` has lent to the cell `from`.
///
/// # Errors
/// As [`lend`].
pub fn reclaim(lender: u16, from: u16, bytes: u64) -> Result<()> {
    ask_lender(lender, &CellRequest::Reclaim { from, bytes })
}

fn ask_lender(lender: u16, ask: &CellRequest) -> Result<()> {
    let (files, plan) = cells()?;
    if plan.iter().all(|cell| cell.number != lender) {
        let unknown = format!(
            "there is no cell {lender} on this host; there is {}",
            numbers(&plan)
        );
        return Err(Failure::new(Kind::Unknown, unknown)
            .help("memory is lent within a host; give the command on the host of the cell"));
    }
    let answer = Connection::open(&files.cell(lender)).and_then(|mut cell| cell.ask(ask));
    match answer.map_err(|error| does_not_answer(lender, &error))? {
        CellResponse::Done => Ok(()),
        CellResponse::Refused { why } => Err(Failure::new(Kind::Refused, why)),
        other => Err(Failure::host(other.unexpected())),
    }
}

/// Returns the vCPUs in the cells of this host.
///
/// # Errors
/// If no cluster is up here, or a cell that has not failed does not reply.
pub fn vcpus() -> Result<Vcpus> {
    let (files, plan) = cells()?;
    let mut all = Vcpus::default();
    for cell in plan.iter().map(|cell| cell.number) {
        let own = files.cell(cell);
        if own.has_failed() {
            continue;
        }
        let known = ask_vcpus(&own, VCPUS_LIMIT).map_err(|error| does_not_answer(cell, &error))?;
        all.vcpus.extend(known.vcpus);
        all.missing.extend(known.missing);
        all.queues.extend(known.queues);
    }
    all.vcpus
        .sort_by(|one, other| (&one.vm, one.vcpu).cmp(&(&other.vm, other.vcpu)));
    Ok(all)
}

/// Returns the moves of vCPUs between cells by decision, of each cell of this host that decides on some and
/// replies within 2 s. Empty where the cluster file does not say `lend_cpus`.
///
/// # Errors
/// If the cluster's files can't be read.
pub fn cpu_lending() -> Result<BTreeMap<u16, CpuLending>> {
    let files = Files::open().map_err(Failure::host)?;
    if !files.scheduling().map_err(Failure::host)?.lend_cpus {
        return Ok(BTreeMap::new());
    }
    let plan = files.running().map_err(Failure::host)?;
    let cells: Vec<_> = plan
        .iter()
        .map(|cell| (cell.number, files.cell(cell.number)))
        .collect();
    // One that hangs delays no other one.
    Ok(thread::scope(|scope| {
        let asked: Vec<_> = cells
            .iter()
            .filter_map(|(number, cell)| {
                let report = thread::Builder::new().spawn_scoped(scope, || ask_cpu_lending(cell));
                Some((*number, report.ok()?))
            })
            .collect();
        let reports = asked.into_iter();
        reports
            .filter_map(|(number, report)| Some((number, report.join().ok()??)))
            .collect()
    }))
}

fn ask_cpu_lending(cell: &CellFiles) -> Option<CpuLending> {
    let mut connection = Connection::open(cell).ok()?;
    connection.limit_wait(LENDING_LIMIT).ok()?;
    match connection.ask(&CellRequest::CpuLending) {
        Ok(CellResponse::CpuLending(lending)) => Some(lending),
        _ => None,
    }
}

/// Returns the vCPUs of a cell's VMs, in no order. `limit` is the time for each response.
///
/// # Errors
/// If the cell refuses, or does not reply in time.
pub(crate) fn ask_vcpus(cell: &CellFiles, limit: Duration) -> std::io::Result<Vcpus> {
    let mut connection = Connection::open(cell)?;
    connection.limit_wait(limit)?;
    match connection.ask(&CellRequest::Vcpus)? {
        CellResponse::Vcpus {
            vcpus,
            missing,
            queues,
            lending,
        } => Ok(Vcpus {
            vcpus,
            missing,
            queues,
            lending,
        }),
        CellResponse::Refused { why } => Err(std::io::Error::other(why)),
        other => Err(std::io::Error::other(other.unexpected())),
    }
}

/// Checks that the cell is on this host.
///
/// # Errors
/// If it is not, or no cluster is up here.
pub fn check(number: u16) -> Result<()> {
    let (_, plan) = cells()?;
    if plan.iter().any(|cell| cell.number == number) {
        return Ok(());
    }
    let unknown = format!("this host has no cell {number}; it has {}", numbers(&plan));
    Err(Failure::new(Kind::Unknown, unknown))
}
