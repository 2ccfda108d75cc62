//! The guest's NUMA nodes.

use super::MEMORY_STEP_BYTES;
use crate::cpulist;
use crate::fault::{Fault, fault};
use crate::vm::VmSpec;

/// Maximum number of nodes of a kernel.
const HOST_NODES_MAX: u32 = 1024;

/// Host nodes that all memory is bound to.
pub(super) fn check_host_nodes(spec: &VmSpec) -> Result<(), Fault> {
    let nodes = &spec.memory_nodes;
    let wrong = |what: String, help: &str| Err(fault(&["memory_nodes"], what, help.to_owned()));
    if let Some(node) = nodes.iter().find(|node| **node >= HOST_NODES_MAX) {
        return wrong(
            format!("{node} is no node of a host"),
            "write numbers of nodes of the host, as `numactl -H` shows them",
        );
    }
    if let Some((node, _)) = (nodes.iter().zip(1..)).find(|(node, next)| nodes[*next..].contains(node)) {
        return wrong(format!("node {node} is named twice"), "name it once");
    }
    if nodes.is_empty() {
        return Ok(());
    }
    if spec.nodes.iter().any(|node| node.host_node.is_some()) {
        return wrong(
            "the guest's nodes have a `host_node`".to_owned(),
            "leave out `memory_nodes`, or each `host_node`",
        );
    }
    if spec.span.is_some() {
        return wrong(
            "the memory of a VM that spans cells lies in these".to_owned(),
            "leave out `memory_nodes` or `span`",
        );
    }
    Ok(())
}

pub(super) fn check(spec: &VmSpec) -> Result<(), Fault> {
    check_host_nodes(spec)?;
    if spec.nodes.is_empty() {
        return Ok(());
    }
    if spec.nodes.len() > 64 {
        return Err(fault(
            &["nodes"],
            format!("{} nodes", spec.nodes.len()),
            "64 at most",
        ));
    }
    let mut home = vec![None; usize::from(spec.cpus)];
    for (index, node) in spec.nodes.iter().enumerate() {
        let place = index.to_string();
        let Some(cpus) = cpulist::parse(&node.cpus) else {
            return Err(fault(
                &["nodes", &place, "cpus"],
                format!("{:?} is not a list of CPUs", node.cpus),
                "write it as \"0-1,4\"",
            ));
        };
        for cpu in cpus {
            match home.get_mut(usize::from(cpu)) {
                None => {
                    return Err(fault(
                        &["nodes", &place, "cpus"],
                        format!("CPU {cpu} of a VM with {} CPUs", spec.cpus),
                        format!("CPUs are 0 to {}", spec.cpus - 1),
                    ));
                }
                Some(Some(_)) => {
                    return Err(fault(
                        &["nodes", &place, "cpus"],
                        format!("CPU {cpu} is in two nodes"),
                        "list it once",
                    ));
                }
                Some(empty) => *empty = Some(index),
            }
        }
        if !node.memory.0.is_multiple_of(MEMORY_STEP_BYTES) || node.memory.0 == 0 {
            return Err(fault(
                &["nodes", &place, "memory"],
                format!("{} is not 2M or a multiple of it", node.memory),
                "give the node a multiple of 2M",
            ));
        }
        if let Some(distances) = &node.distances {
            if distances.len() != spec.nodes.len() {
                return Err(fault(
                    &["nodes", &place, "distances"],
                    format!("{} distances for {} nodes", distances.len(), spec.nodes.len()),
                    "write one for each node, in order",
                ));
            }
            if distances
                .iter()
                .enumerate()
                .any(|(to, &far)| (to == index) != (far == 10) || far < 10)
            {
                return Err(fault(
                    &["nodes", &place, "distances"],
                    format!("{distances:?} are not node {index}'s distances"),
                    "write 10 for the node itself, more than 10 for the others",
                ));
            }
        }
    }
    if let Some(cpu) = home.iter().position(Option::is_none) {
        return Err(fault(
            &["nodes"],
            format!("CPU {cpu} is in no node"),
            "list each CPU in one node",
        ));
    }
    let sum = spec
        .nodes
        .iter()
        .try_fold(0u64, |sum, node| sum.checked_add(node.memory.0));
    if sum != Some(spec.memory.0) {
        let message = format!("the nodes' memory does not add up to the VM's {}", spec.memory);
        let help = match sum {
            Some(sum) => format!(
                "the nodes have {0}: write `memory = \"{0}\"`, or change theirs",
                crate::Size(sum)
            ),
            None => "give the nodes less".to_owned(),
        };
        return Err(fault(&["nodes"], message, help));
    }
    Ok(())
}
