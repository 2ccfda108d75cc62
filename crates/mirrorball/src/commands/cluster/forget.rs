//! `mirrorball cluster forget`: frees the names of VMs of a lost host.

use std::ops::ControlFlow;
use std::process::ExitCode;

use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client::{self, Connection};
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse, SHARD_SEPARATOR};

use super::cells::{cells_here, one_host};
use super::change::live_cells;

/// Frees the names of the VMs of `name`, whose host is off.
pub(super) fn forget(name: &str, fenced: bool) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    let plan = match cells_here(&files)? {
        ControlFlow::Continue(plan) => plan,
        ControlFlow::Break(code) => return Ok(code),
    };
    let site = files.site().into_diagnostic()?.ok_or_else(one_host)?;
    let known = client::status(&files).into_diagnostic()?.unwrap_or_default();
    // A host that was removed from the file is identified by its cells.
    let of_host = known
        .cells
        .iter()
        .filter(|cell| cell.plan.host.as_deref() == Some(name));
    let mut cells: Vec<u16> = of_host.map(|cell| cell.plan.number).collect();
    let planned = site.hosts.iter().filter(|host| host.name == name);
    cells.extend(planned.flat_map(|host| &host.cells));
    cells.sort_unstable();
    cells.dedup();
    if cells.is_empty() {
        let known: Vec<&str> = site.hosts.iter().map(|host| &host.name[..]).collect();
        return Err(miette!(
            help = "name the host that is lost",
            "the cluster has no host {name}; it has {}",
            known.join(", ")
        ));
    }
    if name == site.here {
        return Err(miette!(
            help = "give the command on a host that runs",
            "{name} is this host, which is not lost"
        ));
    }
    if !fenced {
        return Err(miette!(
            help = "put the host off, and say so with `--fenced`",
            "{name} may only be cut off, and its VMs run: two VMs could have one name and one disk"
        ));
    }
    let members = live_cells(&site)?;
    if let Some(cell) = cells.iter().find(|cell| members.contains_key(*cell)) {
        return Err(miette!(
            help = "put the host off; its entry ends by itself then",
            "{name} is not lost: its cell {cell} is a member of the cluster"
        ));
    }
    let of_host = known
        .cells
        .iter()
        .filter(|cell| cells.contains(&cell.plan.number));
    let names = of_host.flat_map(|cell| cell.vms.iter().filter(|name| !name.contains(SHARD_SEPARATOR)));
    let names: Vec<&str> = names.map(String::as_str).collect();
    let running = plan
        .iter()
        .map(|cell| files.cell(cell.number))
        .find(|cell| cell.runs());
    let running = running.ok_or_else(|| {
        miette!(
            help = "start them again with `mirrorball cluster up`",
            "none of this host's cells runs"
        )
    })?;
    let answer = Connection::open(&running).and_then(|mut cell| cell.ask(&CellRequest::Forget { cells }));
    match answer.map_err(|error| {
        miette!(
            help = "try again when `mirrorball cluster status` shows that it runs",
            "the cell does not answer: {error}"
        )
    })? {
        CellResponse::Done => {}
        CellResponse::Refused { why } => return Err(miette!("{why}")),
        other => return Err(miette!("{}", other.unexpected())),
    }
    match &names[..] {
        [] => println!("{name} is forgotten: it had no VM"),
        names => println!("{name} is forgotten; names that are free: {}", names.join(", ")),
    }
    Ok(ExitCode::SUCCESS)
}
