//! Free capacity of cells, as input of placement ([`policy::placement`]): from a cell's report, and as facts.
//!
//! The facts are `cell_runs`, `cell_cordoned`, `cell_cpus`, `cell_vcpus` and `cell_free_bytes`. Cells,
//! spanning VMs and `mirrorball knowledge` take assertions of them from here, so that one asserted fact means
//! the same to all.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use knowledge::{Base, Fact, Machine};
use policy::placement::{Asserted, Assertions, CellCapacity, Verdict, Want, rank};
use registry::cluster::files::Files;
use registry::cluster::interface::Status;

use crate::facts::{self, FileError};
use crate::topology;

/// Names of the facts on the capacity of cells.
const CAPACITY_FACTS: [&str; 5] = [
    "cell_runs",
    "cell_cordoned",
    "cell_cpus",
    "cell_vcpus",
    "cell_free_bytes",
];

/// Returns the capacity of the running cells. `is_here` selects the cells of the host where the VM is
/// requested.
pub fn of_status(status: &Status, is_here: impl Fn(u16) -> bool) -> Vec<CellCapacity> {
    let runs = |number: u16| {
        let mut cells = status.cells.iter();
        cells.any(|cell| cell.plan.number == number && cell.life.is_some())
    };
    let running = status.cells.iter().filter(|cell| cell.life.is_some());
    let capacities = running.map(|cell| {
        let lent: u64 = cell.lent.iter().map(|part| part.bytes).sum();
        // A stopped lender's memory is unavailable.
        let lenders = cell.borrowed.iter().filter(|part| runs(part.cell));
        let borrowed: u64 = lenders.map(|part| part.bytes).sum();
        let has_bytes = cell.plan.memory_bytes.saturating_add(borrowed);
        CellCapacity {
            cell: cell.plan.number,
            cpus: u32::try_from(cell.plan.cpus.len()).unwrap_or(u32::MAX),
            vcpus: cell.vcpus,
            free_bytes: has_bytes.saturating_sub(lent).saturating_sub(cell.given_bytes),
            is_cordoned: cell.cordoned,
            is_here: is_here(cell.plan.number),
        }
    });
    capacities.collect()
}

/// Returns the capacities as facts, which [`of_facts`] reads.
pub fn facts(capacities: &[CellCapacity]) -> Vec<Fact> {
    let facts = capacities.iter().flat_map(|room| {
        let number = i64::from(room.cell);
        let value = |name, value: u64| {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            Fact::new(name, [number.into(), value.into()])
        };
        let cordoned = room
            .is_cordoned
            .then(|| Fact::new("cell_cordoned", [number.into()]));
        [
            Fact::new("cell_runs", [number.into()]),
            value("cell_cpus", u64::from(room.cpus)),
            value("cell_vcpus", u64::from(room.vcpus)),
            value("cell_free_bytes", room.free_bytes),
        ]
        .into_iter()
        .chain(cordoned)
    });
    facts.collect()
}

/// Returns the capacities of the cells that run, as in `base`. A cell without a fact of its free memory has
/// none, and one without a fact of its CPUs has those of `cell_cpu`. The VM is requested on this host or, if
/// `base` does not have it, on the first host there.
pub fn of_facts(base: &Base) -> Vec<CellCapacity> {
    let asserted = assertions_in(base).0;
    let here = here(base);
    let count = |kind: &str, cell: u16| {
        let facts = base.named(kind).filter(|fact| number(fact) == Some(cell));
        u32::try_from(facts.count()).unwrap_or(u32::MAX)
    };
    let room = |cell: u16| {
        let asserted = asserted.get(&cell).copied().unwrap_or_default();
        let mut hosts = base
            .named("cell")
            .filter(|fact| number(fact) == Some(cell))
            .peekable();
        CellCapacity {
            cell,
            cpus: asserted.cpus.unwrap_or_else(|| count("cell_cpu", cell)),
            vcpus: asserted.vcpus.unwrap_or(0),
            free_bytes: asserted.free_bytes.unwrap_or(0),
            is_cordoned: asserted.is_cordoned,
            is_here: hosts.peek().is_none() || hosts.any(|fact| fact.text(1) == here.as_deref()),
        }
    };
    base.named("cell_runs").filter_map(number).map(room).collect()
}

/// The facts of `base`, with those of the cells' rooms as `rooms` and the assertions in `base` have them.
/// Only the cells of `rooms` run.
pub fn merge(base: &Base, mut capacities: Vec<CellCapacity>) -> Base {
    assertions_in(base).apply(&mut capacities);
    let is_other = |fact: &&Fact| !CAPACITY_FACTS.contains(&fact.name.as_str());
    let mut merged: Base = base.facts().filter(is_other).cloned().collect();
    merged.learn(facts(&capacities));
    merged
}

/// Returns the results of [`rank`] for each `wants(Cpus, Bytes)` of `base`: `place(Cell)`, `has_room(Cell,
/// Load)` in vCPUs per 1000 CPUs, and `no_room(Cell, Reason)`.
pub fn conclusions(base: &Base) -> Vec<Fact> {
    let wants = base.named("wants").filter_map(|fact| {
        Some(Want {
            vcpus: u32::try_from(fact.number(0)?).ok()?,
            memory_bytes: u64::try_from(fact.number(1)?).ok()?,
        })
    });
    let capacities = of_facts(base);
    let of_one = |want| {
        let ranked = rank(&capacities, want).into_iter().enumerate();
        ranked.flat_map(|(at, candidate)| {
            let cell = i64::from(candidate.room.cell);
            let Verdict::Fits { load_milli } = candidate.verdict else {
                let why = candidate.verdict.to_string();
                return vec![Fact::new("no_room", [cell.into(), why.as_str().into()])];
            };
            let load = i64::try_from(load_milli).unwrap_or(i64::MAX);
            let mut facts = vec![Fact::new("has_room", [cell.into(), load.into()])];
            if at == 0 {
                facts.push(Fact::new("place", [cell.into()]));
            }
            facts
        })
    };
    wants.flat_map(of_one).collect()
}

/// Returns the facts of `base` on cells' capacity, as assertions.
pub fn assertions_in(base: &Base) -> Assertions {
    let mut assertions = Assertions::default();
    for kind in CAPACITY_FACTS {
        for fact in base.named(kind) {
            let Some(cell) = number(fact) else { continue };
            let asserted: &mut Asserted = assertions.0.entry(cell).or_default();
            let value = fact.number(1).and_then(|value| u64::try_from(value).ok());
            let count = value.map(|value| u32::try_from(value).unwrap_or(u32::MAX));
            match kind {
                "cell_cordoned" => asserted.is_cordoned = true,
                "cell_cpus" => asserted.cpus = count,
                "cell_vcpus" => asserted.vcpus = count,
                "cell_free_bytes" => asserted.free_bytes = value,
                _ => {}
            }
        }
    }
    assertions
}

/// Returns the assertions on cells' capacity that count in this host's cluster ([`facts::InForce`]).
///
/// # Errors
/// If the file of asserted facts is wrong, and there are no former ones.
pub fn asserted(files: &Files) -> Result<Assertions, FileError> {
    let facts: Base = facts::InForce::read(files)?.facts.into_iter().collect();
    Ok(assertions_in(&facts))
}

/// Detects changes of the file of asserted facts.
#[derive(Debug)]
pub struct AssertionWatch {
    file: Option<PathBuf>,
    seen: Option<Stamp>,
}

/// A file as it was: when it was last written, its size in bytes, and its inode.
type Stamp = (SystemTime, u64, u64);

impl AssertionWatch {
    /// As the file is now.
    pub fn new() -> Self {
        Self::of(facts::asserted_file())
    }

    /// The same of another file.
    pub fn of(file: Option<PathBuf>) -> Self {
        let seen = file.as_deref().and_then(stamp);
        Self { file, seen }
    }

    /// Whether the file has been written, made or removed since the last call.
    pub fn has_changed(&mut self) -> bool {
        let now = self.file.as_deref().and_then(stamp);
        now != std::mem::replace(&mut self.seen, now)
    }
}

impl Default for AssertionWatch {
    fn default() -> Self {
        Self::new()
    }
}

fn stamp(file: &Path) -> Option<Stamp> {
    let file = std::fs::metadata(file).ok()?;
    Some((file.modified().ok()?, file.len(), file.ino()))
}

/// The host on which a VM is requested.
fn here(base: &Base) -> Option<String> {
    let own = topology::host_name();
    match base.named("host").any(|fact| fact.text(0) == Some(&own)) {
        true => Some(own),
        false => Machine::of(base).hosts.first().map(|host| host.name.clone()),
    }
}

/// The cell that a fact is about.
fn number(fact: &Fact) -> Option<u16> {
    u16::try_from(fact.number(0)?).ok()
}

#[cfg(test)]
mod tests;
