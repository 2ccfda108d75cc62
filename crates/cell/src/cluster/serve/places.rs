//! Places in the host's registry: those that a cell finds taken when it starts.

use std::io;

use registry::cluster::files::Files;
use registry::cluster::interface::{RunningVm, VmShare, shard_name};
use registry::cluster::user_vms::UserVm;
use registry::vms::{Record, Registry};

/// The VMs of this host that run in cells, those of other users too, and the parts of other hosts' VMs.
pub(super) fn running(files: &Files) -> io::Result<Vec<RunningVm>> {
    let mut records = Registry::open()?.list()?;
    records.extend(Registry::listed_secondary_shards()?);
    let mut running: Vec<RunningVm> = records.iter().flat_map(places).collect();
    running.extend(files.user_vms()?.iter().map(UserVm::running));
    Ok(running)
}

/// The places that a VM has: one, or one for each of its parts.
fn places(record: &Record) -> Vec<RunningVm> {
    let place = |name: String, cell, vcpus, memory_bytes, borrowed| RunningVm {
        name,
        cell,
        share: VmShare {
            vcpus,
            memory_bytes,
            cpu_reservation_permille: record.spec.cpu_reservation_permille(),
        },
        borrowed,
        cells: record.spec.cells.clone(),
        borrowed_cpus: record.borrowed_cpus.clone(),
        regions: record.regions.clone(),
    };
    if record.span.is_empty() {
        let (vcpus, bytes) = (u32::from(record.spec.cpus), record.spec.counted().0);
        let one = |cell| place(record.name.clone(), cell, vcpus, bytes, record.borrowed.clone());
        return record.cell.map(one).into_iter().collect();
    }
    // Each cell gave room for a copy of all of it, if the memory is coherent.
    let copy_bytes = record.spec.is_coherent().then_some(record.spec.memory.0);
    let numbered = record.span.iter().enumerate();
    numbered
        .map(|(number, part)| {
            let name = shard_name(&record.name, number);
            let vcpus = part.vcpus.len() as u32;
            // Parts borrow nothing.
            let memory_bytes = copy_bytes.unwrap_or(part.memory_bytes);
            place(name, part.cell, vcpus, memory_bytes, Vec::new())
        })
        .collect()
}

#[cfg(test)]
mod tests;
