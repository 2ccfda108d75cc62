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
            out.push_str("  distances (10: a node's own memory)\n");
            out.push_str(&table(host, &host.distances));
        }
        if has_latencies(host) {
            out.push_str("  a message, ns, measured (-: not known)\n");
            out.push_str(&table(host, &host.latencies_ns));
        }
    }
    out
}

fn has_latencies(host: &Host) -> bool {
    host.latencies_ns.iter().flatten().any(|ns| *ns > 0)
}

/// From each node to each.
fn table(host: &Host, values: &[Vec<i64>]) -> String {
    let widest = values
        .iter()
        .flatten()
        .max()
        .map_or(0, |value| value.to_string().len());
    let width = widest.max(3) + 1;
    let mut out = " ".repeat(8);
    for node in &host.nodes {
        let _ = write!(out, "{:>width$}", node.number);
    }
    out.push('\n');
    for (node, row) in host.nodes.iter().zip(values) {
        let _ = write!(out, "    {:>4}", node.number);
        for value in row {
            let shown = if *value == 0 {
                "-".to_owned()
            } else {
                value.to_string()
            };
            let _ = write!(out, "{shown:>width$}");
        }
        out.push('\n');
    }
    out
}

/// Draws the machine in the language of Graphviz.
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
        for (from, one) in host.nodes.iter().enumerate() {
            for (to, other) in host.nodes.iter().enumerate().skip(from) {
                // A node's own distance is known anyway.
                let distance = (from != to)
                    .then(|| host.distances[from][to])
                    .filter(|distance| *distance > 0);
                let distance = distance.map(|distance| distance.to_string());
                let label: Vec<String> = distance.into_iter().chain(latency(host, from, to)).collect();
                if !label.is_empty() {
                    let (one, other, label) = (one.number, other.number, label.join(", "));
                    let _ = writeln!(out, "    h{index}n{one} -- h{index}n{other} [label=\"{label}\"];");
                }
            }
        }
        out.push_str("  }\n");
    }
    out.push_str("}\n");
    out
}

/// The measured message latency between two nodes, such as `140 ns`; both directions where they differ.
fn latency(host: &Host, from: usize, to: usize) -> Option<String> {
    let [there, back] = [(from, to), (to, from)].map(|(from, to)| host.latencies_ns[from][to]);
    match (there, back) {
        (0, 0) => None,
        (0, one) | (one, 0) => Some(format!("{one} ns")),
        (one, other) if one == other => Some(format!("{one} ns")),
        (one, other) => Some(format!("{one}/{other} ns")),
    }
}

/// Returns a picture: each host as a box of nodes, beside it the distances as shades, and the measured costs
/// of messages.
pub fn svg(machine: &Machine) -> String {
    const BOX: usize = 150;
    const ROW: usize = 74;
    const CELL: usize = 18;
    /// With a number in it.
    const CELL_WIDE: usize = 34;
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
        let mut left = 30 + across * BOX;
        let nearest = host
            .latencies_ns
            .iter()
            .flatten()
            .copied()
            .filter(|ns| *ns > 0)
            .min();
        for (values, low, cell, unit) in [
            (&host.distances, Some(10), CELL, ""),
            (&host.latencies_ns, nearest, CELL_WIDE, " ns"),
        ] {
            let Some(low) = low else { continue };
            let high = values.iter().flatten().copied().max().unwrap_or(low).max(low + 1);
            for (from, row) in values.iter().enumerate() {
                for (to, value) in row.iter().enumerate().filter(|(_, value)| **value > 0) {
                    // From white, the nearest, to dark.
                    let shade = 255 - (value - low).clamp(0, high - low) * 170 / (high - low);
                    let (x, y) = (left + to * cell, top + 24 + from * CELL);
                    let ends = [from, to].map(|at| host.nodes[at].number);
                    let _ = writeln!(
                        body,
                        "<rect x=\"{x}\" y=\"{y}\" width=\"{cell}\" height=\"{CELL}\" \
                         style=\"fill:rgb({shade},{shade},255)\">\
                         <title>{} to {}: {value}{unit}</title></rect>",
                        ends[0], ends[1]
                    );
                    if cell == CELL_WIDE {
                        let _ = writeln!(body, "<text x=\"{}\" y=\"{}\">{value}</text>", x + 2, y + 13);
                    }
                }
            }
            left += count * cell + 10;
        }
        width = width.max(left);
        top += 34 + (down * ROW).max(count * CELL);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{}\">\n\
         <style>rect{{fill:#eef;stroke:#557}}text{{font:11px sans-serif}}.host{{font:bold 13px \
         sans-serif}}</style>\n{body}</svg>\n",
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
    fn drawing_names_every_node() {
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
            text.ends_with("\n           0   1\n       0  10  21\n       1  21  10\n"),
            "{text}"
        );
        assert!(dot(&machine).contains("h0n0 -- h0n1 [label=\"21\"];"));
        let picture = svg(&machine);
        assert!(
            picture.contains("node 1") && picture.contains("0 to 1: 21"),
            "{picture}"
        );
    }

    #[test]
    fn measured_latencies_are_drawn_between_nodes() {
        let measured = "latency_ns(\"two-sockets\", 0, 1, \"ring\", 90)\n\
            latency_ns(\"two-sockets\", 0, 4, \"ring\", 1200)\n\
            latency_ns(\"two-sockets\", 0, 5, \"ring\", 1300)\n\
            latency_ns(\"two-sockets\", 5, 0, \"ring\", 1250)\n\
            latency_ns(\"two-sockets\", 0, 4, \"other\", 1)\n\
            latency_ns(\"elsewhere\", 0, 4, \"ring\", 1)\n";
        let machine = machine(&(include_str!("../machines/two-sockets.facts").to_owned() + measured));
        assert_eq!(machine.hosts[0].latencies_ns, [[90, 1300], [1250, 0]]);
        let text = text(&machine);
        assert!(
            text.ends_with("\n            0    1\n       0   90 1300\n       1 1250    -\n"),
            "{text}"
        );
        let dot = dot(&machine);
        assert!(dot.contains("h0n0 -- h0n0 [label=\"90 ns\"];"), "{dot}");
        assert!(
            dot.contains("h0n0 -- h0n1 [label=\"21, 1300/1250 ns\"];"),
            "{dot}"
        );
        let picture = svg(&machine);
        for shown in [
            "<title>1 to 0: 1250 ns</title>",
            ">1300</text>",
            "<title>0 to 1: 21</title>",
        ] {
            assert!(picture.contains(shown), "{shown}: {picture}");
        }
    }

    #[test]
    fn recorded_machines_are_drawn_completely() {
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
    fn names_in_facts_are_escaped_in_drawings() {
        let machine = machine("host(\"<a & b>\")\nnode(\"<a & b>\", 0)");
        assert!(svg(&machine).contains("&lt;a &amp; b&gt;"));
    }
}
