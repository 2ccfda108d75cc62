//! Risk: Linux does not go on, wake, or end, while its vCPUs move from cell to cell.

use std::time::Duration;

use guest_tests::command::Running;
use guest_tests::host::Traces;
use guest_tests::pattern::Numbers;
use guest_tests::span::Moves;
use guest_tests::{Cluster, Scratch, Vm, VmFile, repetitions, wait};

const CPUS: usize = 4;
const LIMIT: Duration = Duration::from_secs(150);
/// Moves under signals; with those of `moves` they make a thousand.
const UNDER_SIGNALS: usize = 300;
const UNDER_CHURN: usize = 200;

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
    const AT_ONCE: usize = 25;
    let start = || -> Running {
        vm.tool(&[program, &CPUS.to_string(), &seconds.to_string()])
            .limit(LIMIT)
            .spawn()
    };
    let mut running = start();
    let mut said = Vec::new();
    for part in 0..count.div_ceil(AT_ONCE) {
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
    let scratch = Scratch::new("goes-on");
    let _cluster = Cluster::up(&scratch);
    let vm = linux("goes-on", &scratch);
    let boot = vm.boot_id();
    moves_under(&vm, "ipi", 20, repetitions(UNDER_SIGNALS));
    moves_under(&vm, "churn", 20, repetitions(UNDER_CHURN));
    // Clocks are compared while vCPUs move, too.
    let clock = vm
        .tool(&["clock", &CPUS.to_string(), &repetitions(10_000).to_string()])
        .limit(LIMIT)
        .spawn();
    let moves = Moves::by_chance(&vm, 2, repetitions(30), 53);
    let clock = clock.wait().expect(0).text();
    println!("under clock: {moves}\n{clock}");
    vm.expect_sound_clock();
    assert_eq!(vm.boot_id(), boot);
    vm.stop();
}

#[test]
fn halted_vcpus_move_and_wake() {
    let scratch = Scratch::new("halted");
    let _cluster = Cluster::up(&scratch);
    let vm = linux("halted", &scratch);
    // All sleep, with timers that have to ring where their vCPU is then.
    let sleepers = "for cpu in 0 1 2 3; do \
                    taskset -c $cpu sh -c 'for i in 1 2 3 4 5; do sleep 1; done; echo awake' & done; wait";
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

#[test]
fn vm_reboots_and_powers_off_in_the_midst_of_moves() {
    let scratch = Scratch::new("midst");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    for (end, reboots) in [("reboot -f", true), ("poweroff -f", false)] {
        let vm = linux("midst", &scratch);
        let boot = vm.boot_id();
        std::thread::scope(|scope| {
            let moves = scope.spawn(|| {
                // Until the VM is away; between two boots a move may be refused.
                let mut numbers = Numbers::new(56);
                let (mut moved, mut refused) = (0, 0);
                while refused < 3 && moved < 60 {
                    let vcpu = numbers.below(CPUS as u64) as usize;
                    let end = vm.move_vcpu(vcpu, numbers.below(2)).run();
                    match end.status {
                        0 => moved += 1,
                        1 => refused += 1,
                        _ => panic!("neither moved nor refused:\n{end}"),
                    }
                }
                println!("{end}: {moved} moves, {refused} refused");
            });
            std::thread::sleep(Duration::from_secs(1));
            vm.last_words(end);
            moves.join().expect("an error above");
        });
        if reboots {
            wait::until("it is up again", LIMIT, || {
                let id = vm.exec(["cat", "/proc/sys/kernel/random/boot_id"]).run();
                (id.status == 0 && id.text() != boot).then_some(())
            });
            assert_eq!(vm.sh("nproc").trim(), CPUS.to_string());
            vm.kill();
        }
        vm.wait_ended(LIMIT);
    }
    wait::until("the cells have everything back", LIMIT, || {
        (cluster.given_bytes(0) + cluster.given_bytes(1) == 0).then_some(())
    });
    drop(cluster);
    before.expect_unchanged("VMs that ended in the midst of moves");
}
