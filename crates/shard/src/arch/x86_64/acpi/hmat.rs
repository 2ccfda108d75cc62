//! The heterogeneous memory attribute table (ACPI 6.3, 5.2.27): what a node's CPUs need for memory of each
//! node, measured. Written by hand, as SRAT and SLIT. Only there when all of it is known: an entry can't say
//! that nothing is.

use acpi_tables::AmlSink;
use acpi_tables::sdt::Sdt;

use super::{NodeTable, table};

const REVISION: u8 = 2;
/// Of a structure of latencies or bandwidths, before its lists.
const LOCALITY_HEADER_BYTES: u32 = 32;
/// Data types of such a structure.
const ACCESS_LATENCY: u8 = 0;
const READ_BANDWIDTH: u8 = 4;
/// The largest entry; the next one stands for memory that can't be reached, and zero for none.
const ENTRY_MAX: u64 = 0xFFFE;

/// The table; none without figures of every node to every node.
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

/// Memory proximity domain attributes: type 0, 40 bytes. A node's memory is reached by its own CPUs first, if
/// it has any.
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

/// System locality latency and bandwidth information: type 1. All nodes by all nodes, of memory itself, not
/// of a cache.
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

/// What one stands for in the entries: the smallest power of ten for which all fit.
fn base_unit(rows: &[&[u64]]) -> u64 {
    let most = rows.iter().flat_map(|row| row.iter()).max().copied().unwrap_or(0);
    let units = (0..u64::MAX.ilog10()).map(|exponent| 10_u64.pow(exponent));
    units
        .into_iter()
        .find(|unit| most / unit < ENTRY_MAX)
        .unwrap_or(u64::MAX)
}
