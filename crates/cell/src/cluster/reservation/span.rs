//! The places of a VM that spans cells: one in each, all or none. The home's is held under the VM's name, the
//! others' under names that no VM can have ([`shard_name`]); those on other hosts by monitors there
//! ([`crate::remote`]).

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Instant;

use config::cluster::CellPlan;
use config::{SpanSpec, VmSpec};
use policy::placement::CellCapacity;
use policy::span::{Part, choose, divide};
use registry::cluster::client;
use registry::cluster::files::Files;
use registry::cluster::interface::{AdmitVm, Status, VmShare, shard_name};

use super::{RESTART_LIMIT, Reservation, ReservationError, ask, wait_for_cells};
use crate::cluster::hosts::Hosts;
use crate::cluster::limits::RETRY;
use crate::remote::part::RemotePart;

/// Maximum number of choices of cells, each by the capacity that is free then: others start VMs too.
const CHOICES_MAX: usize = 4;

/// The place of a part of a VM.
#[derive(Debug)]
pub enum PartPlace {
    /// The place is on this host.
    Here(Box<Reservation>),
    /// The place is on another host.
    There(Arc<RemotePart>),
}

impl PartPlace {
    /// Number of the cell that has the part.
    pub fn cell(&self) -> u16 {
        match self {
            Self::Here(reservation) => reservation.cell(),
            Self::There(remote) => remote.endpoint().cell,
        }
    }

    /// The place, if it is on this host.
    pub fn here(&self) -> Option<&Reservation> {
        match self {
            Self::Here(reservation) => Some(reservation),
            Self::There(_) => None,
        }
    }

    /// The reason why the place is lost permanently, if it is.
    pub fn lost(&self) -> Option<String> {
        match self {
            Self::Here(reservation) => reservation.lost().then(|| {
                let cell = reservation.cell();
                format!("cell {cell}, which it spans, is lost; see `mirrorball cluster status`")
            }),
            Self::There(remote) => remote.lost(),
        }
    }

    fn leave(self) {
        match self {
            Self::Here(reservation) => reservation.leave(),
            Self::There(remote) => remote.leave(),
        }
    }
}

/// Requests the places of a VM that spans cells, its home's first; none for one that does not.
///
/// # Errors
/// If a part has no place. The places of the others are given back then.
pub fn begin_span(name: &str, spec: &VmSpec) -> Result<Vec<(PartPlace, Part)>, ReservationError> {
    begin_in(&Files::open()?, name, spec)
}

/// Frees the places of a VM that has ended, its name last: returns when all cells have received that, or none
/// runs.
pub fn leave_span(span: Vec<(PartPlace, Part)>) {
    span.into_iter().rev().for_each(|(place, _)| place.leave());
}

/// Requests the place of one part in a cell of this host.
///
/// # Errors
/// If there is none.
pub fn begin_part(
    vm: &str,
    part: usize,
    cell: u16,
    vcpus: u8,
    memory_bytes: u64,
) -> Result<Reservation, ReservationError> {
    begin_part_in(&Files::open()?, vm, part, cell, vcpus, memory_bytes)
}

fn begin_in(files: &Files, name: &str, spec: &VmSpec) -> Result<Vec<(PartPlace, Part)>, ReservationError> {
    let Some(span) = &spec.span else {
        return Ok(Vec::new());
    };
    let plan = files.plan()?;
    if plan.is_empty() {
        return Err(ReservationError::NothingToSpan);
    }
    let mut choices = match span {
        SpanSpec::Cells(_) | SpanSpec::Coherent(_) => 1,
        SpanSpec::Auto => CHOICES_MAX,
    };
    loop {
        choices -= 1;
        match hold(files, name, spec, &divided(files, &plan, spec, span)?) {
            Err(ReservationError::Refused(_)) if choices > 0 => {}
            other => return other,
        }
    }
}

/// The parts into which a VM would be divided now; none if it does not span cells, or no cluster is up.
///
/// # Errors
/// If there are no such cells, or no cells with the room.
pub fn foresee(spec: &VmSpec) -> Result<Option<Vec<Part>>, ReservationError> {
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
) -> Result<Vec<Part>, ReservationError> {
    match span {
        SpanSpec::Cells(cells) | SpanSpec::Coherent(cells) => {
            let rooms = named(files, plan, cells, spec.is_coherent())?;
            Ok(divide(spec.cpus, spec.memory.0, &rooms))
        }
        SpanSpec::Auto => chosen(files, plan, spec),
    }
}

/// The cells that are named, the first of them this host's, where the VM's devices are. Cells of other hosts
/// are allowed only if the memory is coherent.
fn named(
    files: &Files,
    plan: &[CellPlan],
    cells: &[u16],
    is_coherent: bool,
) -> Result<Vec<CellCapacity>, ReservationError> {
    let site = files.site()?;
    let own = |cell: u16| plan.iter().find(|own| own.number == cell);
    let host_of = |cell: u16| site.as_ref().and_then(|site| site.host_of(cell));
    let mut rooms = Vec::with_capacity(cells.len());
    // The status is requested only where it is needed: a cell that hangs blocks no other VM.
    let mut status = None;
    for cell in cells {
        if let Some(own) = own(*cell) {
            rooms.push(room(own, 0, 0));
            continue;
        }
        let known = || {
            let known: Vec<String> = plan.iter().map(|own| own.number.to_string()).collect();
            known.join(", ")
        };
        let Some(host) = host_of(*cell) else {
            let why = format!("there is no cell {cell} to span; there is {}", known());
            return Err(ReservationError::Refused(why));
        };
        if rooms.is_empty() {
            return Err(ReservationError::Refused(format!(
                "its home, cell {cell}, is on host {}; start it there, or name a cell of this host first: {}",
                host.name,
                known()
            )));
        }
        if !is_coherent {
            return Err(ReservationError::NotCoherent {
                cell: *cell,
                host: host.name.clone(),
            });
        }
        if status.is_none() {
            wait_for_cells(files)?;
            status = client::status(files)?;
        }
        let cells = status.iter().flat_map(|status| &status.cells);
        let found = cells
            .filter(|other| other.life.is_some())
            .find(|other| other.plan.number == *cell);
        let found = found.ok_or_else(|| {
            ReservationError::Refused(format!(
                "cell {cell} on host {} does not run; start it again with `mirrorball cluster up` there, or \
                 span other cells",
                host.name
            ))
        })?;
        rooms.push(room(&found.plan, 0, 0));
    }
    Ok(rooms)
}

/// The parts into which a VM would be divided, in cells that have the room.
fn chosen(files: &Files, plan: &[CellPlan], spec: &VmSpec) -> Result<Vec<Part>, ReservationError> {
    wait_for_cells(files)?;
    let status = client::status(files)?.ok_or(ReservationError::Dead)?;
    let mut rooms = rooms(&status, plan);
    let asserted =
        hostinfo::capacity::asserted(files).map_err(|error| ReservationError::Refused(error.to_string()))?;
    asserted.apply(&mut rooms);
    let cells = choose(&rooms, spec.cpus, spec.memory.0);
    let cells = cells.ok_or_else(|| ReservationError::Refused(too_large(&rooms, spec)))?;
    let chosen = cells
        .iter()
        .filter_map(|cell| rooms.iter().find(|room| room.cell == *cell).copied());
    Ok(divide(spec.cpus, spec.memory.0, &chosen.collect::<Vec<_>>()))
}

fn room(plan: &CellPlan, vcpus: u32, taken_bytes: u64) -> CellCapacity {
    CellCapacity {
        cell: plan.number,
        cpus: u32::try_from(plan.cpus.len()).unwrap_or(u32::MAX),
        vcpus,
        free_bytes: plan.memory_bytes.saturating_sub(taken_bytes),
        is_cordoned: false,
        is_here: true,
    }
}

/// Minimum capacity of this host's live cells, from their own memory: their VMs may have some of other
/// cells'.
fn rooms(status: &Status, plan: &[CellPlan]) -> Vec<CellCapacity> {
    let cells = status.cells.iter().filter(|cell| cell.life.is_some());
    cells
        .filter(|cell| plan.iter().any(|own| own.number == cell.plan.number))
        .map(|cell| {
            let lent: u64 = cell.lent.iter().map(|part| part.bytes).sum();
            CellCapacity {
                is_cordoned: cell.cordoned,
                ..room(&cell.plan, cell.vcpus, cell.given_bytes.saturating_add(lent))
            }
        })
        .collect()
}

fn too_large(rooms: &[CellCapacity], spec: &VmSpec) -> String {
    let free = rooms.iter().map(|room| match room.is_cordoned {
        true => format!("cell {} is cordoned", room.cell),
        false => format!("cell {} has {} MiB", room.cell, room.free_bytes >> 20),
    });
    format!(
        "no cells of this host have {} of memory for {} vCPUs together: {}; give it less, or end another VM",
        spec.memory,
        spec.cpus,
        free.collect::<Vec<_>>().join(", ")
    )
}

/// Takes all places, or none. Each cell must have room for a copy of all memory, if the VM's is coherent.
fn hold(
    files: &Files,
    name: &str,
    spec: &VmSpec,
    parts: &[Part],
) -> Result<Vec<(PartPlace, Part)>, ReservationError> {
    let site = files.site()?;
    let elsewhere = |cell| site.as_ref().is_some_and(|site| site.is_elsewhere(cell));
    let copy_bytes = spec.is_coherent().then_some(spec.memory.0);
    let mut hosts = None;
    let mut held = Vec::with_capacity(parts.len());
    for (number, part) in parts.iter().enumerate() {
        let mut take = || {
            let (cell, vcpus) = (part.cell, part.vcpus.len() as u8);
            if !elsewhere(cell) {
                let memory_bytes = copy_bytes.unwrap_or(part.memory_bytes);
                return begin_part_in(files, name, number, cell, vcpus, memory_bytes)
                    .map(|reservation| PartPlace::Here(Box::new(reservation)));
            }
            if hosts.is_none() {
                hosts = site
                    .clone()
                    .map(Hosts::open)
                    .transpose()
                    .map_err(io::Error::other)?;
            }
            let hosts = hosts.as_ref().ok_or(io::Error::from(ErrorKind::NotFound))?;
            let remote = RemotePart::begin(hosts, name, spec, number as u8, part)?;
            Ok(PartPlace::There(Arc::new(remote)))
        };
        match take() {
            Ok(place) => held.push((place, part.clone())),
            Err(error) => {
                leave_span(held);
                return Err(error);
            }
        }
    }
    Ok(held)
}

fn begin_part_in(
    files: &Files,
    vm: &str,
    part: usize,
    cell: u16,
    vcpus: u8,
    memory_bytes: u64,
) -> Result<Reservation, ReservationError> {
    let host = AdmitVm {
        only: Some(cell),
        // The guest assumes that memory is near.
        own: true,
        ..AdmitVm::new(
            shard_name(vm, part),
            VmShare {
                vcpus: u32::from(vcpus),
                memory_bytes,
                ..VmShare::default()
            },
        )
    };
    ask_once_it_runs(files, cell, &host)
}

/// Requests a place from one cell, which may be restarting.
fn ask_once_it_runs(files: &Files, cell: u16, host: &AdmitVm) -> Result<Reservation, ReservationError> {
    let deadline = Instant::now() + RESTART_LIMIT;
    loop {
        match ask(files, cell, host) {
            Err(ReservationError::Silent { source, .. }) if is_absence(source.kind()) => {
                if Instant::now() < deadline {
                    std::thread::sleep(RETRY);
                    continue;
                }
                return Err(ReservationError::Refused(format!(
                    "cell {cell} does not run; start it again with `mirrorball cluster up`, or span other \
                     cells"
                )));
            }
            other => return other,
        }
    }
}

/// Whether no process listens there, or the one that did has died.
fn is_absence(kind: ErrorKind) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
    matches!(
        kind,
        NotFound | ConnectionRefused | ConnectionReset | BrokenPipe | UnexpectedEof
    )
}

#[cfg(test)]
mod tests;
