//! Overlap of the CPUs and memory of two clusters on one host.

use super::{CellPlan, HostNodes};
use crate::cpulist;
use crate::size::Size;

/// Describes CPUs or memory that two clusters on one host share, as a part of a sentence; none if they share
/// nothing.
pub fn overlap(own: &[CellPlan], others: &[CellPlan], host: &HostNodes) -> Option<String> {
    let is_taken = |cpu: &&usize| others.iter().any(|other| other.cpus.contains(cpu));
    let mut cpus: Vec<usize> = own
        .iter()
        .flat_map(|cell| &cell.cpus)
        .filter(is_taken)
        .copied()
        .collect();
    if !cpus.is_empty() {
        cpus.sort_unstable();
        let noun = if cpus.len() == 1 { "CPU" } else { "CPUs" };
        return Some(format!("{noun} {}", cpulist::write(&cpus)));
    }
    let all = || own.iter().chain(others);
    for cell in own {
        let is_near = |other: &&CellPlan| other.nodes.iter().any(|node| cell.nodes.contains(node));
        let near: Vec<&CellPlan> = all().filter(is_near).collect();
        // Counts only nodes that one of them uses, so that no node is wrongly counted as full.
        let mut nodes: Vec<u32> = near
            .iter()
            .flat_map(|other| other.nodes.iter().copied())
            .collect();
        nodes.sort_unstable();
        nodes.dedup();
        let wanted = near
            .iter()
            .fold(0_u64, |sum, other| sum.saturating_add(other.memory_bytes));
        let there: u64 = nodes
            .iter()
            .filter_map(|node| host.0.get(node))
            .map(|node| node.memory_bytes)
            .sum();
        if wanted > there {
            let nodes: Vec<usize> = nodes.into_iter().map(|node| node as usize).collect();
            return Some(format!(
                "memory of NUMA node {}, of which both together give out {} and there is {}",
                cpulist::write(&nodes),
                Size(wanted >> 20 << 20),
                Size(there >> 20 << 20)
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::HostNode;

    const GIB: u64 = 1 << 30;

    fn cell(cpus: &[usize], nodes: &[u32], gib: u64) -> CellPlan {
        CellPlan {
            number: 0,
            host: None,
            cpus: cpus.to_vec(),
            nodes: nodes.to_vec(),
            memory_bytes: gib * GIB,
        }
    }

    #[test]
    fn clusters_with_cpus_and_memory_of_their_own_do_not_overlap() {
        let node = |cpus: &[usize]| HostNode {
            cpus: cpus.to_vec(),
            memory_bytes: 8 * GIB,
        };
        let host = HostNodes([(0, node(&[0, 1])), (1, node(&[2, 3]))].into());
        let root = [cell(&[0], &[0], 4), cell(&[2], &[1], 8)];
        assert_eq!(overlap(&[cell(&[1], &[0], 4)], &root, &host), None);
        assert_eq!(overlap(&[cell(&[1], &[0], 4)], &[], &host), None);
        let same_cpu = overlap(&[cell(&[1, 2], &[0], 1), cell(&[0], &[0], 1)], &root, &host);
        assert_eq!(same_cpu.as_deref(), Some("CPUs 0,2"));
        assert_eq!(
            overlap(&[cell(&[2], &[0], 1)], &root, &host).as_deref(),
            Some("CPU 2")
        );
        let memory = overlap(&[cell(&[1], &[0], 5)], &root, &host).unwrap();
        assert!(
            memory.contains("NUMA node 0") && memory.contains("9G") && memory.contains("8G"),
            "{memory}"
        );
        assert!(overlap(&[cell(&[3], &[1], 1)], &root, &host).is_some());
    }
}
