//! Operations on the cells of this host.

use std::time::{Duration, Instant};

use config::cluster::CellPlan;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use registry::cluster::client::Connection;
use registry::cluster::files::{CellFiles, Files};
use registry::cluster::interface::{Answer, Ask, Vcpu};
use registry::control;
use registry::vms::{Record, Registry};

use crate::failure::{Failure, Kind};

/// Time limit for a cell's report of its vCPUs: each of its spanning VMs may take 5 s.
const VCPUS_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the VMs that depend on a failed cell to end.
const FAIL_LIMIT: Duration = Duration::from_secs(60);
/// Interval between two requests to a cell that has not yet detected the failure.
const INTERVAL: Duration = Duration::from_millis(5);

type Result<T> = std::result::Result<T, Failure>;

/// The vCPUs of the VMs in this host's cells.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Vcpus {
    /// The vCPUs, by VM and number.
    pub vcpus: Vec<Vcpu>,
    /// VMs whose vCPUs are not known now, each with the reason.
    pub missing: Vec<(String, String)>,
}

/// The loss of a cell.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Lost {
    /// The names of the VMs that depended on the cell.
    pub ended: Vec<String>,
    /// The time until all of them had ended.
    pub recovery: Duration,
}

/// The files of the cluster, and the cells of this host.
fn cells() -> Result<(Files, Vec<CellPlan>)> {
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

fn does_not_answer(cell: u16, error: &std::io::Error) -> Failure {
    Failure::new(Kind::Late, format!("cell {cell} does not answer: {error}"))
        .help("try again when `mirrorball cluster status` shows that it runs")
}

/// Has the cell `lender` lend `bytes` of its memory to the cell `to` of this host.
///
/// # Errors
/// If there is no such cell here, or it refuses or does not answer.
pub fn lend(lender: u16, to: u16, bytes: u64) -> Result<()> {
    ask_lender(lender, &Ask::Lend { to, bytes })
}

/// Has the cell `lender` take back `bytes` of the memory that it has lent to the cell `from`.
///
/// # Errors
/// As [`lend`].
pub fn reclaim(lender: u16, from: u16, bytes: u64) -> Result<()> {
    ask_lender(lender, &Ask::Reclaim { from, bytes })
}

fn ask_lender(lender: u16, ask: &Ask) -> Result<()> {
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
        Answer::Done => Ok(()),
        Answer::Refused { why } => Err(Failure::new(Kind::Refused, why)),
        other => Err(Failure::host(format!("an answer to another question: {other:?}"))),
    }
}

/// The vCPUs that the host's cells know of.
///
/// # Errors
/// If no cluster is up here, or a cell that has not failed does not answer.
pub fn vcpus() -> Result<Vcpus> {
    let (files, plan) = cells()?;
    let mut all = Vcpus::default();
    for cell in plan.iter().map(|cell| cell.number) {
        let own = files.cell(cell);
        if own.has_failed() {
            continue;
        }
        let known = ask_vcpus(&own).map_err(|error| does_not_answer(cell, &error))?;
        all.vcpus.extend(known.vcpus);
        all.missing.extend(known.missing);
    }
    all.vcpus
        .sort_by(|one, other| (&one.vm, one.vcpu).cmp(&(&other.vm, other.vcpu)));
    Ok(all)
}

fn ask_vcpus(cell: &CellFiles) -> std::io::Result<Vcpus> {
    let mut connection = Connection::open(cell)?;
    connection.limit_wait(VCPUS_LIMIT)?;
    match connection.ask(&Ask::Vcpus)? {
        Answer::Vcpus { vcpus, missing } => Ok(Vcpus { vcpus, missing }),
        Answer::Refused { why } => Err(std::io::Error::other(why)),
        other => Err(std::io::Error::other(format!(
            "an answer to another question: {other:?}"
        ))),
    }
}

/// Makes a cell of this host fail, and returns when the VMs that depended on it have ended.
///
/// # Errors
/// If there is no such cell here, it has failed already, it can't be ended, or a survivor does not recover within 60 s.
pub fn fail(number: u16) -> Result<Lost> {
    let (files, plan) = cells()?;
    if !plan.iter().any(|cell| cell.number == number) {
        let unknown = format!("this host has no cell {number}; it has {}", numbers(&plan));
        return Err(Failure::new(Kind::Unknown, unknown).help("a cell fails by a command on its own host"));
    }
    let cell = files.cell(number);
    if cell.has_failed() {
        let again = Failure::new(Kind::Refused, format!("cell {number} has failed already"));
        return Err(again.help("`mirrorball cluster down` and `mirrorball cluster up` begin it anew"));
    }
    let dependents = dependents(number)?;
    let begun = Instant::now();
    // From now on no process of it starts again. Who notices the end of the last one knows what it means.
    cell.fail().map_err(Failure::host)?;
    if !end_process(&cell) {
        return Err(Failure::new(Kind::Late, format!("cell {number} can't be ended"))
            .help("its process runs on, and does not answer: see `mirrorball cluster status`, and end it"));
    }
    let survivors: Vec<u16> = plan
        .iter()
        .map(|cell| cell.number)
        .filter(|survivor| *survivor != number && files.cell(*survivor).runs())
        .collect();
    for survivor in &survivors {
        recovered(&files.cell(*survivor), number).map_err(|error| {
            let what = format!("cell {survivor} does not recover from the failure of cell {number}: {error}");
            Failure::new(Kind::Late, what).help("see `mirrorball cluster status`")
        })?;
    }
    if survivors.is_empty() {
        end_all(number)?;
    }
    Ok(Lost {
        ended: dependents.into_iter().map(|record| record.name).collect(),
        recovery: begun.elapsed(),
    })
}

fn dependents(cell: u16) -> Result<Vec<Record>> {
    let records = Registry::open().and_then(|registry| registry.list());
    let records = records.map_err(Failure::host)?;
    Ok(records
        .into_iter()
        .filter(|record| record.depends_on(cell))
        .collect())
}

/// Kills the cell's process, if there is one. Returns whether none is left.
fn end_process(cell: &CellFiles) -> bool {
    let deadline = Instant::now() + FAIL_LIMIT;
    // Its guard may be starting one just now, which finds that the cell has failed.
    while cell.runs() && Instant::now() < deadline {
        let pid = Connection::open(cell).and_then(|connection| connection.peer());
        // Not this process's own group.
        if let Ok(pid @ 1..) = pid
            && cell.runs()
        {
            // One that has ended since is what is wanted.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        std::thread::sleep(INTERVAL);
    }
    !cell.runs()
}

/// Waits until a survivor has recovered from the failure.
fn recovered(survivor: &CellFiles, failed: u16) -> std::io::Result<()> {
    let deadline = Instant::now() + FAIL_LIMIT;
    // One that fails too meanwhile recovers from nothing.
    while !survivor.has_failed() {
        let answer = Connection::open(survivor).and_then(|mut connection| {
            connection.limit_wait(deadline.saturating_duration_since(Instant::now()))?;
            connection.ask(&Ask::Recover { cell: failed })
        });
        let why = match answer {
            Ok(Answer::Done) => return Ok(()),
            Ok(Answer::Refused { why }) => std::io::Error::other(why),
            Ok(other) => std::io::Error::other(format!("an answer to another question: {other:?}")),
            Err(error) => error,
        };
        if Instant::now() > deadline {
            return Err(why);
        }
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

/// Ends the VMs that depend on the cell, when no other cell can.
fn end_all(cell: u16) -> Result<()> {
    for record in dependents(cell)? {
        let folder = Registry::open()
            .and_then(|registry| registry.folder_of(&record.name))
            .map_err(Failure::host)?;
        control::ask(&folder, &control::Request::Kill, Some(FAIL_LIMIT))
            .map_err(|error| Failure::host(format!("{}: {error}", record.name)))?;
    }
    Ok(())
}
