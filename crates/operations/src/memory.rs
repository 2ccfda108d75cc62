//! What running VMs take of the host's memory.

use std::io;
use std::time::{Duration, Instant};

use hostinfo::memory_use::{self, MemoryUse};
use registry::control::{Answer, Request, ask};
use registry::vms::{Record, Registry};
use serde_json::Value;

/// Time limit for a VM's counters.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for a guest to count again.
const GUEST_LIMIT: Duration = Duration::from_millis(200);

/// The VMs of this host, and the parts that VMs of other hosts have here.
///
/// # Errors
/// If the registry can't be read.
pub fn running(registry: &Registry) -> io::Result<Vec<Record>> {
    let mut records = registry.list()?;
    records.extend(Registry::listed_parts()?);
    Ok(records)
}

/// Measures what running VMs take of the host's memory, in some 200 ms.
///
/// # Errors
/// If the registry or the host's `/proc` can't be read.
pub fn measure(registry: &Registry) -> io::Result<MemoryUse> {
    let records = running(registry)?;
    // A question makes the guest count again, for the next question.
    let first: Vec<Option<u64>> = records
        .iter()
        .map(|record| guest_used(registry, record))
        .collect();
    let asked = Instant::now();
    let mut table = memory_use::read(&records)?;
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

/// What the guest says that it can't do without: by its balloon's statistics, if it has one and has counted.
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
