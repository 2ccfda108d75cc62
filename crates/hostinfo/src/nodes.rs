//! The NUMA nodes that the guest of a spanning VM sees: one for each part, as far from the others as their
//! cells are.
//!
//! The monitor calls [`span_nodes`] before it starts the shards. Distances are the host's (SLIT). Latency and
//! bandwidth are those measured between the cells' CPUs ([`crate::measure`]). The latency is that of a
//! message, which is a line that one CPU has written and another reads. The bandwidth is that of memory that
//! one CPU has written and another copies.

use config::SpanMemory;
use knowledge::Base;
use knowledge::route_costs::RouteCosts;
use policy::span::Part;
use shard_api::launch::NodeLaunch;

/// The distance of a node to itself (ACPI 6.5, 5.2.17).
const LOCAL: u8 = 10;
/// The distance of two cells that share a node of the host. Linux refuses a SLIT in which another node is as
/// near as a node itself (`slit_valid` in its `drivers/acpi/numa/srat.c`), and takes all nodes as equally far
/// without one.
const NEAR: u8 = 11;
/// The distance of cells of different nodes if the host's is not known, as Linux assumes it.
const REMOTE: u8 = 20;
/// The greatest distance; the next number stands for a node that can't be reached.
const FAR: u8 = 254;
/// The distance of nodes whose memory is kept coherent by software, where one access costs as much as
/// hundreds in memory. From 31 on Linux neither starts programs on other nodes nor wakes them there
/// (`node_reclaim_distance` in its `kernel/sched/topology.c`). It still balances load between nodes.
const BY_SOFTWARE: u8 = 160;

/// The nodes of a VM that is divided into `parts`, in their order, by the facts in `base`
/// ([`crate::facts::all`]). Either all latencies and bandwidths are there, or none. With coherent memory
/// there are none, since each part has a copy of the memory and the hardware's figures don't apply.
pub fn span_nodes(parts: &[Part], base: &Base, memory: SpanMemory) -> Vec<NodeLaunch> {
    let is_coherent = memory == SpanMemory::Coherent;
    let costs = RouteCosts::of(base);
    let table = |known: &dyn Fn(u16, u16) -> Option<u64>| -> Option<Vec<Vec<u64>>> {
        let row = |from: &Part| parts.iter().map(|to| known(from.cell, to.cell)).collect();
        parts.iter().map(row).collect()
    };
    // The reader is the receiver of a message or of a copy.
    let latencies = table(&|reader, memory| Some(costs.measured_ns(memory, reader)?.saturating_mul(1000)));
    let bandwidths = table(&|reader, memory| costs.copied_mb_s(memory, reader));
    let figures = latencies.zip(bandwidths).filter(|_| !is_coherent);
    let numbered = parts.iter().enumerate();
    numbered
        .map(|(number, part)| {
            let row = |table: &Vec<Vec<u64>>| table[number].clone();
            let distances = parts.iter().enumerate();
            NodeLaunch {
                vcpus: part.vcpus.clone().collect(),
                memory_bytes: part.memory_bytes,
                distances: distances
                    .map(|(other, to)| match number == other {
                        true => LOCAL,
                        false if is_coherent => BY_SOFTWARE,
                        false => distance(&costs, part.cell, to.cell),
                    })
                    .collect(),
                latencies_ps: figures.as_ref().map(|(ps, _)| row(ps)).unwrap_or_default(),
                bandwidths_mb_s: figures.as_ref().map(|(_, mb_s)| row(mb_s)).unwrap_or_default(),
                // The memory has been bound when the shards get it.
                host_node: None,
            }
        })
        .collect()
}

/// The distance between two cells.
fn distance(costs: &RouteCosts, from: u16, to: u16) -> u8 {
    let known = costs.distance(from, to);
    let known = known.map(|distance| u8::try_from(distance).unwrap_or(FAR).clamp(NEAR, FAR));
    let same = || costs.node(from) == costs.node(to);
    known.unwrap_or_else(|| if same() { NEAR } else { REMOTE })
}

#[cfg(test)]
mod tests {
    use config::cluster::CellPlan;
    use knowledge::fact;

    use super::*;
    use crate::facts;

    const TWO: &str = include_str!("../../knowledge/machines/two-sockets.facts");
    const HOST: &str = "two-sockets";

    /// Two sockets with CPUs 0 to 3 and 4 to 7; cells of the first, of the second, and another one of the
    /// second.
    fn known(facts: &str) -> Base {
        let mut base: Base = fact::parse(TWO).unwrap().into_iter().collect();
        let plan = |number, cpus: &[usize], node| CellPlan {
            number,
            host: None,
            cpus: cpus.to_vec(),
            nodes: vec![node],
            memory_bytes: 1 << 30,
        };
        let plans = [
            plan(0, &[0, 1, 2, 3], 0),
            plan(1, &[4, 5], 1),
            plan(2, &[6, 7], 1),
        ];
        base.learn(facts::cells(&plans, HOST, None));
        base.learn(fact::parse(facts).unwrap());
        base
    }

    fn parts(cells: &[u16]) -> Vec<Part> {
        let numbered = (0..).zip(cells);
        numbered
            .map(|(number, cell)| Part {
                cell: *cell,
                vcpus: 2 * number..2 * number + 2,
                memory_bytes: (u64::from(number) + 1) << 28,
            })
            .collect()
    }

    fn distances(cells: &[u16], base: &Base) -> Vec<Vec<u8>> {
        let nodes = span_nodes(&parts(cells), base, SpanMemory::Shared);
        nodes.into_iter().map(|node| node.distances).collect()
    }

    #[test]
    fn each_part_becomes_a_guest_node() {
        let nodes = span_nodes(&parts(&[1, 0]), &known(""), SpanMemory::Shared);
        assert_eq!([&nodes[0].vcpus, &nodes[1].vcpus], [&[0, 1], &[2, 3]]);
        assert_eq!([nodes[0].memory_bytes, nodes[1].memory_bytes], [1 << 28, 2 << 28]);
        assert!(
            nodes
                .iter()
                .all(|node| node.latencies_ps.is_empty() && node.bandwidths_mb_s.is_empty())
        );
        assert!(nodes.iter().all(|node| node.host_node.is_none()));
    }

    #[test]
    fn guest_distances_are_the_hosts_and_cells_of_one_node_differ() {
        let host = known("");
        assert_eq!(distances(&[0, 1], &host), [[10, 21], [21, 10]]);
        assert_eq!(distances(&[1, 2], &host), [[10, 11], [11, 10]]);
        let far = known("distance(\"two-sockets\", 0, 1, 300)");
        assert_eq!(distances(&[0, 1], &far), [[10, 254], [21, 10]]);
        // Firmware without distances, or with invalid ones.
        let unknown = known("distance(\"two-sockets\", 0, 1, 0)\ndistance(\"two-sockets\", 1, 0, 3)");
        assert_eq!(distances(&[0, 1], &unknown), [[10, 20], [11, 10]]);
        assert_eq!(
            distances(&[2, 1], &known("distance(\"two-sockets\", 1, 1, 0)")),
            [[10, 11], [11, 10]]
        );
        assert_eq!(distances(&[2], &host), [[10]]);
    }

    #[test]
    fn latency_and_bandwidth_are_reported_for_the_reader() {
        let measured = |from, to, ns, mb_s| {
            format!(
                "latency_ns(\"{HOST}\", {from}, {to}, \"ring\", {ns})\nbandwidth_mb_s(\"{HOST}\", {from}, \
                 {to}, \"copy\", {mb_s})\n"
            )
        };
        let near = measured(0, 1, 90, 16_000) + &measured(4, 5, 95, 15_000);
        let forward = measured(0, 4, 300, 9000);
        let all = known(&(near.clone() + &forward + &measured(4, 0, 310, 8000)));
        let nodes = span_nodes(&parts(&[0, 1]), &all, SpanMemory::Shared);
        // CPUs of cell 1 read what CPU 0 of cell 0 has written.
        assert_eq!(nodes[1].latencies_ps, [300_000, 95_000]);
        assert_eq!(nodes[1].bandwidths_mb_s, [9000, 15_000]);
        assert_eq!(nodes[0].latencies_ps, [90_000, 310_000]);
        assert_eq!(nodes[0].bandwidths_mb_s, [16_000, 8000]);
        // The way back was not measured.
        let nodes = span_nodes(&parts(&[0, 1]), &known(&(near + &forward)), SpanMemory::Shared);
        assert!(
            nodes
                .iter()
                .all(|node| node.latencies_ps.is_empty() && node.bandwidths_mb_s.is_empty())
        );
    }

    #[test]
    fn software_coherent_memory_is_always_far() {
        let measured = |from, to| {
            format!(
                "latency_ns(\"{HOST}\", {from}, {to}, \"ring\", 90)\nbandwidth_mb_s(\"{HOST}\", {from}, \
                 {to}, \"copy\", 16000)\n"
            )
        };
        let pairs = [(0, 1), (4, 5), (0, 4), (4, 0)];
        let all = known(&pairs.map(|(from, to)| measured(from, to)).concat());
        let told = |memory| span_nodes(&parts(&[0, 1]), &all, memory);
        assert_eq!(told(SpanMemory::Shared)[0].latencies_ps, [90_000, 90_000]);
        let nodes = told(SpanMemory::Coherent);
        assert_eq!(nodes[0].distances, [10, 160]);
        assert_eq!(nodes[1].distances, [160, 10]);
        assert!(nodes.iter().all(|node| node.latencies_ps.is_empty()));
    }
}
