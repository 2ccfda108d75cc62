//! vCPUs that halt often, with fake threads in real time.

use super::*;

/// Time in which a decision is taken: two windows of 100 ms of the time in which a vCPU is not stopped, which
/// is half of all, and as much for a busy host.
const DECIDED: Duration = Duration::from_millis(800);

/// Has all vCPUs of a VM halt so often from now on.
fn set_halts(vm: &Fake, halts_per_s: u64) {
    for vcpu in 0..vm.count() {
        vm.with(vcpu, |vcpu, _| vcpu.halts_per_s = halts_per_s);
    }
}

#[test]
fn vms_that_halt_often_are_not_stopped_and_use_all_cpus_until_they_spin() {
    let mut table = drivers();
    let vms = [1, 2].map(|vm| add(&mut table, vm, vcpus_of(2)));
    vms.iter().for_each(|vm| set_halts(vm, 1_000));
    std::thread::sleep(DECIDED);
    let from = Instant::now();
    std::thread::sleep(SETTLING);
    let elapsed = from.elapsed();
    for vm in &vms {
        let ran: Duration = vm.ran(from).iter().sum();
        assert!(ran > elapsed * 19 / 10, "{ran:?} of two CPUs for {elapsed:?}");
        let cpus = [0, 1].map(|vcpu| vm.with(vcpu, |vcpu, _| vcpu.cpus));
        assert_eq!(cpus, [2; 2]);
    }
    let ungated = |table: &VmTable| table.queues().iter().map(|queue| queue.ungated).sum::<u32>();
    assert_eq!(ungated(&table), 4);
    vms.iter().for_each(|vm| set_halts(vm, 0));
    std::thread::sleep(DECIDED);
    assert_eq!(ungated(&table), 0);
    let from = Instant::now();
    std::thread::sleep(MEASURED);
    let ran: Duration = vms.iter().flat_map(|vm| vm.ran(from)).sum();
    let most = from.elapsed() * 5 / 2;
    assert!(ran < most, "{ran:?}: two CPUs have {most:?} at most");
    let cpus = vms.each_ref().map(|vm| vm.with(0, |vcpu, _| vcpu.cpus));
    assert_eq!(cpus, [1; 2]);
    table.end();
}
