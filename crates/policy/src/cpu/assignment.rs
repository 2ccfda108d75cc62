//! Assignment: the CPUs on which the vCPUs of a new VM start.
//!
//! Each vCPU has a CPU of its own (balance scheduling: Sukwong and Kim, EuroSys 2011). VMs get aligned blocks
//! of CPUs, so that gangs that share CPUs share all of them and no holes arise between them; of the blocks
//! the least loaded one, then the first. Blocks are ours; the paper does not say where VMs start.

use super::CpuId;
use super::affinity::distinct;
use super::set::CpuSet;
use super::topology::Topology;

/// The CPUs for vCPUs that may run on `sets`, one each, while CPUs have these loads. `None` if two of them
/// would have to share a CPU.
pub fn assign(topology: &Topology, loads: &[u32], sets: &[CpuSet]) -> Option<Vec<CpuId>> {
    let mut usable = CpuSet::default();
    for cpu in (0..topology.cpus()).map(CpuId) {
        if sets.iter().any(|set| set.contains(cpu)) {
            usable.insert(cpu);
        }
    }
    let load = |cpu: &CpuId| loads.get(cpu.index()).copied().unwrap_or(0);
    let block_cpus = sets.len().max(1).next_power_of_two();
    let mut best: Option<(u32, Vec<CpuId>)> = None;
    for first in (0..usize::from(topology.cpus())).step_by(block_cpus) {
        let block: CpuSet = (first..first + block_cpus).map(|cpu| CpuId(cpu as u16)).collect();
        let mut order: Vec<CpuId> = usable.intersection(&block).iter().collect();
        // A block of several cells would make the VM depend on all of them.
        let cell = |cpu: &CpuId| topology.place(*cpu).cell;
        if order.iter().any(|cpu| cell(cpu) != cell(&order[0])) {
            continue;
        }
        order.sort_by_key(|cpu| (load(cpu), *cpu));
        if let Ok(cpus) = distinct(sets, &order) {
            let sum: u32 = cpus.iter().map(load).sum();
            if best.as_ref().is_none_or(|best| sum < best.0) {
                best = Some((sum, cpus));
            }
        }
    }
    best.map(|best| best.1).or_else(|| {
        let mut order: Vec<CpuId> = usable.iter().collect();
        order.sort_by_key(|cpu| (load(cpu), *cpu));
        distinct(sets, &order).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_get_aligned_blocks_and_the_least_loaded_first() {
        let machine = Topology::regular(2, 1, 4);
        let mut loads = [0_u32; 8];
        let mut starts = Vec::new();
        for vcpus in [4, 2, 2, 4, 3] {
            let cpus = assign(&machine, &loads, &vec![CpuSet::ALL; vcpus]).expect("room");
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
        assert_eq!(assign(&machine, &[0; 4], &[CpuSet::ALL; 5]), None);
        let one: CpuSet = [CpuId(2)].into_iter().collect();
        assert_eq!(assign(&machine, &[0; 4], &[one, one]), None);
        let cpus = assign(&machine, &[0, 0, 0, 9], &[CpuSet::ALL, one, CpuSet::ALL]).expect("room");
        assert_eq!(cpus, [0, 2, 1].map(CpuId));
    }
}
