//! The parts of this host, as facts for the knowledge base, from sysfs.
//!
//! [`crate::facts`] and `cluster up` call [`discover`]. Unreadable sources are skipped, as in a container
//! without PCI devices. A kernel without NUMA has one node. `docs/guide/knowledge.md` lists the facts.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use knowledge::Fact;

#[cfg(test)]
mod tests;

/// All facts of this host, under its name.
pub fn discover() -> Vec<Fact> {
    below(Path::new("/sys"), &host_name())
}

/// The name of this host in facts.
pub fn host_name() -> String {
    let name = nix::unistd::gethostname().ok();
    let name = name.and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| "localhost".to_owned())
}

/// The facts of a host whose sysfs is at `sys`.
fn below(sys: &Path, host: &str) -> Vec<Fact> {
    let mut facts = vec![Fact::new("host", [host.into()])];
    let nodes = nodes(sys, host, &mut facts);
    let mut node_of = nodes.clone();
    if node_of.is_empty() {
        // A kernel without NUMA has one node and no files of it.
        let online = words(&sys.join("devices/system/cpu/online"));
        node_of = ranges(&online).into_iter().map(|cpu| (cpu, 0)).collect();
        facts.push(Fact::new("node", [host.into(), 0.into()]));
        facts.push(Fact::new(
            "cpus",
            [host.into(), 0.into(), (node_of.len() as i64).into()],
        ));
        facts.extend(
            memory_of_host().map(|bytes| Fact::new("memory_bytes", [host.into(), 0.into(), bytes.into()])),
        );
    }
    let mut caches = BTreeSet::new();
    for (cpu, node) in &node_of {
        let folder = sys.join(format!("devices/system/cpu/cpu{cpu}"));
        let number = |file: &str| words(&folder.join(file)).parse::<i64>().ok();
        facts.push(Fact::new("cpu", [host.into(), (*cpu).into(), (*node).into()]));
        if let (Some(package), Some(core)) =
            (number("topology/physical_package_id"), number("topology/core_id"))
        {
            let terms = [host.into(), (*cpu).into(), package.into(), core.into()];
            facts.push(Fact::new("core", terms));
        }
        for folder in entries(&folder.join("cache"), "index") {
            facts.extend(cache(&folder, host, *cpu, &mut caches));
        }
    }
    devices(sys, host, &mut facts);
    facts
}

/// Adds facts of the nodes. Returns all CPUs, each with its node.
fn nodes(sys: &Path, host: &str, facts: &mut Vec<Fact>) -> Vec<(i64, i64)> {
    let mut node_of = Vec::new();
    let folders = entries(&sys.join("devices/system/node"), "node");
    let numbers: Vec<i64> = folders
        .iter()
        .filter_map(|folder| number_after(folder, "node"))
        .collect();
    for (folder, node) in folders.iter().zip(&numbers) {
        let node = *node;
        facts.push(Fact::new("node", [host.into(), node.into()]));
        let info = fs::read_to_string(folder.join("meminfo")).unwrap_or_default();
        let total = info
            .lines()
            .find_map(|line| line.split_once("MemTotal:")?.1.trim().strip_suffix(" kB"));
        if let Some(kib) = total.and_then(|kib| kib.trim().parse::<i64>().ok()) {
            facts.push(Fact::new(
                "memory_bytes",
                [host.into(), node.into(), (kib * 1024).into()],
            ));
        }
        let cpus = ranges(&words(&folder.join("cpulist")));
        facts.push(Fact::new(
            "cpus",
            [host.into(), node.into(), (cpus.len() as i64).into()],
        ));
        node_of.extend(cpus.into_iter().map(|cpu| (cpu, node)));
        // The file has a distance for each node that is online, in the order of their numbers.
        let distances = words(&folder.join("distance"));
        let distances = distances
            .split_whitespace()
            .filter_map(|word| word.parse::<i64>().ok());
        for (to, distance) in numbers.iter().zip(distances) {
            let terms = [host.into(), node.into(), (*to).into(), distance.into()];
            facts.push(Fact::new("distance", terms));
        }
    }
    node_of.sort_unstable();
    node_of
}

/// A cache of a CPU. A cache that several CPUs share has the name of the first of them.
fn cache(folder: &Path, host: &str, cpu: i64, known: &mut BTreeSet<String>) -> Vec<Fact> {
    let read = |file: &str| words(&folder.join(file));
    let (Ok(level), kind) = (read("level").parse::<i64>(), read("type")) else {
        return Vec::new();
    };
    let first = ranges(&read("shared_cpu_list")).first().copied().unwrap_or(cpu);
    let letter = kind
        .chars()
        .next()
        .filter(|_| kind != "Unified")
        .map(|letter| letter.to_ascii_lowercase());
    let name = format!("L{level}{}-{first}", letter.map(String::from).unwrap_or_default());
    let mut facts = vec![Fact::new(
        "cached",
        [host.into(), cpu.into(), name.as_str().into()],
    )];
    if known.insert(name.clone()) {
        let bytes = size(&read("size"));
        let terms = [
            host.into(),
            name.as_str().into(),
            level.into(),
            kind.as_str().into(),
            bytes.into(),
        ];
        facts.push(Fact::new("cache", terms));
    }
    facts
}

fn devices(sys: &Path, host: &str, facts: &mut Vec<Fact>) {
    for folder in entries(&sys.join("bus/pci/devices"), "") {
        let address = file_name(&folder);
        let class = class_name(&words(&folder.join("class")));
        // A device may be nearest to no node: -1.
        let node: i64 = words(&folder.join("numa_node")).parse().unwrap_or(-1);
        facts.push(Fact::new(
            "device",
            [host.into(), address.as_str().into(), class.into(), node.into()],
        ));
    }
    for folder in entries(&sys.join("class/net"), "") {
        // Interfaces of software have no device and no node.
        if !folder.join("device").exists() {
            continue;
        }
        let name = file_name(&folder);
        let node: i64 = words(&folder.join("device/numa_node")).parse().unwrap_or(-1);
        facts.push(Fact::new("nic", [host.into(), name.as_str().into(), node.into()]));
        if let Some(speed) = words(&folder.join("speed"))
            .parse::<i64>()
            .ok()
            .filter(|speed| *speed > 0)
        {
            facts.push(Fact::new(
                "speed_mbit_s",
                [host.into(), name.as_str().into(), speed.into()],
            ));
        }
    }
}

/// PCI's base classes, by the first byte of `0x010802`.
fn class_name(class: &str) -> &'static str {
    match class.get(2..4) {
        Some("01") => "storage",
        Some("02") => "network",
        Some("03") => "display",
        Some("05") => "memory",
        Some("06") => "bridge",
        Some("0c") => "serial bus",
        Some("12") => "accelerator",
        _ => "other",
    }
}

fn memory_of_host() -> Option<i64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = info
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"))?;
    Some(kib.trim().parse::<i64>().ok()? * 1024)
}

/// Parses a size such as `32K` or `8M`, in bytes.
fn size(text: &str) -> i64 {
    let (number, unit) = text.split_at(
        text.find(|sign: char| !sign.is_ascii_digit())
            .unwrap_or(text.len()),
    );
    let unit = match unit {
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => 1,
    };
    number.parse::<i64>().unwrap_or(0) * unit
}

/// Parses a list of CPUs such as `0-3,8`.
fn ranges(list: &str) -> Vec<i64> {
    let parts = list.split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<i64>().ok()?..=last.parse().ok()?)
    });
    parts.flatten().collect()
}

fn words(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_default().trim().to_owned()
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

fn number_after(path: &Path, prefix: &str) -> Option<i64> {
    file_name(path).strip_prefix(prefix)?.parse().ok()
}

/// The entries of a folder whose names are `prefix` and a number; with an empty prefix, all entries. Sorted.
fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = all
        .map(|entry| entry.path())
        .filter(|path| prefix.is_empty() || number_after(path, prefix).is_some())
        .collect();
    found.sort_by_key(|path| (number_after(path, prefix), file_name(path)));
    found
}
