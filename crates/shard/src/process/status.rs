//! The answer to [`crate::launch::Order::Status`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use crate::kind::{RunningKind, VmKind};
use crate::pci::PciBus;
use crate::serial::ConsoleCounters;
use crate::sharing::Sharing;
use crate::span::router::Router;
use crate::vcpu::VcpuCounters;
use crate::vcpu_stop::VcpuStop;

use super::vcpus::VcpuThreads;

/// Returns the exits of vCPUs by kind.
pub fn exits(vcpus: &[Arc<VcpuCounters>]) -> Vec<Value> {
    let exits = vcpus.iter().map(|vcpu| {
        json!({
            "port": get(&vcpu.port),
            "mmio": get(&vcpu.mmio),
            "unclaimed": get(&vcpu.unclaimed),
            "interrupted": get(&vcpu.interrupted),
            "other": get(&vcpu.other),
        })
    });
    exits.collect()
}

/// Returns the same for VMs that span cells. They have more kinds of exits, since KVM serves some only for
/// plain VMs.
pub fn span_exits(vcpus: &[Arc<VcpuCounters>]) -> Vec<Value> {
    let mut all = exits(vcpus);
    for (exits, vcpu) in all.iter_mut().zip(vcpus) {
        for (kind, counter) in [
            ("halt", &vcpu.halt),
            ("window", &vcpu.window),
            ("end_of_interrupt", &vcpu.end_of_interrupt),
            ("ipi", &vcpu.ipi),
            ("timer", &vcpu.timer),
            ("msr", &vcpu.msr),
        ] {
            exits[kind] = get(counter).into();
        }
    }
    all
}

/// Returns the number of orders by which this shard stopped each vCPU, and the time that these stops took.
pub fn stops(vcpus: &[Arc<VcpuStop>]) -> Vec<Value> {
    let stops = vcpus
        .iter()
        .map(|stop| json!({ "count": stop.stops(), "stopped_ns": stop.stopped_ns() }));
    stops.collect()
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Returns the counts of the steps of the guest's clock that were ordered; null for a VM on one host.
pub fn clock(router: &Router) -> Value {
    let steps = router.tsc_step_barrier().map(|barrier| barrier.steps());
    steps.map_or(
        Value::Null,
        |steps| json!({ "made": steps.count, "late": steps.late }),
    )
}

/// Returns all counters.
pub fn status(vcpus: &VcpuThreads, console: &ConsoleCounters, bus: &PciBus, kind: &RunningKind) -> Value {
    let mut status = json!({
        "exits": exits(&vcpus.counters),
        "stops": stops(&vcpus.stops),
        "vcpu_shards": null,
        "clock": null,
        "devices": bus.status(),
        "sharing": null,
        "console": {
            "written_bytes": get(&console.written),
            "dropped_bytes": get(&console.dropped),
            "received_bytes": get(&console.received),
        },
    });
    match kind {
        VmKind::Plain(plain) => {
            if let Some(paging) = plain.memory.paging() {
                status["paging"] = paging.status();
            }
            let sharing = plain.memory.sharing();
            status["sharing"] = sharing.map_or(Value::Null, |Sharing { mapper, pressure }| {
                json!({ "pages": mapper.status(), "situation": pressure.status() })
            });
        }
        VmKind::SharedSpan(router) | VmKind::CoherentSpan(router, _) => {
            status["exits"] = span_exits(&vcpus.counters).into();
            status["vcpu_shards"] = router.shards().into();
            status["clock"] = clock(router);
        }
    }
    if let VmKind::CoherentSpan(_, coherence) = kind {
        status["coherence"] = coherence.status();
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_of_spanning_vms_are_reported_for_these_alone() {
        let vcpu = Arc::new(VcpuCounters::default());
        VcpuCounters::count(&vcpu.port);
        VcpuCounters::count(&vcpu.halt);
        let vcpus = [vcpu];
        let (plain, span) = (exits(&vcpus), span_exits(&vcpus));
        assert_eq!(plain[0]["port"], 1);
        assert_eq!(plain[0].get("halt"), None);
        assert_eq!((&span[0]["port"], &span[0]["halt"]), (&json!(1), &json!(1)));
        let kinds = |exits: &Value| exits.as_object().map(serde_json::Map::len);
        assert_eq!((kinds(&plain[0]), kinds(&span[0])), (Some(5), Some(11)));
    }
}
