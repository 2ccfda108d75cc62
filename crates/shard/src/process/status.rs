//! The answer to [`crate::launch::Order::Status`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use crate::pci::PciBus;
use crate::serial::ConsoleCounters;
use crate::sharing::{Mapper, Situations};
use crate::vcpu::VcpuCounters;

/// Everything counted so far.
pub fn status(
    vcpus: &[Arc<VcpuCounters>],
    console: &ConsoleCounters,
    bus: &PciBus,
    sharing: Option<&(Arc<Mapper>, Arc<Situations>)>,
) -> Value {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let exits: Vec<Value> = vcpus
        .iter()
        .map(|vcpu| {
            json!({
                "port": get(&vcpu.port),
                "mmio": get(&vcpu.mmio),
                "unclaimed": get(&vcpu.unclaimed),
                "interrupted": get(&vcpu.interrupted),
                "other": get(&vcpu.other),
            })
        })
        .collect();
    json!({
        "exits": exits,
        "devices": bus.status(),
        "sharing": sharing.map(|(mapper, situations)| json!({
            "pages": mapper.status(),
            "situation": situations.status(),
        })),
        "console": {
            "written_bytes": get(&console.written),
            "dropped_bytes": get(&console.dropped),
            "received_bytes": get(&console.received),
        },
    })
}
