//! Risk: an end leaves something of a VM in one of its cells, or a part of the VM running.

mod cells;

use std::time::Duration;

use guest_tests::host::{self, Traces};
use guest_tests::span::{cells_are_empty, foreground, two_cells};
use guest_tests::{Cluster, Scratch, repetitions};

const SOON: Duration = Duration::from_secs(20);

/// Kills one shard's process: all of the VM ends, reports the reason, and leaves nothing; the same VM can
/// start at once.
#[track_caller]
fn ends_with_shard(number: usize, reason: &str) {
    let scratch = Scratch::new("killed");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let file = two_cells("killed");
    let (mut terminal, vm) = foreground(&file, &scratch);
    let shards = vm.shards();
    assert_eq!(shards.len(), 2, "{shards:?}");
    host::kill9(shards[number]);
    let status = terminal.wait(SOON);
    let told = terminal.seen();
    assert_eq!(status, 73, "exit status; the terminal:\n{told}");
    assert!(told.contains(reason), "the reason is not reported:\n{told}");
    host::wait_gone(&shards, SOON);
    assert!(vm.listed().is_none(), "{} is still listed", vm.name());
    cells_are_empty(&cluster);
    let again = file.start(&scratch);
    assert_eq!(again.sh("nproc").trim(), "4");
    again.kill();
    cells_are_empty(&cluster);
    drop((terminal, vm, again, cluster));
    before.expect_unchanged("a killed shard");
}

#[test]
fn a_vm_ends_with_a_shard_that_is_not_its_home() {
    ends_with_shard(1, "in cell 1: its process was ended by SIGKILL");
}

#[test]
fn a_vm_ends_with_its_home() {
    ends_with_shard(0, "SIGKILL");
}

#[test]
fn a_vm_over_two_cells_runs_on_while_its_home_cell_is_killed() {
    let scratch = Scratch::new("heirs");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let vm = two_cells("heirs").start(&scratch);
    let (boot, shards) = (vm.boot_id(), vm.shards());
    let prints = "i=0; while [ ! -e /tmp/stop ]; do i=$((i + 1)); echo $i; sleep 0.1; done";
    let session = vm
        .exec(["sh", "-c", prints])
        .limit(Duration::from_secs(200))
        .spawn();
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(1100));
        vm.kill_monitor(SOON);
        assert_eq!(vm.shards(), shards, "the shards are the same");
    }
    let from = vm.places()[1];
    vm.move_vcpu(1, 1 - from).ok();
    vm.kill_monitor(SOON);
    assert_eq!(vm.places()[1], 1 - from, "where the vCPU was moved");
    vm.move_vcpu(1, from).ok();
    vm.sh("touch /tmp/stop");
    let printed = session.wait().expect(0).text();
    let numbers: Vec<usize> = printed.lines().filter_map(|line| line.parse().ok()).collect();
    assert!(
        numbers.len() > 10 && numbers.iter().copied().eq(1..=numbers.len()),
        "the session of exec: {numbers:?}"
    );
    assert_eq!(vm.boot_id(), boot);
    assert_eq!(
        [0, 1].map(|cell| cluster.vms(cell).len()),
        [1, 1],
        "the places of both parts"
    );

    // It reboots and ends as any other.
    vm.reboot();
    let shards = vm.shards();
    vm.kill_monitor(SOON);
    host::kill9(shards[1]);
    vm.wait_ended(SOON);
    host::wait_gone(&shards, SOON);
    cells_are_empty(&cluster);
    drop((vm, cluster));
    before.expect_unchanged("the death of a part after those of its home cell");
}

#[test]
fn poweroff_kill_and_panic_end_all_shards() {
    let scratch = Scratch::new("ends");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    for (script, status) in [
        ("taskset -c 3 poweroff -f", 0),
        ("taskset -c 2 sh -c 'echo c > /proc/sysrq-trigger'", 70),
        (
            "echo triple > /sys/kernel/reboot/type && taskset -c 3 reboot -f",
            71,
        ),
    ] {
        let (mut terminal, vm) = foreground(&two_cells("ends"), &scratch);
        let shards = vm.shards();
        // Linux uses its first CPU for all of these; here that is far from its devices.
        vm.move_vcpu(0, 1).ok();
        terminal.send(format!("{script}\n").as_bytes());
        assert_eq!(terminal.wait(SOON), status, "{script}:\n{}", terminal.seen());
        host::wait_gone(&shards, SOON);
        cells_are_empty(&cluster);
    }
    let vm = two_cells("ends").start(&scratch);
    vm.kill();
    cells_are_empty(&cluster);
    drop((vm, cluster));
    before.expect_unchanged("VMs over two cells");
}

#[test]
fn a_guest_reboots_again_and_again_in_all_its_shards() {
    let scratch = Scratch::new("reboots");
    let cluster = Cluster::up(&scratch);
    let vm = two_cells("reboots").start(&scratch);
    // A vCPU that was moved starts again where it started first.
    let first = vm.places();
    vm.move_vcpu(1, 1).ok();
    for _ in 0..repetitions(3) {
        vm.reboot();
        assert_eq!(vm.sh("nproc").trim(), "4");
        assert_eq!(vm.places(), first);
    }
    assert_eq!(vm.shards().len(), 2);
    vm.stop();
    cells_are_empty(&cluster);
}
