//! Risk: an interrupt is lost, doubled or late on its way to a vCPU, wherever that runs or moves; a vCPU that moves forgets
//! something.
//!
//! The counting is done by a kernel that does nothing else (`guest/`), which also runs on KVM's own controllers here: what it
//! finds there is its own fault. Then Linux goes on while its vCPUs move.

use std::time::Duration;

use guest_tests::command::Running;
use guest_tests::host::Traces;
use guest_tests::span::Moves;
use guest_tests::storm::{Extent, Storm};
use guest_tests::{Cluster, Scratch, Vm, VmFile, wait};

const CPUS: usize = 4;
const LIMIT: Duration = Duration::from_secs(150);
/// Enough to meet every kind of interrupt.
const STORM: Extent = Extent {
    cpus: CPUS,
    epochs: 4,
    sweeps: 60,
};
/// The moves of this file; the issue asks for a thousand.
const UNDER_INTERRUPTS: usize = 500;
const UNDER_SIGNALS: usize = 300;
const UNDER_CHURN: usize = 200;

/// A storm that ends by itself.
fn whole_storm(name: &str, flags: &[&str]) {
    let scratch = Scratch::new(name);
    let _cluster = Cluster::up(&scratch);
    let counts = Storm::start(&scratch, name, STORM, flags).counts(LIMIT);
    println!("{name}: {}", counts.line());
    counts.expect_exact();
    assert_eq!(counts.of("restarts"), 4 * (CPUS as u64 - 1));
    // The kernel's own timer may ring by its own clock.
    if flags[0] == "--span" {
        assert_eq!(counts.of("early"), 0, "{}", counts.line());
    }
}

#[test]
fn the_counting_kernel_is_right_about_kvms_own_controllers() {
    whole_storm("storm-kvm", &["--cell", "0"]);
}

#[test]
fn every_interrupt_comes_once_in_one_shard() {
    whole_storm("storm-one", &["--span", "0"]);
}

#[test]
fn every_interrupt_comes_once_over_two_shards() {
    whole_storm("storm-two", &["--span", "0,1"]);
}

#[test]
fn every_interrupt_comes_once_while_vcpus_move() {
    let scratch = Scratch::new("storm-moves");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let endless = Extent { epochs: 0, ..STORM };
    let mut storm = Storm::start(&scratch, "storm-moves", endless, &["--span", "0,1"]);
    assert_eq!(storm.vm.places(), [0, 0, 1, 1]);
    let moves = Moves::by_chance(&storm.vm, 2, UNDER_INTERRUPTS, 51);
    // A shard that no vCPU runs in, the home then.
    for cell in [1, 0] {
        for vcpu in 0..CPUS {
            storm.vm.move_vcpu(vcpu, cell).ok();
        }
        assert_eq!(storm.vm.places(), [cell; CPUS]);
    }
    storm.stop();
    let counts = storm.counts(LIMIT);
    println!("under interrupts: {moves}\n{}", counts.line());
    counts.expect_exact();
    assert_eq!(counts.of("early"), 0, "{}", counts.line());
    drop(cluster);
    before.expect_unchanged("a storm");
}

/// A Linux over two cells, with `guest-tool` in it.
fn linux(name: &str, scratch: &Scratch) -> Vm {
    let vm = VmFile::new(name)
        .cpus(CPUS as u8)
        .memory("384M")
        .span(&[0, 1])
        .start(scratch);
    vm.add_tool();
    vm
}

/// Moves vCPUs while a program runs that takes `seconds`, again and again until there were `count` moves.
fn moves_under(vm: &Vm, program: &str, seconds: u64, count: usize) {
    const AT_ONCE: usize = 50;
    let start = || -> Running {
        vm.tool(&[program, &CPUS.to_string(), &seconds.to_string()])
            .limit(LIMIT)
            .spawn()
    };
    let mut running = start();
    let mut said = Vec::new();
    for part in 0..count / AT_ONCE {
        let moves = Moves::by_chance(vm, 2, AT_ONCE, 52 + part as u64);
        println!("under {program}: {moves}");
        if running.has_ended() {
            said.push(running.wait().expect(0).text());
            running = start();
        }
    }
    said.push(running.wait().expect(0).text());
    println!("{program}: {}", said.concat());
}

#[test]
fn linux_goes_on_while_its_vcpus_move() {
    println!(
        "{} moves are made here",
        UNDER_INTERRUPTS + UNDER_SIGNALS + UNDER_CHURN
    );
    let scratch = Scratch::new("goes-on");
    let _cluster = Cluster::up(&scratch);
    let vm = linux("goes-on", &scratch);
    let boot = vm.boot_id();
    moves_under(&vm, "ipi", 20, UNDER_SIGNALS);
    moves_under(&vm, "churn", 20, UNDER_CHURN);
    // Clocks are compared while vCPUs move, too.
    let clock = vm
        .tool(&["clock", &CPUS.to_string(), "10000"])
        .limit(LIMIT)
        .spawn();
    let moves = Moves::by_chance(&vm, 2, 30, 53);
    let clock = clock.wait().expect(0).text();
    println!("under clock: {moves}\n{clock}");
    let source = vm.sh("cat /sys/devices/system/clocksource/clocksource0/current_clocksource");
    assert_eq!(source.trim(), "tsc");
    let complaints =
        "dmesg | grep -E 'unstable|stall|lockup|LOCKUP|No irq handler|BUG:|WARNING: CPU' || true";
    assert_eq!(vm.sh(complaints), "");
    assert_eq!(vm.boot_id(), boot);
    vm.stop();
}

#[test]
fn halted_vcpus_move_and_wake() {
    let scratch = Scratch::new("halted");
    let _cluster = Cluster::up(&scratch);
    let vm = linux("halted", &scratch);
    // All sleep, with timers that have to ring where their vCPU is then.
    let sleepers = "for cpu in 0 1 2 3; do taskset -c $cpu sh -c 'for i in 1 2 3 4 5; do sleep 1; done; echo awake' & done; wait";
    let sleeping = vm.exec(["sh", "-c", sleepers]).limit(LIMIT).spawn();
    Moves::by_chance(&vm, 2, 20, 54);
    let woken = sleeping.wait().expect(0).text();
    assert_eq!(woken.matches("awake").count(), CPUS, "{woken}");
    // One that is offline waits for its start, wherever it is.
    vm.sh("echo 0 > /sys/devices/system/cpu/cpu3/online");
    vm.move_vcpu(3, 1 - vm.places()[3]).ok();
    vm.sh("echo 1 > /sys/devices/system/cpu/cpu3/online");
    let worked = vm.tool(&["pinned", &CPUS.to_string()]).ok().text();
    assert_eq!(worked.trim(), "0 1 2 3");
    wait::until("all CPUs are online", Duration::from_secs(10), || {
        (vm.sh("nproc").trim() == "4").then_some(())
    });
    vm.stop();
}
