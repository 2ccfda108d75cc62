//! The guest's view of the machine.

use guest_tests::{Cluster, Scratch, Vm};

use crate::{CPUS, MEMORY_MIB};

const NODES: &str = "/sys/devices/system/node";

/// Checks for two nodes, each with half of the vCPUs and the memory, as far from each other as the cells are.
#[track_caller]
pub fn has_a_node_for_each_cell(vm: &Vm, scratch: &Scratch) {
    let read = |name: &str| vm.sh(&format!("cat {NODES}/{name}")).trim().to_owned();
    assert_eq!(vm.sh("nproc").trim(), CPUS.to_string());
    assert_eq!(read("online"), "0-1");
    assert_eq!(read("node0/cpulist"), "0-1");
    assert_eq!(read("node1/cpulist"), "2-3");
    for node in [0, 1] {
        let info = read(&format!("node{node}/meminfo"));
        let total = info.lines().find(|line| line.contains("MemTotal:"));
        let kib: Option<u64> = total.and_then(|line| line.split_whitespace().nth(3)?.parse().ok());
        let found = kib.unwrap_or_else(|| panic!("no MemTotal in {info}")) >> 10;
        // The kernel keeps its text, its tables, and 64 bytes for each page.
        let (least, most) = (MEMORY_MIB / 2 - MEMORY_MIB / 20 - 80, MEMORY_MIB / 2);
        assert!(
            (least..=most).contains(&found),
            "node {node} has {found} MiB of {most}"
        );
    }
    let distances = [read("node0/distance"), read("node1/distance")];
    let far = |row: &str, own: usize| {
        let row: Vec<u32> = row
            .split_whitespace()
            .map(|word| word.parse().expect("a distance"))
            .collect();
        assert!(
            row.len() == 2 && row[own] == 10 && row[1 - own] > 10,
            "{distances:?}"
        );
    };
    far(&distances[0], 0);
    far(&distances[1], 1);
    // Where the cells are the host's nodes, they are as far apart as those.
    if Cluster::file(scratch).is_none() {
        let host = |node: usize| std::fs::read_to_string(format!("{NODES}/node{node}/distance"));
        let host = [host(0), host(1)].map(|row| row.expect("a node of this host").trim().to_owned());
        assert_eq!(distances, host);
    }
}
