//! A sysfs made by hand, and this machine's own.

use std::fs;
use std::path::Path;

use knowledge::{Base, Machine};

use super::*;

fn put(sys: &Path, file: &str, text: &str) {
    let path = sys.join(file);
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    fs::write(path, format!("{text}\n")).expect("a file");
}

#[test]
fn two_sockets_are_discovered() {
    let folder = tempfile::tempdir().expect("a folder");
    let sys = folder.path();
    for (node, cpus, distances) in [(0, "0-1,4-5", "10 21"), (2, "2-3,6-7", "21 10")] {
        let at = format!("devices/system/node/node{node}");
        put(sys, &format!("{at}/cpulist"), cpus);
        put(sys, &format!("{at}/distance"), distances);
        put(
            sys,
            &format!("{at}/meminfo"),
            &format!("Node {node} MemTotal:       2097152 kB\nNode {node} MemFree: 1 kB"),
        );
    }
    for cpu in 0..8 {
        let at = format!("devices/system/cpu/cpu{cpu}");
        put(
            sys,
            &format!("{at}/topology/physical_package_id"),
            &(cpu % 4 / 2).to_string(),
        );
        put(sys, &format!("{at}/topology/core_id"), &(cpu % 2).to_string());
        let shared = if cpu % 4 < 2 { "0-1,4-5" } else { "2-3,6-7" };
        put(sys, &format!("{at}/cache/index3/level"), "3");
        put(sys, &format!("{at}/cache/index3/type"), "Unified");
        put(sys, &format!("{at}/cache/index3/size"), "8192K");
        put(sys, &format!("{at}/cache/index3/shared_cpu_list"), shared);
    }
    put(sys, "bus/pci/devices/0000:81:00.0/class", "0x010802");
    put(sys, "bus/pci/devices/0000:81:00.0/numa_node", "2");
    put(sys, "class/net/eth0/device/numa_node", "0");
    put(sys, "class/net/eth0/speed", "25000");
    put(sys, "class/net/lo/speed", "0");

    let base: Base = below(sys, "made").into_iter().collect();
    let machine = Machine::of(&base);
    let host = &machine.hosts[0];
    let numbers: Vec<i64> = host.nodes.iter().map(|node| node.number).collect();
    assert_eq!(numbers, [0, 2]);
    assert_eq!(host.distances, [[10, 21], [21, 10]]);
    let last = &host.nodes[1];
    assert_eq!(last.memory_bytes, 2 << 30);
    assert_eq!(
        last.cpus.iter().map(|cpu| cpu.number).collect::<Vec<_>>(),
        [2, 3, 6, 7]
    );
    assert_eq!((last.caches.len(), last.caches[0].bytes), (1, 8 << 20));
    assert_eq!(last.caches[0].cpus, [2, 3, 6, 7]);
    assert_eq!(last.devices[0].class, "storage");
    assert_eq!(host.nodes[0].devices[0].name, "eth0");
    assert_eq!(base.named("speed_mbit_s").count(), 1);
}

#[test]
fn host_without_sysfs_topology_has_one_node() {
    let folder = tempfile::tempdir().expect("a folder");
    put(folder.path(), "devices/system/cpu/online", "0-2");
    let base: Base = below(folder.path(), "bare").into_iter().collect();
    let machine = Machine::of(&base);
    assert_eq!(machine.hosts[0].nodes.len(), 1);
    assert_eq!(machine.hosts[0].nodes[0].cpus.len(), 3);
    assert!(machine.hosts[0].nodes[0].memory_bytes > 0);
}

#[test]
fn discovered_cpus_match_the_kernels() {
    let base: Base = discover().into_iter().collect();
    let online = ranges(&words(Path::new("/sys/devices/system/cpu/online")));
    let cpus: Vec<i64> = base.named("cpu").filter_map(|fact| fact.number(1)).collect();
    assert_eq!(cpus, online);
}

#[test]
fn caches_of_one_level_differ_by_kind_and_sizes_have_units() {
    let folder = tempfile::tempdir().expect("a folder");
    let sys = folder.path();
    put(sys, "devices/system/cpu/online", "0-1");
    for cpu in 0..2 {
        for (index, kind, size) in [
            (0, "Data", "48K"),
            (1, "Instruction", "32K"),
            (2, "Unified", "2M"),
        ] {
            let at = format!("devices/system/cpu/cpu{cpu}/cache/index{index}");
            put(sys, &format!("{at}/level"), "1");
            put(sys, &format!("{at}/type"), kind);
            put(sys, &format!("{at}/size"), size);
            put(sys, &format!("{at}/shared_cpu_list"), "0-1");
        }
    }
    let base: Base = below(sys, "made").into_iter().collect();
    let caches: Vec<_> = base
        .named("cache")
        .map(|fact| (fact.text(1).expect("a name"), fact.number(4).expect("bytes")))
        .collect();
    assert_eq!(
        caches,
        [("L1-0", 2 << 20), ("L1d-0", 48 << 10), ("L1i-0", 32 << 10)]
    );
    assert_eq!(base.named("cached").count(), 6, "three of each CPU");
}

#[test]
fn devices_have_their_class_and_only_links_that_are_up_a_speed() {
    let folder = tempfile::tempdir().expect("a folder");
    let sys = folder.path();
    put(sys, "devices/system/cpu/online", "0");
    let classes = [
        ("0x010802", "storage"),
        ("0x020000", "network"),
        ("0x030000", "display"),
        ("0x050000", "memory"),
        ("0x060400", "bridge"),
        ("0x0c0330", "serial bus"),
        ("0x120000", "accelerator"),
        ("0x080700", "other"),
        ("", "other"),
    ];
    for (number, (class, _)) in classes.iter().enumerate() {
        put(sys, &format!("bus/pci/devices/0000:00:0{number}.0/class"), class);
    }
    for (name, speed) in [("down", "-1"), ("unknown", "0"), ("up", "100")] {
        put(sys, &format!("class/net/{name}/device/numa_node"), "0");
        put(sys, &format!("class/net/{name}/speed"), speed);
    }
    let base: Base = below(sys, "made").into_iter().collect();
    let found: Vec<_> = base
        .named("device")
        .map(|fact| (fact.text(2).expect("a class"), fact.number(3).expect("a node")))
        .collect();
    // No file names a node of them.
    assert_eq!(found, classes.map(|(_, name)| (name, -1)));
    let speeds: Vec<_> = base.named("speed_mbit_s").map(|fact| fact.text(1)).collect();
    assert_eq!(speeds, [Some("up")]);
    assert_eq!(base.named("nic").count(), 3);
}
