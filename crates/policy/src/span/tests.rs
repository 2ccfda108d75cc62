//! Divisions add up and are fair; choices fit, and are as small as any.

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

fn room(cell: u16, cpus: u32, vcpus: u32, free_mib: u64) -> CellCapacity {
    CellCapacity {
        cell,
        cpus,
        vcpus,
        free_bytes: free_mib * MIB,
        is_cordoned: false,
        is_here: true,
    }
}

fn part(cell: u16, vcpus: Range<u8>, mib: u64) -> Part {
    Part {
        cell,
        vcpus,
        memory_bytes: mib * MIB,
    }
}

#[test]
fn equal_cells_receive_equal_parts() {
    let cells = [room(1, 4, 0, 4096), room(0, 4, 9, 0)];
    let parts = divide(4, 1024 * MIB, &cells);
    assert_eq!(parts, [part(1, 0..2, 512), part(0, 2..4, 512)]);
}

#[test]
fn vcpus_are_proportional_to_cpus() {
    let parts = divide(8, 1024 * MIB, &[room(0, 6, 0, 0), room(1, 2, 0, 0)]);
    assert_eq!(parts, [part(0, 0..6, 768), part(1, 6..8, 256)]);
}

#[test]
fn smallest_cell_receives_one_vcpu_and_64_mib() {
    let parts = divide(4, 256 * MIB, &[room(0, 100, 0, 0), room(1, 1, 0, 0)]);
    assert_eq!(parts, [part(0, 0..3, 192), part(1, 3..4, 64)]);
    let parts = divide(16, 256 * MIB, &[room(0, 100, 0, 0), room(1, 1, 0, 0)]);
    assert_eq!(parts, [part(0, 0..15, 192), part(1, 15..16, 64)]);
}

#[test]
fn uneven_thirds_are_apportioned() {
    let cells = [room(0, 2, 0, 0), room(1, 2, 0, 0), room(2, 2, 0, 0)];
    let parts = divide(4, 512 * MIB, &cells);
    assert_eq!(
        parts,
        [part(0, 0..2, 256), part(1, 2..3, 128), part(2, 3..4, 128)]
    );
}

#[test]
fn largest_remainder_receives_the_rest() {
    let parts = divide(7, 1024 * MIB, &[room(0, 5, 0, 0), room(1, 3, 0, 0)]);
    assert_eq!(parts, [part(0, 0..4, 586), part(1, 4..7, 438)]);
}

#[test]
fn one_cell_receives_the_whole_vm_and_no_cells_receive_none() {
    let parts = divide(254, 4096 * MIB, &[room(9, 1, 0, 0)]);
    assert_eq!(parts, [part(9, 0..254, 4096)]);
    assert_eq!(divide(4, 512 * MIB, &[]), []);
}

#[test]
fn cells_do_not_exceed_vcpus() {
    let cells = [room(0, 2, 0, 0), room(1, 2, 0, 0)];
    assert_eq!(divide(1, 512 * MIB, &cells), [part(0, 0..1, 512)]);
}

#[test]
fn single_sufficient_cell_is_chosen() {
    let capacities = [room(0, 4, 3, 2048), room(1, 4, 0, 2048)];
    assert_eq!(choose(&capacities, 4, 1024 * MIB), Some(vec![1]));
}

#[test]
fn two_cells_are_chosen_when_one_lacks_memory() {
    let capacities = [room(0, 4, 0, 600), room(1, 4, 9, 700), room(2, 4, 4, 600)];
    assert_eq!(choose(&capacities, 4, 1024 * MIB), Some(vec![0, 2]));
}

#[test]
fn two_cells_are_chosen_when_one_lacks_cpus() {
    let capacities = [room(0, 4, 0, 4096), room(1, 4, 0, 4096)];
    assert_eq!(choose(&capacities, 6, 1024 * MIB), Some(vec![0, 1]));
}

#[test]
fn without_enough_cpus_the_fewest_cells_with_memory_are_chosen() {
    let capacities = [room(0, 4, 0, 4096), room(1, 4, 0, 4096)];
    assert_eq!(choose(&capacities, 9, 1024 * MIB), Some(vec![0]));
}

#[test]
fn cell_without_memory_for_its_part_is_excluded() {
    let capacities = [room(0, 4, 0, 100), room(1, 4, 8, 600), room(2, 4, 8, 600)];
    assert_eq!(choose(&capacities, 8, 1024 * MIB), Some(vec![1, 2]));
    assert_eq!(choose(&capacities, 8, 1300 * MIB), None);
}

#[test]
fn cells_are_limited_by_vcpus_and_64_mib_parts() {
    let capacities = [room(0, 1, 0, 600), room(1, 1, 0, 600), room(2, 1, 0, 600)];
    assert_eq!(choose(&capacities, 1, 1024 * MIB), None);
    assert_eq!(choose(&capacities, 3, 128 * MIB), Some(vec![0]));
}

#[test]
fn small_idle_cell_is_considered_among_many() {
    let mut capacities: Vec<CellCapacity> = (0..11).map(|cell| room(cell, 8, 16, 8192)).collect();
    capacities.push(room(11, 2, 0, 1024));
    assert_eq!(choose(&capacities, 2, 512 * MIB), Some(vec![11]));
}

#[test]
fn load_is_vcpus_per_cpu_including_the_vms() {
    let capacities = [room(0, 1, 0, 1024), room(1, 4, 1, 1024)];
    assert_eq!(choose(&capacities, 1, 64 * MIB), Some(vec![1]));
}

fn capacities(cells: impl Into<proptest::collection::SizeRange>) -> impl Strategy<Value = Vec<CellCapacity>> {
    let any_room = (0..9_u32, 0..20_u32, 0..3000_u64);
    prop::collection::vec(any_room, cells).prop_map(|capacities| {
        let numbered = (0..).zip(capacities);
        numbered
            .map(|(cell, (cpus, vcpus, free))| room(cell, cpus, vcpus, free))
            .collect()
    })
}

/// Returns the size of the smallest set that suffices.
fn smallest(capacities: &[CellCapacity], vcpus: u8, memory_bytes: u64) -> Option<usize> {
    let cpus = |set: &[CellCapacity]| set.iter().map(|room| room.cpus).sum::<u32>();
    let all = (1..=capacities.len()).flat_map(|count| candidates(capacities, count));
    let all = all.filter(|set| {
        let least = PART_MIN_BYTES * set.len() as u64;
        set.iter().all(|room| room.cpus > 0)
            && (set.len() == 1 || least <= memory_bytes)
            && set.len() <= usize::from(vcpus)
            && fits(set, vcpus, memory_bytes)
    });
    let all: Vec<Vec<CellCapacity>> = all.collect();
    let enough = all.iter().filter(|set| cpus(set) >= u32::from(vcpus));
    enough.map(Vec::len).min().or(all.iter().map(Vec::len).min())
}

proptest! {
    #[test]
    fn parts_sum_to_the_vm_in_cell_order(
        vcpus in 1..=254_u8,
        steps in 32..2_000_000_u64,
        capacities in capacities(1..65)
    ) {
        let memory_bytes = steps * STEP_BYTES;
        let parts = divide(vcpus, memory_bytes, &capacities);
        prop_assert_eq!(parts.len(), capacities.len().min(usize::from(vcpus)));
        let mut next = 0;
        for (part, room) in parts.iter().zip(&capacities) {
            prop_assert_eq!(part.cell, room.cell);
            prop_assert_eq!(part.vcpus.start, next);
            prop_assert!(part.vcpus.end > next);
            prop_assert!(part.memory_bytes.is_multiple_of(STEP_BYTES));
            if memory_bytes >= PART_MIN_BYTES * parts.len() as u64 {
                prop_assert!(part.memory_bytes >= PART_MIN_BYTES);
            }
            next = part.vcpus.end;
        }
        prop_assert_eq!(next, vcpus);
        prop_assert_eq!(parts.iter().map(|part| part.memory_bytes).sum::<u64>(), memory_bytes);
    }

    /// A share above the minimum is within one of its quota of the remainder.
    #[test]
    fn parts_are_proportional(
        total in 0..100_000_u64,
        weights in prop::collection::vec(1..1000_u64, 1..65),
        least in 0..100_u64
    ) {
        let least = least.min(total / weights.len() as u64);
        let parts = apportion(total, &weights, least);
        prop_assert_eq!(parts.iter().sum::<u64>(), total);
        prop_assert!(parts.iter().all(|part| *part >= least));
        for (at, part) in parts.iter().enumerate() {
            for (other, other_part) in parts.iter().enumerate() {
                // A cell with more than the least part and, for its weight, more than another by more than
                // rounding is unfair.
                let more = part.saturating_sub(1) * weights[other];
                let less = (other_part + 1) * weights[at];
                prop_assert!(*part <= least || more <= less, "{parts:?} {weights:?}");
            }
        }
    }

    #[test]
    fn chosen_set_fits(vcpus in 1..=254_u8, mib in 64..8000_u64, capacities in capacities(0..30)) {
        let memory_bytes = mib / 2 * 2 * MIB;
        if let Some(chosen) = choose(&capacities, vcpus, memory_bytes) {
            prop_assert!(!chosen.is_empty() && chosen.is_sorted() && chosen.len() <= usize::from(vcpus));
            let set: Vec<CellCapacity> = chosen.iter().map(|cell| capacities[usize::from(*cell)]).collect();
            for (room, part) in set.iter().zip(divide(vcpus, memory_bytes, &set)) {
                prop_assert_eq!(room.cell, part.cell);
                prop_assert!(part.memory_bytes <= room.free_bytes && room.cpus > 0);
            }
        }
    }

    /// No smaller set suffices.
    #[test]
    fn chosen_set_is_smallest(vcpus in 1..40_u8, steps in 32..4000_u64, capacities in capacities(0..7)) {
        let memory_bytes = steps * STEP_BYTES;
        let chosen = choose(&capacities, vcpus, memory_bytes);
        prop_assert_eq!(chosen.map(|set| set.len()), smallest(&capacities, vcpus, memory_bytes));
    }

    /// If vCPUs and memory divide evenly, one of the likely sets has the memory if any set has it.
    #[test]
    fn candidate_sets_include_one_with_enough_memory(
        sixties in 1..5_u8,
        steps in 1..60_u64,
        like in 1..80_u32,
        capacities in capacities(1..7)
    ) {
        let capacities: Vec<CellCapacity> =
            capacities.iter().map(|room| CellCapacity { cpus: like, ..*room }).collect();
        let (vcpus, memory_bytes) = (60 * sixties, 60 * steps * STEP_BYTES);
        for count in 1..=capacities.len() {
            let does = |sets: Vec<Vec<CellCapacity>>| sets.iter().any(|set| fits(set, vcpus, memory_bytes));
            prop_assert_eq!(does(likely(&capacities, count)), does(candidates(&capacities, count)));
        }
    }

    /// Of equal sets the least loaded, then the lowest.
    #[test]
    fn least_loaded_of_equal_cells_are_chosen(
        loads in prop::collection::vec(0..30_u32, 1..20),
        count in 1..9_usize
    ) {
        let count = count.min(loads.len());
        let capacities: Vec<CellCapacity> =
            (0..).zip(&loads).map(|(cell, load)| room(cell, 1, *load, 1024)).collect();
        let mut order: Vec<u16> = (0..loads.len() as u16).collect();
        order.sort_by_key(|cell| loads[usize::from(*cell)]);
        order.truncate(count);
        order.sort();
        prop_assert_eq!(choose(&capacities, count as u8, 512 * MIB), Some(order));
    }
}
