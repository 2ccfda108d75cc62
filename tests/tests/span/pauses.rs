//! A pause of the VM: all its shards stand still, its pages are served, and all go on.

use std::time::Duration;

use guest_tests::command::BOOT_LIMIT;
use guest_tests::{Cluster, Scratch, Vm, VmFile, host, mirrorball, wait};

use super::{CPUS, LIMIT, stops, tool, two_cells};

/// Time limit for the guest's programs to count on, and for a cell's next process to serve the VM.
const SOON: Duration = Duration::from_secs(60);
/// Length of a pause; a guest's kernel reports a CPU that stands still for 20 s.
const PAUSE: Duration = Duration::from_secs(4);
/// Maximum CPU time of all paused shards within a pause, in ticks of 10 ms. CPUs that count would use some
/// hundreds.
const TICKS_MAX: u64 = 40;

/// Has the first CPU, in one cell, and the last one, in the other, count.
fn begin_to_count(vm: &Vm) {
    for cpu in [0, CPUS - 1] {
        // A reader of a count finds a whole number.
        vm.background(&format!(
            "taskset -c {cpu} sh -c 'while :; do i=$((i + 1)); echo $i > /tmp/next{cpu}; \
             mv /tmp/next{cpu} /tmp/count{cpu}; done'"
        ));
    }
}

/// Waits until both CPUs count on.
#[track_caller]
fn expect_counting(vm: &Vm) {
    for cpu in [0, CPUS - 1] {
        let count = || {
            let count = vm.sh(&format!("cat /tmp/count{cpu} || echo 0"));
            count.trim().parse::<u64>().expect("a number")
        };
        let before = count();
        wait::until(&format!("CPU {cpu} counts on"), SOON, || {
            (count() > before).then_some(())
        });
    }
}

fn is_paused(vm: &Vm) -> bool {
    vm.listed().expect("it is there")["paused"] == true
}

/// Checks that no shard of the paused VM runs, that what needs a running guest is refused, and that all of it
/// goes on when it is resumed.
#[track_caller]
fn stands_still_and_goes_on(vm: &Vm) {
    for _ in 0..2 {
        mirrorball(["pause", vm.name()]).ok();
    }
    assert!(is_paused(vm));
    let ticks = || -> u64 { vm.shards().iter().map(|shard| host::cpu_ticks(*shard)).sum() };
    let before = ticks();
    std::thread::sleep(PAUSE);
    let used = ticks() - before;
    assert!(used <= TICKS_MAX, "{used} ticks of CPU time in a pause");
    let refused = vm.exec(["true"]).run().expect(1);
    assert!(refused.errors().contains("is paused"), "{refused}");
    let places = vm.places();
    let refused = vm.move_vcpu(0, 1 - places[0]).run().expect(1);
    assert!(refused.errors().contains("the VM is paused"), "{refused}");
    mirrorball(["resume", vm.name()]).ok();
    assert!(!is_paused(vm));
    expect_counting(vm);
    assert_eq!(vm.places(), places);
}

fn pauses(file: VmFile, scratch: &Scratch) {
    let vm = file.start(scratch);
    vm.add_tool();
    begin_to_count(&vm);
    expect_counting(&vm);
    stands_still_and_goes_on(&vm);

    stops::of_one_vcpu_follow_it_to_its_cell(&vm);
    expect_counting(&vm);

    // The process that serves the VM is another one when it is resumed.
    let boot = vm.boot_id();
    mirrorball(["pause", vm.name()]).ok();
    vm.kill_monitor(SOON);
    assert!(is_paused(&vm), "its next process does not know that it is paused");
    mirrorball(["resume", vm.name()]).ok();
    expect_counting(&vm);
    stands_still_and_goes_on(&vm);
    assert_eq!(vm.boot_id(), boot);

    // A vCPU moves and comes back, and its thread in the other cell pauses, too.
    let places = vm.places();
    vm.move_vcpu(0, 1 - places[0]).ok();
    stands_still_and_goes_on(&vm);
    vm.move_vcpu(0, places[0]).ok();
    vm.expect_sound_clock();
    let said = tool(&vm, &["ipi", "4", "1"]);
    assert!(!said.contains("function_calls=0"), "{said}");

    // A paused VM is reset all the same, and runs.
    mirrorball(["pause", vm.name()]).ok();
    mirrorball(["reset", vm.name()]).limit(BOOT_LIMIT).ok();
    vm.wait_rebooted(&boot);
    assert!(!is_paused(&vm));
    mirrorball(["pause", vm.name()]).ok();
    let stopped = vm.stop();
    assert!(stopped.took < LIMIT, "{stopped}");
    vm.wait_ended(SOON);
}

#[test]
fn vm_over_two_cells_stands_still_while_paused_and_goes_on() {
    let scratch = Scratch::new("pauses");
    let _cluster = Cluster::up(&scratch);
    pauses(two_cells("pauses"), &scratch);
}

#[test]
fn vm_with_a_copy_of_its_memory_in_each_cell_stands_still_while_paused_and_goes_on() {
    let scratch = Scratch::new("paused-copies");
    let _cluster = Cluster::up(&scratch);
    let file = two_cells("paused-copies").memory("256M");
    let file = file.key("span", "{ cells = [0, 1], memory = \"coherent\" }");
    pauses(file, &scratch);
}
