//! `mirrorball cluster status`: shows the cells and their VMs.

use std::process::ExitCode;

use cell::cluster::hosts::Hosts;
use config::cluster::{RegionAccess, UserPlan};
use config::cpulist;
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client;
use registry::cluster::files::Files;
use registry::cluster::interface::{CellStatus, CpuLending, LentCpu, LentMemory, RegionStatus, Status};
use registry::vms::{Record, Registry};

use super::cells::no_cluster;
use super::{keys, users};
use crate::commands::execution_site::in_lab;

pub(super) fn status(json: bool) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    let known = client::status(&files).map_err(|error| {
        miette!(
            help = "see the logs of the cells in the runtime directory, or try again",
            "the cells do not answer: {error}"
        )
    })?;
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
        // A cell that does not reply is in the table already.
        for (cell, counts) in operations::cells::cpu_lending().unwrap_or_default() {
            println!("{}", lending_line(cell, &counts));
        }
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
                "{}: served by process {} instead of cell {number}; `mirrorball cluster adopt {}` has the \
                 cell serve it",
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

pub(super) fn print(status: &Status, users: &[UserPlan]) {
    println!(
        "{:<5} {:<10} {:<8} {:>8} {:<12} {:<8} {:>8} {:>8} {:>8} {:>6}  VMS",
        "CELL", "HOST", "STATE", "PID", "CPUS", "NODES", "MEMORY", "GIVEN", "LOANS", "VCPUS"
    );
    for cell in &status.cells {
        println!("{}", line(cell, users));
    }
    for cell in &status.cells {
        for loan in &cell.lent {
            println!("{}", loan_line(cell, *loan));
        }
        for lent in &cell.lent_cpus {
            println!("{}", lent_cpu_line(cell, lent));
        }
    }
    for cell in &status.cells {
        for region in &cell.regions {
            println!("{}", region_line(cell, region));
        }
    }
}

/// A shared region: its memory, and the access of its members.
fn region_line(cell: &CellStatus, region: &RegionStatus) -> String {
    let members: Vec<String> = region
        .members
        .iter()
        .map(|member| {
            let may = match member.access {
                RegionAccess::Read => "reads",
                RegionAccess::Write => "writes",
            };
            format!("{} {may} in cell {}", member.vm, member.cell)
        })
        .collect();
    let members = match members[..] {
        [] => "its last member ends".to_owned(),
        _ => members.join(", "),
    };
    format!(
        "cell {} shares region {}, {}M: {members}",
        cell.plan.number,
        region.name,
        region.bytes >> 20
    )
}

/// A loan: how much of it the borrower requested by itself, and how much a command lent.
fn loan_line(cell: &CellStatus, loan: LentMemory) -> String {
    let LentMemory { cell: to, bytes } = loan;
    let requested = cell.lent_on_request.iter().find(|part| part.cell == to);
    let requested = requested.map_or(0, |part| part.bytes.min(bytes));
    let why = match requested {
        0 => "by command".to_owned(),
        _ if requested == bytes => "on its request".to_owned(),
        _ => format!("{}M of it on its request, the rest by command", requested >> 20),
    };
    format!(
        "cell {} has lent cell {to} {}M, {why}",
        cell.plan.number,
        bytes >> 20
    )
}

/// A CPU on which a vCPU of another cell's VM runs.
fn lent_cpu_line(cell: &CellStatus, lent: &LentCpu) -> String {
    let LentCpu {
        cpu,
        cell: home,
        vm,
        vcpu,
        is_automatic,
    } = lent;
    let why = if *is_automatic {
        ", by decision of that cell"
    } else {
        ""
    };
    format!(
        "cell {} runs vCPU {vcpu} of {vm}, a VM of cell {home}, on CPU {cpu}{why}",
        cell.plan.number
    )
}

/// Moves of vCPUs between cells by decision of one of them.
fn lending_line(cell: u16, counts: &CpuLending) -> String {
    let CpuLending {
        moved,
        returned,
        recalled,
        refused,
        ..
    } = counts;
    format!(
        "cell {cell} has moved {moved} vCPUs to other cells by decision and taken {returned} back; it has \
         recalled {recalled} of its CPUs; {refused} moves were refused"
    )
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

#[cfg(test)]
mod tests {
    use config::cluster::CellPlan;

    use super::*;

    #[test]
    fn moves_by_decision_are_counted_in_one_line() {
        let counts = CpuLending {
            moved: 3,
            returned: 2,
            recalled: 1,
            refused: 4,
            ..CpuLending::default()
        };
        let line = "cell 1 has moved 3 vCPUs to other cells by decision and taken 2 back; it has recalled \
                    1 of its CPUs; 4 moves were refused";
        assert_eq!(lending_line(1, &counts), line);
    }

    #[test]
    fn loan_is_shown_with_its_reason() {
        let loan = |mib: u64| LentMemory {
            cell: 1,
            bytes: mib << 20,
        };
        let shown = |requested: Vec<LentMemory>| {
            let cell = CellStatus {
                plan: CellPlan {
                    number: 0,
                    host: None,
                    cpus: vec![0],
                    nodes: vec![0],
                    memory_bytes: 1 << 30,
                },
                pid: 1,
                life: Some(1),
                failed: false,
                cordoned: false,
                given_bytes: 0,
                lent: vec![loan(8)],
                lent_on_request: requested,
                borrowed: Vec::new(),
                vcpus: 0,
                vms: Vec::new(),
                lent_cpus: Vec::new(),
                regions: Vec::new(),
            };
            loan_line(&cell, loan(8))
        };
        assert_eq!(shown(vec![]), "cell 0 has lent cell 1 8M, by command");
        assert_eq!(shown(vec![loan(8)]), "cell 0 has lent cell 1 8M, on its request");
        assert_eq!(
            shown(vec![loan(3)]),
            "cell 0 has lent cell 1 8M, 3M of it on its request, the rest by command"
        );
    }
}
