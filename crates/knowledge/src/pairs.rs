//! Selects the CPU pairs to measure and their order. Measurement time is short, so the most informative pairs
//! come first.
//!
//! CPUs that share their last-level cache are equivalent to all others, so some pairs represent the rest: in
//! each such group two threads of a core and two cores, then one CPU of each node with one of each other
//! node, then one CPU of each group. On hosts with few CPUs, all other pairs follow.

use std::collections::{BTreeMap, BTreeSet};

use crate::machine::{Cpu, Host};

/// Most pairs for which all are measured: 45 CPUs.
pub const ALL_PAIRS_MAX: usize = 1000;
/// Most pairs that are measured.
pub const PAIRS_MAX: usize = 2500;

/// Returns the pairs of a host's `allowed` CPUs, the lower number first, each pair once, the most informative
/// first.
pub fn pairs(host: &Host, allowed: &BTreeSet<i64>) -> Vec<(i64, i64)> {
    let mut groups: Vec<Vec<&Cpu>> = Vec::new();
    let mut nodes: Vec<i64> = Vec::new();
    for node in &host.nodes {
        let cache_of = |cpu: &Cpu| {
            node.caches
                .iter()
                .position(|cache| cache.cpus.contains(&cpu.number))
        };
        let mut by_cache: BTreeMap<_, Vec<&Cpu>> = BTreeMap::new();
        for cpu in node.cpus.iter().filter(|cpu| allowed.contains(&cpu.number)) {
            by_cache.entry(cache_of(cpu)).or_default().push(cpu);
        }
        nodes.extend(by_cache.values().next().map(|group| group[0].number));
        groups.extend(by_cache.into_values());
    }
    let inside = groups.iter().flat_map(|group| {
        let first = group[0];
        let core = |cpu: &Cpu| (cpu.package, cpu.core);
        // Machines that report no cores have all CPUs in one core, numbered 0.
        let thread = group[1..].iter().find(|cpu| core(cpu) == core(first));
        let other = group[1..].iter().find(|cpu| core(cpu) != core(first));
        [thread, other].map(|cpu| cpu.map(|cpu| (first.number, cpu.number)))
    });
    let firsts: Vec<i64> = groups.iter().map(|group| group[0].number).collect();
    let mut wanted: Vec<(i64, i64)> = inside.flatten().collect();
    wanted.extend(each_with_each(&nodes));
    wanted.extend(each_with_each(&firsts));
    let all: Vec<i64> = groups.iter().flatten().map(|cpu| cpu.number).collect();
    if all.len() * all.len().saturating_sub(1) / 2 <= ALL_PAIRS_MAX {
        wanted.extend(each_with_each(&all));
    }
    let mut known = BTreeSet::new();
    let ordered = wanted
        .into_iter()
        .map(|(one, other)| (one.min(other), one.max(other)));
    ordered
        .filter(|pair| known.insert(*pair))
        .take(PAIRS_MAX)
        .collect()
}

fn each_with_each(cpus: &[i64]) -> impl Iterator<Item = (i64, i64)> {
    let later = |index: usize| cpus.get(index + 1..).unwrap_or_default();
    (0..cpus.len()).flat_map(move |index| later(index).iter().map(move |other| (cpus[index], *other)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Base, Machine, fact};

    fn host(facts: &str) -> Host {
        let base: Base = fact::parse(facts).expect("facts").into_iter().collect();
        Machine::of(&base).hosts.remove(0)
    }

    fn two_sockets() -> Host {
        host(include_str!("../machines/two-sockets.facts"))
    }

    #[test]
    fn few_cpus_yield_all_pairs_most_informative_first() {
        let measured = pairs(&two_sockets(), &(0..16).collect());
        assert_eq!(measured.len(), 16 * 15 / 2);
        // Threads and cores of each socket, then from socket to socket.
        assert_eq!(measured[..5], [(0, 8), (0, 1), (4, 12), (4, 5), (0, 4)]);
    }

    #[test]
    fn nodes_precede_the_caches_within_them() {
        let cpus = (0..4).map(|cpu| {
            let node = cpu / 2;
            format!(
                "cpu(\"a\", {cpu}, {node})\ncache(\"a\", \"L3-{cpu}\", 3, \"Unified\", 1)\n\
                cached(\"a\", {cpu}, \"L3-{cpu}\")\n"
            )
        });
        let host = host(&format!(
            "host(\"a\")\nnode(\"a\", 0)\nnode(\"a\", 1)\n{}",
            cpus.collect::<String>()
        ));
        let measured = pairs(&host, &(0..4).collect());
        assert_eq!(measured, [(0, 2), (0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]);
    }

    #[test]
    fn many_cpus_yield_representative_pairs() {
        let host = host(include_str!("../machines/sixty-four-nodes.facts"));
        let measured = pairs(&host, &(0..1024).collect());
        assert!(
            (64 * 63 / 2..=PAIRS_MAX).contains(&measured.len()),
            "{}",
            measured.len()
        );
        let node_of: BTreeMap<i64, i64> = host
            .nodes
            .iter()
            .flat_map(|node| node.cpus.iter().map(|cpu| (cpu.number, node.number)))
            .collect();
        let nodes: BTreeSet<_> = measured
            .iter()
            .map(|(one, other)| {
                let [one, other] = [node_of[one], node_of[other]];
                (one.min(other), one.max(other))
            })
            .collect();
        // Every node with every one, and with itself.
        assert_eq!(nodes.len(), 64 * 65 / 2);
    }

    #[test]
    fn single_cpu_has_no_pair_and_unknown_cpus_are_skipped() {
        assert_eq!(pairs(&two_sockets(), &BTreeSet::from([3])), []);
        assert_eq!(pairs(&two_sockets(), &BTreeSet::from([3, 12, 99])), [(3, 12)]);
        assert_eq!(pairs(&Host::default(), &BTreeSet::from([0, 1])), []);
    }

    proptest! {
        #[test]
        fn only_allowed_cpus_are_paired_each_pair_once(
            allowed in prop::collection::btree_set(0..20_i64, 0..16)
        ) {
            let measured = pairs(&two_sockets(), &allowed);
            let there: BTreeSet<i64> = allowed.into_iter().filter(|cpu| *cpu < 16).collect();
            let mut sorted = measured.clone();
            sorted.sort_unstable();
            let cpus: Vec<i64> = there.into_iter().collect();
            prop_assert_eq!(sorted, each_with_each(&cpus).collect::<Vec<_>>());
        }
    }
}
