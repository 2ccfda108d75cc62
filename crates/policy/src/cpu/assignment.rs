//! Assignment: the CPUs on which the vCPUs of a new VM start.
//!
//! Each vCPU has a CPU of its own (balance scheduling: Sukwong and Kim, EuroSys 2011). VMs get aligned blocks
//! of CPUs, so that gangs that share CPUs share all of them and no holes arise between them; of the blocks
//! the least loaded one, then the first. Blocks are ours; the paper does not say where VMs start. A vCPU of a
//! VM with a reservation starts where the reservations of others leave room for its share.

use super::CpuId;
use super::affinity::distinct;
use super::reserved_time::excess;
use super::set::CpuSet;
use super::topology::Topology;

/// Reserved time that an assignment takes into account.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reserved<'a> {
    /// Share of the VM's reservation that each of its vCPUs has, thousandths of a CPU.
    pub share_permille: u32,
    /// Reserved time of each CPU, thousandths; none of a CPU that is absent.
    pub cpus: &'a [u32],
}

impl Reserved<'_> {
    /// Reserved time of a CPU beyond its limit, with a vCPU of the VM. A VM without a reservation adds none.
    pub fn excess(&self, cpu: CpuId) -> u32 {
        let reserved = self.cpus.get(cpu.index()).copied().unwrap_or(0);
        match self.share_permille {
            0 => 0,
            share => excess(reserved.saturating_add(share)),
        }
    }
}

/// The CPUs for vCPUs that may run on `sets`, one each, while CPUs have these loads and this reserved time.
/// No CPU has more reserved time than its limit with them, if there are such CPUs; else the excess is small.
/// `None` if two vCPUs would have to share a CPU.
pub fn assign(
    topology: &Topology,
    loads: &[u32],
    sets: &[CpuSet],
    reserved: &Reserved<'_>,
) -> Option<Vec<CpuId>> {
    let has_room: CpuSet = (0..topology.cpus())
        .map(CpuId)
        .filter(|cpu| reserved.excess(*cpu) == 0)
        .collect();
    let roomy: Vec<CpuSet> = sets.iter().map(|set| set.intersection(&has_room)).collect();
    assign_any(topology, loads, &roomy, reserved).or_else(|| assign_any(topology, loads, sets, reserved))
}

/// As [`assign`], on all CPUs of the sets.
fn assign_any(
    topology: &Topology,
    loads: &[u32],
    sets: &[CpuSet],
    reserved: &Reserved<'_>,
) -> Option<Vec<CpuId>> {
    let mut usable = CpuSet::default();
    for cpu in (0..topology.cpus()).map(CpuId) {
        if sets.iter().any(|set| set.contains(cpu)) {
            usable.insert(cpu);
        }
    }
    let cost = |cpu: &CpuId| {
        (
            reserved.excess(*cpu),
            loads.get(cpu.index()).copied().unwrap_or(0),
        )
    };
    let block_cpus = sets.len().max(1).next_power_of_two();
    let mut best: Option<((u32, u32), Vec<CpuId>)> = None;
    for first in (0..usize::from(topology.cpus())).step_by(block_cpus) {
        let block: CpuSet = (first..first + block_cpus).map(|cpu| CpuId(cpu as u16)).collect();
        let mut order: Vec<CpuId> = usable.intersection(&block).iter().collect();
        // A block of several cells would make the VM depend on all of them.
        let cell = |cpu: &CpuId| topology.place(*cpu).cell;
        if order.iter().any(|cpu| cell(cpu) != cell(&order[0])) {
            continue;
        }
        order.sort_by_key(|cpu| (cost(cpu), *cpu));
        if let Ok(cpus) = distinct(sets, &order) {
            let sum = cpus.iter().map(cost).fold((0_u32, 0_u32), |sum, cost| {
                (sum.0.saturating_add(cost.0), sum.1.saturating_add(cost.1))
            });
            if best.as_ref().is_none_or(|best| sum < best.0) {
                best = Some((sum, cpus));
            }
        }
    }
    best.map(|best| best.1).or_else(|| {
        let mut order: Vec<CpuId> = usable.iter().collect();
        order.sort_by_key(|cpu| (cost(cpu), *cpu));
        distinct(sets, &order).ok()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NONE: Reserved<'_> = Reserved {
        share_permille: 0,
        cpus: &[],
    };

    #[test]
    fn vms_get_aligned_blocks_and_the_least_loaded_first() {
        let machine = Topology::regular(2, 1, 4);
        let mut loads = [0_u32; 8];
        let mut starts = Vec::new();
        for vcpus in [4, 2, 2, 4, 3] {
            let cpus = assign(&machine, &loads, &vec![CpuSet::ALL; vcpus], &NONE).expect("room");
            for cpu in &cpus {
                loads[cpu.index()] += 1;
            }
            starts.push(cpus.iter().map(|cpu| cpu.0).collect::<Vec<_>>());
        }
        assert_eq!(
            starts,
            [
                vec![0, 1, 2, 3],
                vec![4, 5],
                vec![6, 7],
                vec![0, 1, 2, 3],
                vec![4, 5, 6]
            ]
        );
    }

    #[test]
    fn no_cpu_gets_two_vcpus_of_a_vm() {
        let machine = Topology::regular(1, 1, 4);
        assert_eq!(assign(&machine, &[0; 4], &[CpuSet::ALL; 5], &NONE), None);
        let one: CpuSet = [CpuId(2)].into_iter().collect();
        assert_eq!(assign(&machine, &[0; 4], &[one, one], &NONE), None);
        let sets = [CpuSet::ALL, one, CpuSet::ALL];
        let cpus = assign(&machine, &[0, 0, 0, 9], &sets, &NONE).expect("room");
        assert_eq!(cpus, [0, 2, 1].map(CpuId));
    }

    #[test]
    fn vcpu_with_a_reservation_starts_where_there_is_room_for_it() {
        let machine = Topology::regular(1, 1, 2);
        let one = |loads: [u32; 2], share_permille, cpus: &[u32]| {
            let reserved = Reserved { share_permille, cpus };
            assign(&machine, &loads, &[CpuSet::ALL], &reserved).map(|cpus| cpus[0].0)
        };
        assert_eq!(one([1, 2], 700, &[0, 0]), Some(0));
        assert_eq!(one([1, 2], 700, &[300, 0]), Some(1), "CPU 0 has 600 left");
        assert_eq!(one([1, 2], 700, &[200, 100]), Some(0), "both have room for less");
        assert_eq!(one([1, 2], 800, &[600, 500]), Some(1), "the smaller excess");
        assert_eq!(one([1, 2], 0, &[900, 0]), Some(0), "it has reserved nothing");
    }

    proptest! {
        /// Compared with all assignments: one without an excess is found if there is one.
        #[test]
        fn no_cpu_gets_more_reserved_time_than_it_has_if_that_can_be(
            loads in prop::collection::vec(0..4_u32, 4),
            cpus in prop::collection::vec(0..1_000_u32, 4),
            share_permille in 0..1_000_u32,
            allowed in prop::collection::vec(1..16_u8, 1..4),
        ) {
            let machine = Topology::regular(1, 1, 4);
            let set = |bits: u8| (0..4).filter(|cpu| bits >> cpu & 1 == 1).map(CpuId).collect();
            let sets: Vec<CpuSet> = allowed.into_iter().map(set).collect();
            let reserved = Reserved { share_permille, cpus: &cpus };
            let chosen = assign(&machine, &loads, &sets, &reserved);
            let is_valid = |cpus: &[CpuId]| {
                let mut pairs = cpus.iter().zip(&sets);
                let distinct = cpus.iter().enumerate().all(|(index, cpu)| !cpus[..index].contains(cpu));
                distinct && pairs.all(|(cpu, set)| set.contains(*cpu))
            };
            let fits = |cpus: &[CpuId]| cpus.iter().all(|cpu| reserved.excess(*cpu) == 0);
            let all = (0..4_u16.pow(sets.len() as u32)).map(|number| {
                let digits = (0..sets.len() as u32).map(|place| CpuId(number / 4_u16.pow(place) % 4));
                digits.collect::<Vec<CpuId>>()
            });
            let valid: Vec<Vec<CpuId>> = all.filter(|cpus| is_valid(cpus)).collect();
            prop_assert_eq!(chosen.is_some(), !valid.is_empty());
            if let Some(chosen) = chosen {
                prop_assert!(is_valid(&chosen));
                prop_assert_eq!(fits(&chosen), valid.iter().any(|cpus| fits(cpus)));
            }
        }
    }
}
