//! The places of a VM that spans cells: one in each, all or none. The home's is held under the VM's name, the others' under
//! names that no VM can have ([`part_name`]).

use std::io::ErrorKind;
use std::time::Instant;

use config::cluster::CellPlan;
use config::{SpanSpec, VmSpec};
use policy::placement::Room;
use policy::span::{Part, choose, divide};

use super::{RESTART_LIMIT, Tenure, TenureError, ask, wait_for_cells};
use crate::cluster::client;
use crate::cluster::files::Files;
use crate::cluster::interface::{Host, Status, VmShare, part_name};
use crate::cluster::limits::RETRY;

/// Choices of cells, each by what is free then: others start VMs too.
const CHOICES_MAX: usize = 4;

/// Asks for the places of a VM that spans cells, its home's first; none for one that does not.
///
/// # Errors
/// If a part has no place. What the others were given is given back then.
pub fn begin_span(name: &str, spec: &VmSpec) -> Result<Vec<(Tenure, Part)>, TenureError> {
    begin_in(&Files::open()?, name, spec)
}

/// The VM has ended: returns when all cells have heard of it, or none is there to hear. Its name is the last to be free.
pub fn leave_span(span: Vec<(Tenure, Part)>) {
    span.into_iter().rev().for_each(|(tenure, _)| tenure.leave());
}

fn begin_in(files: &Files, name: &str, spec: &VmSpec) -> Result<Vec<(Tenure, Part)>, TenureError> {
    let Some(span) = &spec.span else {
        return Ok(Vec::new());
    };
    let plan = files.plan()?;
    if plan.is_empty() {
        return Err(TenureError::NothingToSpan);
    }
    let mut choices = match span {
        SpanSpec::Cells(_) | SpanSpec::Coherent(_) => 1,
        SpanSpec::Auto => CHOICES_MAX,
    };
    loop {
        choices -= 1;
        let copy_bytes = spec.is_coherent().then_some(spec.memory.0);
        match hold(files, name, &divided(files, &plan, spec, span)?, copy_bytes) {
            Err(TenureError::Refused(_)) if choices > 0 => {}
            other => return other,
        }
    }
}

/// What a VM would be divided into now; none if it does not span cells, or no cluster is up.
///
/// # Errors
/// If there are no such cells, or no cells with the room.
pub fn foresee(spec: &VmSpec) -> Result<Option<Vec<Part>>, TenureError> {
    let Some(span) = &spec.span else {
        return Ok(None);
    };
    let files = Files::open()?;
    let plan = files.plan()?;
    if plan.is_empty() {
        return Ok(None);
    }
    divided(&files, &plan, spec, span).map(Some)
}

fn divided(
    files: &Files,
    plan: &[CellPlan],
    spec: &VmSpec,
    span: &SpanSpec,
) -> Result<Vec<Part>, TenureError> {
    match span {
        SpanSpec::Cells(cells) | SpanSpec::Coherent(cells) => {
            Ok(divide(spec.cpus, spec.memory.0, &named(files, plan, cells)?))
        }
        SpanSpec::Auto => chosen(files, plan, spec),
    }
}

/// The cells that are named, if they are all this host's.
fn named(files: &Files, plan: &[CellPlan], cells: &[u16]) -> Result<Vec<Room>, TenureError> {
    let site = files.site()?;
    let room = |cell: &u16| {
        if let Some(own) = plan.iter().find(|own| own.number == *cell) {
            return Ok(room(own, 0, 0));
        }
        let known: Vec<String> = plan.iter().map(|own| own.number.to_string()).collect();
        let known = known.join(", ");
        let host = site.as_ref().and_then(|site| site.host_of(*cell));
        Err(TenureError::Refused(match host {
            Some(host) => format!(
                "cell {cell} is on host {}, and a VM spans cells of one host; name cells of this one: {known}",
                host.name
            ),
            None => format!("there is no cell {cell} to span; there is {known}"),
        }))
    };
    cells.iter().map(room).collect()
}

/// What a VM would be divided into, in cells that have the room.
fn chosen(files: &Files, plan: &[CellPlan], spec: &VmSpec) -> Result<Vec<Part>, TenureError> {
    wait_for_cells(files)?;
    let status = client::status(files)?.ok_or(TenureError::Dead)?;
    let rooms = rooms(&status, plan);
    let cells = choose(&rooms, spec.cpus, spec.memory.0);
    let cells = cells.ok_or_else(|| TenureError::Refused(too_large(&rooms, spec)))?;
    let chosen = cells
        .iter()
        .filter_map(|cell| rooms.iter().find(|room| room.cell == *cell).copied());
    Ok(divide(spec.cpus, spec.memory.0, &chosen.collect::<Vec<_>>()))
}

fn room(plan: &CellPlan, vcpus: u32, taken_bytes: u64) -> Room {
    Room {
        cell: plan.number,
        cpus: u32::try_from(plan.cpus.len()).unwrap_or(u32::MAX),
        vcpus,
        free_bytes: plan.memory_bytes.saturating_sub(taken_bytes),
    }
}

/// What this host's cells that live have to give of their own memory, at least: their VMs may have some of other cells'.
fn rooms(status: &Status, plan: &[CellPlan]) -> Vec<Room> {
    let cells = status.cells.iter().filter(|cell| cell.life.is_some());
    cells
        .filter(|cell| plan.iter().any(|own| own.number == cell.plan.number))
        .map(|cell| {
            let lent: u64 = cell.lent.iter().map(|part| part.bytes).sum();
            room(&cell.plan, cell.vcpus, cell.given_bytes.saturating_add(lent))
        })
        .collect()
}

fn too_large(rooms: &[Room], spec: &VmSpec) -> String {
    let free = rooms
        .iter()
        .map(|room| format!("cell {} has {} MiB", room.cell, room.free_bytes >> 20));
    format!(
        "no cells of this host have {} of memory for {} vCPUs together: {}; give it less, or end another VM",
        spec.memory,
        spec.cpus,
        free.collect::<Vec<_>>().join(", ")
    )
}

/// Takes all places, or none. Each is to have `copy_bytes` of memory, if not its part's.
fn hold(
    files: &Files,
    name: &str,
    parts: &[Part],
    copy_bytes: Option<u64>,
) -> Result<Vec<(Tenure, Part)>, TenureError> {
    let mut held = Vec::with_capacity(parts.len());
    for (number, part) in parts.iter().enumerate() {
        let host = Host {
            name: part_name(name, number),
            share: VmShare {
                vcpus: part.vcpus.len() as u32,
                memory_bytes: copy_bytes.unwrap_or(part.memory_bytes),
            },
            only: Some(part.cell),
            // The guest takes it for near.
            own: true,
            sent: false,
            runs: false,
            borrowed: Vec::new(),
        };
        match ask_once_it_runs(files, part.cell, &host) {
            Ok(tenure) => held.push((tenure, part.clone())),
            Err(error) => {
                leave_span(held);
                return Err(error);
            }
        }
    }
    Ok(held)
}

/// Asks one cell, which may be starting anew just now.
fn ask_once_it_runs(files: &Files, cell: u16, host: &Host) -> Result<Tenure, TenureError> {
    let deadline = Instant::now() + RESTART_LIMIT;
    loop {
        match ask(files, cell, host) {
            Err(TenureError::Broken(error)) if is_absence(error.kind()) => {
                if Instant::now() < deadline {
                    std::thread::sleep(RETRY);
                    continue;
                }
                return Err(TenureError::Refused(format!(
                    "cell {cell} does not run; start it again with `mirrorball cluster up`, or span other cells"
                )));
            }
            other => return other,
        }
    }
}

/// Nobody listens there, or who did has died.
fn is_absence(kind: ErrorKind) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
    matches!(
        kind,
        NotFound | ConnectionRefused | ConnectionReset | BrokenPipe | UnexpectedEof
    )
}

#[cfg(test)]
mod tests;
