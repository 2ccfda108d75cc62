//! Risk: memory that a guest no longer uses stays taken on the host.

use std::time::Duration;

use guest_tests::{Scratch, Vm, VmFile, wait};

const MIB: u64 = 1 << 20;

/// Fills 200 MiB in the guest and gives how much its memory grew on the host.
fn used_by_a_program(vm: &Vm) -> (u64, u64) {
    let before = vm.resident_bytes();
    let mut program = vm.tool(&["hold", "200", "3"]).spawn();
    program.wait_for("held", Duration::from_secs(60));
    let full = vm.resident_bytes();
    assert!(
        full >= before + 150 * MIB,
        "{before} bytes before, {full} with 200 MiB written"
    );
    program.wait().expect(0);
    (before, full)
}

#[test]
fn free_page_reporting_gives_a_programs_memory_back() {
    let scratch = Scratch::new("reporting");
    let vm = VmFile::new("reporting").memory("512M").start(&scratch);
    vm.add_tool();
    let (before, full) = used_by_a_program(&vm);
    // Linux reports free blocks of 4 MiB (2 MiB on some kernels) every 2 s.
    let least = full - (full - before) * 2 / 3;
    wait::until(
        &format!("less than {least} of {full} bytes, as {before} before"),
        Duration::from_secs(40),
        || (vm.resident_bytes() <= least).then_some(()),
    );
    // What was given back can be had again.
    used_by_a_program(&vm);
    vm.kill();
}

#[test]
fn without_a_balloon_memory_stays() {
    let scratch = Scratch::new("control");
    let vm = VmFile::new("control")
        .memory("512M")
        .key("balloon", "false")
        .start(&scratch);
    vm.add_tool();
    let (_, full) = used_by_a_program(&vm);
    std::thread::sleep(Duration::from_secs(8));
    let later = vm.resident_bytes();
    // Otherwise the test above measures something else than reporting.
    assert!(
        later + 50 * MIB >= full,
        "{full} bytes shrank to {later} without a balloon"
    );
    vm.kill();
}
