//! Drawings of a machine: as text, for Graphviz, as a picture.

use std::fmt::Write as _;

use crate::machine::{Host, Machine, Node};

const MIB: i64 = 1 << 20;
const GIB: i64 = 1 << 30;

/// For a terminal: hosts, nodes, cores, and a table of distances.
pub fn text(machine: &Machine) -> String {
    let mut out = String::new();
    for host in &machine.hosts {
        let cpus: usize = host.nodes.iter().map(|node| node.cpus.len()).sum();
        let memory = host.nodes.iter().map(|node| node.memory_bytes).sum();
        let nodes = host.nodes.len();
        let _ = writeln!(
            out,
            "host {}: {nodes} nodes, {cpus} CPUs, {}",
            host.name,
            size(memory)
        );
        for node in &host.nodes {
            let _ = writeln!(
                out,
                "  node {}: {}, CPUs {}",
                node.number,
                size(node.memory_bytes),
                cores(node)
            );
            for cache in &node.caches {
                let shared = ranges(cache.cpus.iter().copied());
                let _ = writeln!(
                    out,
                    "    L{} cache {} of CPUs {shared}",
                    cache.level,
                    size(cache.bytes)
                );
            }
            for device in &node.devices {
                let _ = writeln!(out, "    {}: {}", device.name, device.class);
            }
        }
        if nodes > 1 {
            out.push_str(&distances(host));
        }
    }
    out
}

fn distances(host: &Host) -> String {
    let mut out = "  distances (10: a node's own memory)\n        ".to_owned();
    for node in &host.nodes {
        let _ = write!(out, "{:>4}", node.number);
    }
    out.push('\n');
    for (node, row) in host.nodes.iter().zip(&host.distances) {
        let _ = write!(out, "    {:>4}", node.number);
        for distance in row {
            let _ = write!(out, "{distance:>4}");
        }
        out.push('\n');
    }
    out
}

/// For Graphviz.
pub fn dot(machine: &Machine) -> String {
    let mut out = "graph machine {\n  node [shape=box];\n".to_owned();
    for (index, host) in machine.hosts.iter().enumerate() {
        let _ = writeln!(out, "  subgraph cluster_{index} {{\n    label={:?};", host.name);
        for node in &host.nodes {
            let label = format!(
                "node {}\\n{}\\nCPUs {}",
                node.number,
                size(node.memory_bytes),
                cores(node)
            );
            let _ = writeln!(out, "    h{index}n{} [label=\"{label}\"];", node.number);
        }
        for (from, row) in host.distances.iter().enumerate() {
            for (to, distance) in row
                .iter()
                .enumerate()
                .skip(from + 1)
                .filter(|(_, distance)| **distance > 0)
            {
                let ends = [from, to].map(|at| host.nodes[at].number);
                let _ = writeln!(
                    out,
                    "    h{index}n{} -- h{index}n{} [label={distance}];",
                    ends[0], ends[1]
                );
            }
        }
        out.push_str("  }\n");
    }
    out.push_str("}\n");
    out
}

/// A picture: each host a box of nodes, beside it the distances as shades.
pub fn svg(machine: &Machine) -> String {
    const BOX: usize = 150;
    const ROW: usize = 74;
    const CELL: usize = 18;
    let mut body = String::new();
    let (mut top, mut width) = (10, 300);
    for host in &machine.hosts {
        let count = host.nodes.len();
        let across = count.clamp(1, 4);
        let down = count.div_ceil(across);
        let _ = writeln!(
            body,
            "<text x=\"10\" y=\"{}\" class=\"host\">{}</text>",
            top + 14,
            escape(&host.name)
        );
        for (index, node) in host.nodes.iter().enumerate() {
            let (x, y) = (10 + index % across * BOX, top + 24 + index / across * ROW);
            let _ = writeln!(
                body,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"4\"/>",
                BOX - 8,
                ROW - 8
            );
            let lines = [
                format!("node {}", node.number),
                size(node.memory_bytes),
                format!("CPUs {}", cores(node)),
                node.devices
                    .iter()
                    .map(|device| device.name.as_str())
                    .collect::<Vec<_>>()
                    .join(" "),
            ];
            for (line, words) in lines.iter().enumerate() {
                let shown: String = words.chars().take(22).collect();
                let _ = writeln!(
                    body,
                    "<text x=\"{}\" y=\"{}\">{}</text>",
                    x + 8,
                    y + 15 + line * 15,
                    escape(&shown)
                );
            }
        }
        let left = 30 + across * BOX;
        let far = host
            .distances
            .iter()
            .flatten()
            .copied()
            .max()
            .unwrap_or(10)
            .max(11);
        for (from, row) in host.distances.iter().enumerate() {
            for (to, distance) in row.iter().enumerate() {
                // From white, the node's own, to dark.
                let shade = 255 - (distance - 10).clamp(0, far - 10) * 170 / (far - 10);
                let (x, y) = (left + to * CELL, top + 24 + from * CELL);
                let _ = writeln!(
                    body,
                    "<rect x=\"{x}\" y=\"{y}\" width=\"{CELL}\" height=\"{CELL}\" style=\"fill:rgb({shade},{shade},255)\"><title>{} to {}: {distance}</title></rect>",
                    host.nodes[from].number, host.nodes[to].number
                );
            }
        }
        width = width.max(left + count * CELL + 10);
        top += 34 + (down * ROW).max(count * CELL);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{}\">\n\
         <style>rect{{fill:#eef;stroke:#557}}text{{font:11px sans-serif}}.host{{font:bold 13px sans-serif}}</style>\n{body}</svg>\n",
        top + 10
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// `0-3,8-11`, with the number of cores where they have threads.
fn cores(node: &Node) -> String {
    let cpus = ranges(node.cpus.iter().map(|cpu| cpu.number));
    let mut cores: Vec<_> = node.cpus.iter().map(|cpu| (cpu.package, cpu.core)).collect();
    cores.sort_unstable();
    cores.dedup();
    if cores.len() > 1 && cores.len() < node.cpus.len() {
        return format!("{cpus} ({} cores)", cores.len());
    }
    cpus
}

/// Sorted numbers as Linux lists CPUs.
fn ranges(numbers: impl Iterator<Item = i64>) -> String {
    let mut parts: Vec<(i64, i64)> = Vec::new();
    for number in numbers {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => parts.push((number, number)),
        }
    }
    let text = |(first, last): &(i64, i64)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

fn size(bytes: i64) -> String {
    if bytes >= 10 * GIB {
        format!("{} GiB", bytes / GIB)
    } else if bytes >= GIB {
        format!("{:.1} GiB", bytes as f64 / GIB as f64)
    } else {
        format!("{} MiB", bytes / MIB)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Base, fact};

    fn machine(facts: &str) -> Machine {
        let base: Base = fact::parse(facts).expect("facts").into_iter().collect();
        Machine::of(&base)
    }

    #[test]
    fn a_drawing_names_every_node() {
        let machine = machine(include_str!("../machines/two-sockets.facts"));
        let text = text(&machine);
        assert!(
            text.starts_with("host two-sockets: 2 nodes, 16 CPUs, 128 GiB\n"),
            "{text}"
        );
        assert!(
            text.contains("  node 1: 64 GiB, CPUs 4-7,12-15 (4 cores)\n"),
            "{text}"
        );
        assert!(text.contains("0000:81:00.0: storage"), "{text}");
        assert!(
            text.ends_with("       0   10  21\n       1   21  10\n") || text.contains("  10  21\n"),
            "{text}"
        );
        assert!(dot(&machine).contains("h0n0 -- h0n1 [label=21];"));
        let picture = svg(&machine);
        assert!(
            picture.contains("node 1") && picture.contains("0 to 1: 21"),
            "{picture}"
        );
    }

    #[test]
    fn recorded_machines_are_whole() {
        for (facts, nodes, cpus) in [
            (include_str!("../machines/two-sockets.facts"), 2, 16),
            (include_str!("../machines/eight-nodes.facts"), 8, 32),
            (include_str!("../machines/sixty-four-nodes.facts"), 64, 1024),
        ] {
            let machine = machine(facts);
            let host = &machine.hosts[0];
            assert_eq!(host.nodes.len(), nodes);
            assert_eq!(host.nodes.iter().map(|node| node.cpus.len()).sum::<usize>(), cpus);
            for (from, row) in host.distances.iter().enumerate() {
                assert!(
                    row.iter()
                        .enumerate()
                        .all(|(to, distance)| (*distance == 10) == (from == to))
                );
            }
        }
    }

    #[test]
    fn names_in_facts_do_not_break_a_picture() {
        let machine = machine("host(\"<a & b>\")\nnode(\"<a & b>\", 0)");
        assert!(svg(&machine).contains("&lt;a &amp; b&gt;"));
    }
}
