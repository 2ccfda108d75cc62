//! The heterogeneous memory attribute table (ACPI 6.3, 5.2.27): measured latency and bandwidth from each
//! node's CPUs to each node's memory. It is written by hand, as SRAT and SLIT are. It exists only if every
//! pair of nodes was measured, since an entry can't state that its value is unknown.

use acpi_tables::AmlSink;
use acpi_tables::sdt::Sdt;

use super::{NodeTable, table};

const REVISION: u8 = 2;
/// Bytes of a latency or bandwidth structure before its lists.
const LOCALITY_HEADER_BYTES: u32 = 32;
/// Data types of a latency or bandwidth structure.
const ACCESS_LATENCY: u8 = 0;
const READ_BANDWIDTH: u8 = 4;
/// The largest entry. The next value means unreachable memory, and zero means no value.
const ENTRY_MAX: u64 = 0xFFFE;

/// Returns the table, or none if figures of a pair of nodes are missing.
pub(super) fn hmat(nodes: &[NodeTable]) -> Option<Sdt> {
    let latencies: Vec<&[u64]> = nodes.iter().map(|node| &node.latencies_ps[..]).collect();
    let bandwidths: Vec<&[u64]> = nodes.iter().map(|node| &node.bandwidths_mb_s[..]).collect();
    let is_whole = |rows: &[&[u64]]| {
        rows.iter()
            .all(|row| row.len() == nodes.len() && !row.contains(&0))
    };
    if nodes.is_empty() || !is_whole(&latencies) || !is_whole(&bandwidths) {
        return None;
    }
    let mut body = Vec::new();
    body.dword(0);
    for (node, table) in nodes.iter().enumerate() {
        attributes(node as u32, !table.vcpus.is_empty(), &mut body);
    }
    locality(ACCESS_LATENCY, &latencies, &mut body);
    locality(READ_BANDWIDTH, &bandwidths, &mut body);
    let mut hmat = table(b"HMAT", REVISION);
    hmat.append_slice(&body);
    Some(hmat)
}

/// Memory proximity domain attributes: type 0, 40 bytes. A node's memory has the node's own CPUs as its
/// initiators, if the node has any.
fn attributes(node: u32, has_cpus: bool, body: &mut Vec<u8>) {
    body.word(0);
    body.word(0);
    body.dword(40);
    body.word(u16::from(has_cpus));
    body.word(0);
    body.dword(if has_cpus { node } else { 0 });
    body.dword(node);
    body.dword(0);
    body.qword(0);
    body.qword(0);
}

/// System locality latency and bandwidth information: type 1. Figures of all nodes to all nodes, of memory
/// and not of a cache.
fn locality(data_type: u8, rows: &[&[u64]], body: &mut Vec<u8>) {
    let count = rows.len() as u32;
    body.word(1);
    body.word(0);
    body.dword(LOCALITY_HEADER_BYTES + 2 * 4 * count + 2 * count * count);
    body.vec(&[0, data_type, 0, 0]);
    body.dword(count);
    body.dword(count);
    body.dword(0);
    let base = base_unit(rows);
    body.qword(base);
    for _ in ["initiators", "targets"] {
        (0..count).for_each(|node| body.dword(node));
    }
    for value in rows.iter().flat_map(|row| row.iter()) {
        let entry = (value + base / 2) / base;
        body.word(entry.clamp(1, ENTRY_MAX) as u16);
    }
}

/// Returns the unit of the entries: the smallest power of ten with which all of them fit.
fn base_unit(rows: &[&[u64]]) -> u64 {
    let most = rows.iter().flat_map(|row| row.iter()).max().copied().unwrap_or(0);
    let units = (0..u64::MAX.ilog10()).map(|exponent| 10_u64.pow(exponent));
    units
        .into_iter()
        .find(|unit| most / unit < ENTRY_MAX)
        .unwrap_or(u64::MAX)
}
