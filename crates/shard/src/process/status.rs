//! The answer to [`crate::launch::Order::Status`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use crate::pci::PciBus;
use crate::serial::ConsoleCounters;
use crate::sharing::Sharing;
use crate::span::router::Router;
use crate::vcpu::VcpuCounters;

/// Exits of vCPUs by kind. Those of VMs that span cells have more kinds: what KVM does for others.
pub fn exits(vcpus: &[Arc<VcpuCounters>], spans: bool) -> Vec<Value> {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    vcpus
        .iter()
        .map(|vcpu| {
            let mut exits = json!({
                "port": get(&vcpu.port),
                "mmio": get(&vcpu.mmio),
                "unclaimed": get(&vcpu.unclaimed),
                "interrupted": get(&vcpu.interrupted),
                "other": get(&vcpu.other),
            });
            if let (true, Value::Object(exits)) = (spans, &mut exits) {
                for (kind, counter) in [
                    ("halt", &vcpu.halt),
                    ("window", &vcpu.window),
                    ("end_of_interrupt", &vcpu.end_of_interrupt),
                    ("ipi", &vcpu.ipi),
                    ("timer", &vcpu.timer),
                    ("msr", &vcpu.msr),
                ] {
                    exits.insert(kind.to_owned(), get(counter).into());
                }
            }
            exits
        })
        .collect()
}

/// What became of the steps that the guest's clock was told to make; null where there is one host.
pub fn clock(router: &Router) -> Value {
    let steps = router.turnstile().map(|turnstile| turnstile.steps());
    steps.map_or(
        Value::Null,
        |steps| json!({ "made": steps.count, "late": steps.late }),
    )
}

/// Everything counted so far.
pub fn status(
    vcpus: &[Arc<VcpuCounters>],
    console: &ConsoleCounters,
    bus: &PciBus,
    sharing: Option<&Sharing>,
    router: Option<&Router>,
) -> Value {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    json!({
        "exits": exits(vcpus, router.is_some()),
        "vcpu_shards": router.map(Router::shards),
        "clock": router.map(clock),
        "devices": bus.status(),
        "sharing": sharing.map(|Sharing { mapper, situations }| json!({
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
