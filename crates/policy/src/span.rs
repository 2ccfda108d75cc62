//! Division of a spanning VM among cells.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::placement::CellCapacity;

/// Granularity of memory, bytes: x86-64's large page, so that none is divided between two cells.
const STEP_BYTES: u64 = 2 << 20;
/// Minimum memory of each cell, bytes, if the VM has that much for each: a guest's kernel merges smaller
/// nodes into others.
const PART_MIN_BYTES: u64 = 64 << 20;

/// Most cells of which all sets are tried: a thousand sets.
const FEW: usize = 10;

/// The part of a VM in one cell.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Number of the cell.
    pub cell: u16,
    /// Numbers of the vCPUs that begin in this cell.
    pub vcpus: Range<u8>,
    /// Memory of the part, bytes.
    pub memory_bytes: u64,
}

/// Divides a VM among cells, in their order. vCPUs are proportional to the cells' CPUs, at least one each.
/// Memory is proportional to the vCPUs, in steps of 2 MiB, at least 64 MiB each if the VM has that much for
/// each. Cells beyond the number of vCPUs get no part. The rest of `memory_bytes` beyond a multiple of 2 MiB
/// goes to the last part.
pub fn divide(vcpus: u8, memory_bytes: u64, cells: &[CellCapacity]) -> Vec<Part> {
    let cells = &cells[..cells.len().min(usize::from(vcpus))];
    let cpus: Vec<u64> = cells.iter().map(|room| u64::from(room.cpus.max(1))).collect();
    let shares = apportion(u64::from(vcpus), &cpus, 1);
    let steps = memory_bytes / STEP_BYTES;
    let least = steps / (cells.len().max(1) as u64);
    let memory = apportion(steps, &shares, least.min(PART_MIN_BYTES / STEP_BYTES));
    let mut first = 0;
    let mut parts = Vec::with_capacity(cells.len());
    for ((room, share), steps) in cells.iter().zip(&shares).zip(&memory) {
        // A share is at most the number of vCPUs.
        let end = first + *share as u8;
        parts.push(Part {
            cell: room.cell,
            vcpus: first..end,
            memory_bytes: steps * STEP_BYTES,
        });
        first = end;
    }
    if let Some(last) = parts.last_mut() {
        last.memory_bytes += memory_bytes % STEP_BYTES;
    }
    parts
}

/// Divides `total` in proportion to `weights`, none of them zero, by largest remainders (Hamilton's method).
/// Each share is at least `least`, for which `total` must suffice.
fn apportion(total: u64, weights: &[u64], least: u64) -> Vec<u64> {
    // Shares below the minimum are raised to it, and the others divide the rest, until all have the minimum.
    let mut raised = vec![false; weights.len()];
    loop {
        let (mut rest, mut weight_sum) = (u128::from(total), 0);
        for (weight, raised) in weights.iter().zip(&raised) {
            match raised {
                true => rest -= u128::from(least),
                false => weight_sum += u128::from(*weight),
            }
        }
        let part = |weight: u64| rest * u128::from(weight) / weight_sum;
        let low = (0..weights.len()).find(|&at| !raised[at] && part(weights[at]) < u128::from(least));
        if let Some(low) = low {
            raised[low] = true;
            continue;
        }
        let mut parts: Vec<u64> = weights
            .iter()
            .zip(&raised)
            .map(|(weight, raised)| match raised {
                true => least,
                false => part(*weight) as u64,
            })
            .collect();
        let mut left = total - parts.iter().sum::<u64>();
        let mut order: Vec<usize> = (0..weights.len()).filter(|&at| !raised[at]).collect();
        order.sort_by_key(|&at| std::cmp::Reverse(rest * u128::from(weights[at]) % weight_sum));
        for at in order {
            if left == 0 {
                break;
            }
            parts[at] += 1;
            left -= 1;
        }
        return parts;
    }
}

/// Selects the cells for a VM that [`divide`] divides: the fewest that have the memory of their parts and,
/// where any set does, as many CPUs as the VM has vCPUs. Ties go to the lowest load in vCPUs per CPU
/// afterwards, then to the lowest numbers. Cordoned cells are excluded. The cells are sorted by number, at
/// most one per vCPU and per 64 MiB. Returns `None` if no set has the memory.
///
/// Among more than 10 different cells the result may not be minimal, since not all sets are tried.
pub fn choose(capacities: &[CellCapacity], vcpus: u8, memory_bytes: u64) -> Option<Vec<u16>> {
    let usable: Vec<CellCapacity> = capacities
        .iter()
        .filter(|room| room.cpus > 0 && !room.is_cordoned)
        .copied()
        .collect();
    let by_memory = usize::try_from(memory_bytes / PART_MIN_BYTES).unwrap_or(usize::MAX);
    let most = usable.len().min(by_memory.max(1));
    let cpus = |set: &[CellCapacity]| set.iter().map(|room| u64::from(room.cpus)).sum::<u64>();
    let best = |enough: &dyn Fn(&[CellCapacity]) -> bool| {
        (1..=most).find_map(|count| {
            candidates(&usable, count)
                .into_iter()
                .filter(|set| enough(set) && fits(set, vcpus, memory_bytes))
                .min_by_key(|set| {
                    let vcpus = u64::from(vcpus) + set.iter().map(|room| u64::from(room.vcpus)).sum::<u64>();
                    (vcpus * 1000 / cpus(set), numbers(set))
                })
        })
    };
    best(&|set| cpus(set) >= u64::from(vcpus))
        .or_else(|| best(&|_| true))
        .map(|set| numbers(&set))
}

fn numbers(set: &[CellCapacity]) -> Vec<u16> {
    set.iter().map(|room| room.cell).collect()
}

/// Whether each cell gets a part and has the memory for it.
fn fits(set: &[CellCapacity], vcpus: u8, memory_bytes: u64) -> bool {
    let parts = divide(vcpus, memory_bytes, set);
    parts.len() == set.len()
        && set
            .iter()
            .zip(&parts)
            .all(|(room, part)| part.memory_bytes <= room.free_bytes)
}

/// Returns all sets of `count` cells if the cells are few; else the likely ones.
fn candidates(capacities: &[CellCapacity], count: usize) -> Vec<Vec<CellCapacity>> {
    if capacities.len() > FEW {
        return likely(capacities, count);
    }
    let of_bits = |bits: u32| {
        let chosen = capacities
            .iter()
            .enumerate()
            .filter(|(at, _)| bits >> at & 1 == 1);
        chosen.map(|(_, room)| *room).collect()
    };
    let sets = (1..1_u32 << capacities.len()).filter(|bits| bits.count_ones() as usize == count);
    sets.map(of_bits).collect()
}

/// Returns sets of `count` cells, sorted by number. One of them has the memory if any set has it, up to the
/// rounding of vCPUs and memory: a part fits its cell if the cell has as much free memory per CPU as the VM
/// needs per CPU of the set. So, for each cell's memory per CPU, the sets are, among the cells with at least
/// that much, those with the most CPUs and those with the lowest load. The same by memory alone, since few
/// vCPUs are divided evenly, whatever CPUs the cells have.
fn likely(capacities: &[CellCapacity], count: usize) -> Vec<Vec<CellCapacity>> {
    let each_cpu = |room: &CellCapacity| room.free_bytes / u64::from(room.cpus);
    let all = |room: &CellCapacity| room.free_bytes;
    let load = |room: &CellCapacity| u64::from(room.vcpus) * 1000 / u64::from(room.cpus);
    let few_cpus = |room: &CellCapacity| u64::MAX - u64::from(room.cpus);
    let mut sets = Vec::new();
    for free in [&each_cpu as &dyn Fn(&CellCapacity) -> u64, &all] {
        for least in capacities {
            let mut roomy: Vec<CellCapacity> = capacities
                .iter()
                .filter(|room| free(room) >= free(least))
                .copied()
                .collect();
            if roomy.len() < count {
                continue;
            }
            for key in [&few_cpus as &dyn Fn(&CellCapacity) -> u64, &load] {
                roomy.sort_by_key(|room| (key(room), load(room), room.cell));
                let mut set = roomy[..count].to_vec();
                set.sort_by_key(|room| room.cell);
                sets.push(set);
            }
        }
    }
    sets
}

#[cfg(test)]
mod tests;
