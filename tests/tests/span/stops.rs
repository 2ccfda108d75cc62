//! Stops of single vCPUs of a VM over two cells: by the shard that the vCPU is in, whichever that is.

use std::time::Duration;

use guest_tests::{Vm, mirrorball, wait};
use serde_json::Value;

use super::CPUS;

/// Time limit for a stopped vCPU's thread to park.
const SOON: Duration = Duration::from_secs(60);

/// Number of stops of each vCPU in all shards, and the time that they took, nanoseconds.
#[track_caller]
fn stops(vm: &Vm) -> Vec<(u64, u64)> {
    let known = vm.inspect();
    let all = known["status"]["stops"].as_array();
    let all = all.unwrap_or_else(|| panic!("no stops in {known:#}"));
    let number = |stop: &Value, key: &str| stop[key].as_u64().expect("a number");
    all.iter()
        .map(|stop| (number(stop, "count"), number(stop, "stopped_ns")))
        .collect()
}

#[track_caller]
fn stop(vm: &Vm, vcpu: usize) {
    let vcpu = vcpu.to_string();
    mirrorball(["pause", vm.name(), "--vcpu", &vcpu, "--for", "100ms"]).ok();
}

/// Stops a vCPU once, and waits until its thread was parked. No other vCPU is stopped.
#[track_caller]
fn is_stopped_alone(vm: &Vm, vcpu: usize) {
    let before = stops(vm);
    assert_eq!(before.len(), CPUS);
    stop(vm, vcpu);
    let after = wait::until(&format!("vCPU {vcpu} is parked"), SOON, || {
        let after = stops(vm);
        (after[vcpu].1 > before[vcpu].1).then_some(after)
    });
    for other in 0..CPUS {
        let expected = before[other].0 + u64::from(other == vcpu);
        assert_eq!(after[other].0, expected, "stops of vCPU {other}: {after:?}");
    }
}

/// Stops a vCPU in each cell, and moves a stopped one. KVM's statistics are there of each vCPU.
#[track_caller]
pub fn of_one_vcpu_follow_it_to_its_cell(vm: &Vm) {
    let places = vm.places();
    let known = vm.inspect();
    for vcpu in 0..CPUS {
        let of_vcpu = &known["status"]["vcpus"][vcpu];
        assert_eq!(of_vcpu["vcpu"], vcpu, "{known:#}");
        assert_eq!(of_vcpu["cell"], places[vcpu], "{of_vcpu}");
        assert!(of_vcpu["kvm"]["halts"].as_u64() > Some(0), "{of_vcpu}");
        assert!(of_vcpu["kvm"]["exits"].as_u64() >= of_vcpu["kvm"]["halts"].as_u64());
    }
    // The first is in the home, the last in the other shard.
    let last = CPUS - 1;
    assert_ne!(places[0], places[last]);
    for vcpu in [0, last] {
        is_stopped_alone(vm, vcpu);
    }
    let vcpu = CPUS.to_string();
    let refused = mirrorball(["pause", vm.name(), "--vcpu", &vcpu]).run().expect(1);
    let why = format!("the VM has no vCPU {CPUS}");
    assert!(refused.errors().contains(&why), "{refused}");

    // A stopped vCPU moves when its stop is over.
    for cell in [places[0], places[last]] {
        stop(vm, last);
        vm.move_vcpu(last, cell).ok();
        assert_eq!(vm.places()[last], cell);
        is_stopped_alone(vm, last);
    }
    mirrorball(["resume", vm.name(), "--vcpu", &last.to_string()]).ok();
    assert_eq!(vm.places(), places);
}
