//! The machine that the facts describe.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::Base;
use crate::route_costs::{RING, median};

/// The hosts of a cluster.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Machine {
    /// Hosts, sorted by name.
    pub hosts: Vec<Host>,
}

/// A host: one machine under one Linux.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Host {
    /// Name of the host.
    pub name: String,
    /// NUMA nodes by number.
    pub nodes: Vec<Node>,
    /// Relative distance from each node to each, in the order of `nodes`; 10 is a node's own memory, 0 is
    /// unknown.
    pub distances: Vec<Vec<i64>>,
    /// Median measured latency of a message from each node's CPUs to those of each node, nanoseconds, in the
    /// same order; 0 is unknown.
    pub latencies_ns: Vec<Vec<i64>>,
}

/// A NUMA node.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Node {
    /// Node or CPU number.
    pub number: i64,
    /// Memory of the node, bytes.
    pub memory_bytes: i64,
    /// CPUs, sorted by number.
    pub cpus: Vec<Cpu>,
    /// The last-level caches of its CPUs.
    pub caches: Vec<Cache>,
    /// PCI devices and network cards that are near it.
    pub devices: Vec<Device>,
}

/// A CPU, as Linux numbers them.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Cpu {
    /// Node or CPU number.
    pub number: i64,
    /// Socket number.
    pub package: i64,
    /// Core number in the socket; CPUs with the same core are its hardware threads.
    pub core: i64,
}

/// A cache with the CPUs that use it.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Cache {
    /// Name, unique in the host.
    pub name: String,
    /// Cache level: 1, 2 or 3.
    pub level: i64,
    /// Size, bytes.
    pub bytes: i64,
    /// Numbers of the CPUs that share it.
    pub cpus: Vec<i64>,
}

/// A PCI device near a node, or near none.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Device {
    /// PCI address, or a network card's name.
    pub name: String,
    /// Device class.
    pub class: String,
}

impl Machine {
    /// Builds the machine from the facts in `base`. Facts on undeclared hosts, nodes or CPUs are skipped.
    pub fn of(base: &Base) -> Self {
        let hosts = base.named("host").filter_map(|fact| fact.text(0));
        Self {
            hosts: hosts.map(|name| host(base, name)).collect(),
        }
    }
}

fn host(base: &Base, name: &str) -> Host {
    let of = |kind| base.named(kind).filter(move |fact| fact.text(0) == Some(name));
    let mut nodes: BTreeMap<i64, Node> = BTreeMap::new();
    for number in of("node").filter_map(|fact| fact.number(1)) {
        nodes.entry(number).or_default().number = number;
    }
    for fact in of("memory_bytes") {
        if let (Some(node), Some(bytes)) = (
            fact.number(1).and_then(|node| nodes.get_mut(&node)),
            fact.number(2),
        ) {
            node.memory_bytes = bytes;
        }
    }
    let mut node_of = BTreeMap::new();
    for fact in of("cpu") {
        let (Some(number), Some(node)) = (fact.number(1), fact.number(2)) else {
            continue;
        };
        if let Some(node) = nodes.get_mut(&node) {
            node_of.insert(number, node.number);
            node.cpus.push(Cpu {
                number,
                ..Cpu::default()
            });
        }
    }
    for fact in of("core") {
        let [cpu, package, core] = [1, 2, 3].map(|place| fact.number(place));
        let node = cpu.and_then(|cpu| nodes.get_mut(node_of.get(&cpu)?));
        let known = node.and_then(|node| node.cpus.iter_mut().find(|known| Some(known.number) == cpu));
        if let (Some(known), Some(package), Some(core)) = (known, package, core) {
            (known.package, known.core) = (package, core);
        }
    }
    last_level_caches(base, name, &node_of, &mut nodes);
    for (kind, class_at, node_at) in [("device", 2, 3), ("nic", 1, 2)] {
        for fact in of(kind) {
            let node = fact.number(node_at).and_then(|node| nodes.get_mut(&node));
            if let (Some(node), Some(name)) = (node, fact.text(1)) {
                let class = if kind == "nic" {
                    Some("network card")
                } else {
                    fact.text(class_at)
                };
                node.devices.push(Device {
                    name: name.to_owned(),
                    class: class.unwrap_or("device").to_owned(),
                });
            }
        }
    }
    let order: Vec<i64> = nodes.keys().copied().collect();
    let mut distances = vec![vec![0; order.len()]; order.len()];
    for fact in of("distance") {
        let place = |at| order.binary_search(&fact.number(at)?).ok();
        if let (Some(from), Some(to), Some(distance)) = (place(1), place(2), fact.number(3)) {
            distances[from][to] = distance;
        }
    }
    Host {
        name: name.to_owned(),
        latencies_ns: latencies(base, name, &node_of, &order),
        nodes: nodes.into_values().collect(),
        distances,
    }
}

/// Returns the median latencies between nodes in this order, nanoseconds.
fn latencies(base: &Base, host: &str, node_of: &BTreeMap<i64, i64>, order: &[i64]) -> Vec<Vec<i64>> {
    let mut measured = vec![vec![Vec::new(); order.len()]; order.len()];
    for fact in base.named("latency_ns") {
        let place = |at| order.binary_search(node_of.get(&fact.number(at)?)?).ok();
        let of_rings = fact.text(0) == Some(host) && fact.text(3) == Some(RING);
        if let (true, Some(from), Some(to), Some(ns)) = (of_rings, place(1), place(2), fact.number(4)) {
            measured[from][to].push(ns);
        }
    }
    let medians = |row: Vec<Vec<i64>>| {
        let medians = row.into_iter().map(|mut all| median(&mut all).unwrap_or(0));
        medians.collect()
    };
    measured.into_iter().map(medians).collect()
}

/// Puts the caches of the highest level into the nodes of their CPUs.
fn last_level_caches(base: &Base, host: &str, node_of: &BTreeMap<i64, i64>, nodes: &mut BTreeMap<i64, Node>) {
    let of = |kind| base.named(kind).filter(move |fact| fact.text(0) == Some(host));
    let last = of("cache").filter_map(|fact| fact.number(2)).max();
    for fact in of("cache").filter(|fact| fact.number(2) == last) {
        let (Some(name), Some(level), Some(bytes)) = (fact.text(1), fact.number(2), fact.number(4)) else {
            continue;
        };
        let shared = of("cached").filter(|cached| cached.text(2) == Some(name));
        let cpus: Vec<i64> = shared.filter_map(|cached| cached.number(1)).collect();
        let node = cpus.first().and_then(|cpu| nodes.get_mut(node_of.get(cpu)?));
        if let Some(node) = node {
            node.caches.push(Cache {
                name: name.to_owned(),
                level,
                bytes,
                cpus,
            });
        }
    }
}
