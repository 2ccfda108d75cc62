//! Host memory used by running VMs.

use std::io;
use std::time::{Duration, Instant};

use hostinfo::memory_use::{self, GatewayMemory, MemoryUse};
use registry::control::{Answer, Request, ask};
use registry::runtime;
use registry::vms::{Record, Registry};
use serde_json::Value;

use crate::networks;

/// Time limit for a VM to report its counters.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for a guest to update its counters.
const GUEST_LIMIT: Duration = Duration::from_millis(200);

/// Returns the VMs of this host, and the shards here of VMs of other hosts.
///
/// # Errors
/// If the registry can't be read.
pub fn running(registry: &Registry) -> io::Result<Vec<Record>> {
    let mut records = registry.list()?;
    records.extend(Registry::listed_secondary_shards()?);
    Ok(records)
}

/// Measures the host memory that running VMs use, in about 200 ms.
///
/// # Errors
/// If the registry or the host's `/proc` can't be read.
pub fn measure(registry: &Registry) -> io::Result<MemoryUse> {
    let records = running(registry)?;
    // A query makes the guest update its counters for the next query.
    let first: Vec<Option<u64>> = records
        .iter()
        .map(|record| guest_used(registry, record))
        .collect();
    let asked = Instant::now();
    let mut table = memory_use::read(&records)?;
    add_gateway(&mut table);
    std::thread::sleep(GUEST_LIMIT.saturating_sub(asked.elapsed()));
    for (record, first) in records.iter().zip(first) {
        let used = guest_used(registry, record).or(first);
        if let Some(row) = table.vms.iter_mut().find(|row| row.name == record.name) {
            row.guest_used_bytes = used;
        }
    }
    let used: Vec<u64> = table.vms.iter().filter_map(|row| row.guest_used_bytes).collect();
    table.total.guest_used_bytes = (!used.is_empty()).then(|| used.iter().sum());
    Ok(table)
}

/// Adds the gateway of this user's subnet, if it runs.
fn add_gateway(table: &mut MemoryUse) {
    let subnet = runtime::directory().and_then(|runtime| networks::list(&runtime));
    let Some(pid) = subnet
        .ok()
        .and_then(|subnet| subnet.gateway)
        .map(|gateway| gateway.pid)
    else {
        return;
    };
    // It may have just ended.
    if let Ok(host_bytes) = memory_use::own_memory(pid) {
        table.add_gateway(GatewayMemory { pid, host_bytes });
    }
}

/// Memory that the guest can't do without, by its balloon's statistics; none without a balloon or before the
/// first count.
fn guest_used(registry: &Registry, record: &Record) -> Option<u64> {
    let folder = registry.find(&record.name).ok()?;
    let Ok(Answer::Status { status }) = ask(&folder, &Request::Status, Some(ANSWER_LIMIT)) else {
        return None;
    };
    let guests = status["devices"]
        .as_array()?
        .iter()
        .map(|device| &device["counters"]["guest"]);
    let count = |guest: &Value, name: &str| guest[name].as_u64();
    guests
        .filter_map(|guest| count(guest, "total_bytes")?.checked_sub(count(guest, "available_bytes")?))
        .next()
}
