//! A cell's process that is killed at each fault point of its work for a VM.

use std::time::Duration;

use guest_tests::command::Output;
use guest_tests::fault_points::FaultPoints;
use guest_tests::host::{self, Traces};
use guest_tests::span::cells_are_empty;
use guest_tests::{Cluster, Scratch, Vm, VmFile, mirrorball, repetitions, wait};

/// The points of the program, sorted. Those of CPUs that a VM borrows are in `cells::cpu_moves`.
const POINTS: [&str; 20] = [
    "adopt_accepted",
    "adopt_served",
    "adopt_taken",
    "boot_begun",
    "boot_ended",
    "boot_launched",
    "boot_left",
    "boot_spawned",
    "boot_told",
    "cpu_agreed",
    "cpu_announced",
    "cpu_left",
    "cpu_reached",
    "cpu_recorded",
    "cpu_returned",
    "freeze_begun",
    "freeze_served",
    "message_sent",
    "place_given",
    "vm_ended",
];
/// Points before a cell has given a VM its place.
const PLACE: [&str; 2] = ["message_sent", "place_given"];
/// Points of a VM's start in a cell, in their order.
const START: [&str; 8] = [
    "adopt_accepted",
    "adopt_taken",
    "adopt_served",
    "boot_begun",
    "boot_spawned",
    "boot_launched",
    "boot_left",
    "boot_told",
];
/// Points of a reboot, in their order.
const REBOOT: [&str; 6] = [
    "boot_ended",
    "boot_begun",
    "boot_spawned",
    "boot_launched",
    "boot_left",
    "boot_told",
];
/// Points of the adoption of a running VM, in their order.
const ADOPTION: [&str; 3] = ["adopt_accepted", "adopt_taken", "adopt_served"];
/// Points of the freeze for a clone.
const CLONE: [&str; 2] = ["freeze_begun", "freeze_served"];
/// Rounds through all points in a campaign.
const ROUNDS: usize = 5;
/// Time limit until a thread of the cell is at a point.
const REACH_LIMIT: Duration = Duration::from_secs(60);
/// Time limit until the next process, or a monitor, serves a VM.
const SERVE_LIMIT: Duration = Duration::from_secs(30);
/// The guard gives a cell up whose processes live shorter than this ten times in a row.
const SHORT_LIFE: Duration = Duration::from_secs(10);
/// Short lives in a row here.
const SHORT_LIVES: usize = 8;
/// The cell whose process is killed.
const CELL: usize = 1;

/// The processes of the cell, and how many were killed.
struct Kills<'a> {
    cluster: &'a Cluster,
    count: usize,
}

impl Kills<'_> {
    /// Returns the process of the cell, which will be killed. Occasionally it has lived for long by then.
    #[track_caller]
    fn next(&mut self) -> u32 {
        self.count += 1;
        if self.count.is_multiple_of(SHORT_LIVES) {
            std::thread::sleep(SHORT_LIFE);
        }
        self.cluster.pid(CELL)
    }

    /// Kills the process of the cell while a thread of it stands at `point`, where `action` brings it.
    /// Returns the action's result, and the cell's next process.
    #[track_caller]
    fn at<T: Send>(&mut self, point: &str, action: impl FnOnce() -> T + Send) -> (T, u32) {
        let cell = self.next();
        let points = FaultPoints::of(&[cell]);
        assert_eq!(points.names(""), POINTS);
        let held = points.hold(point);
        let result = std::thread::scope(|scope| {
            let acting = scope.spawn(action);
            assert_eq!(held.reached(REACH_LIMIT), cell);
            host::kill9(cell);
            drop(held);
            acting.join().expect("the action does not panic")
        });
        points.wait();
        (result, self.cluster.pid_after(CELL, cell))
    }
}

#[track_caller]
fn wait_until_served(vm: &Vm, by: u32) {
    wait::until(
        &format!("{} served by process {by}", vm.name()),
        SERVE_LIMIT,
        || (vm.listed()?["monitor_pid"] == by).then_some(()),
    );
}

/// A command that its cell's death may have cut off.
#[track_caller]
fn expect_done_or_refused(output: &Output) {
    assert!([0, 1].contains(&output.status), "{output}");
    assert!(!output.errors().contains("panicked"), "{output}");
}

fn file(name: &str) -> VmFile {
    VmFile::new(name).key("cell", &CELL.to_string())
}

/// The VM starts, or it does not and leaves nothing behind.
#[track_caller]
fn start_while_the_place_is_given(kills: &mut Kills<'_>, scratch: &Scratch, point: &str) {
    let file = file("points-place");
    let path = file.write(scratch);
    let (run, _) = kills.at(point, || mirrorball(["run", "-d"]).args([&path]).run());
    expect_done_or_refused(&run);
    println!("{point}: `run` ended with {}", run.status);
    if run.status == 0 {
        let vm = Vm::named(file.name());
        vm.wait_up();
        vm.stop();
    }
    cells_are_empty(kills.cluster);
}

/// The VM runs all the same. Returns it.
#[track_caller]
fn start(kills: &mut Kills<'_>, scratch: &Scratch, point: &str) -> Vm {
    let file = file("points");
    let (vm, next) = kills.at(point, || file.start(scratch));
    wait_until_served(&vm, next);
    vm
}

/// The VM starts again. The answer to the command may be lost.
#[track_caller]
fn reset(kills: &mut Kills<'_>, vm: &Vm, point: &str) {
    let before = vm.boot_id();
    let (reset, next) = kills.at(point, || mirrorball(["reset", vm.name()]).run());
    expect_done_or_refused(&reset);
    vm.wait_rebooted(&before);
    wait_until_served(vm, next);
}

/// The VM runs on while its cell takes it from a monitor.
#[track_caller]
fn adopt(kills: &mut Kills<'_>, vm: &Vm, point: &str) {
    let boot = vm.boot_id();
    // Set aside, it is served by a monitor.
    std::fs::write(vm.folder().join("adoptions"), "2").expect("root may");
    let cell = kills.next();
    host::kill9(cell);
    let next = kills.cluster.pid_after(CELL, cell);
    wait::until("a monitor", SERVE_LIMIT, || {
        let pid = vm.listed()?["monitor_pid"].as_u64()?;
        (![cell, next].map(u64::from).contains(&pid)).then_some(())
    });
    let (asked, next) = kills.at(point, || mirrorball(["cluster", "adopt", vm.name()]).run());
    expect_done_or_refused(&asked);
    wait_until_served(vm, next);
    assert_eq!(vm.boot_id(), boot, "the VM ran on");
}

/// The clone is whole or refused, and its parent runs on.
#[track_caller]
fn clone(kills: &mut Kills<'_>, vm: &Vm, point: &str) {
    let boot = vm.boot_id();
    let (clone, next) = kills.at(point, || mirrorball(["clone", vm.name()]).run());
    expect_done_or_refused(&clone);
    println!("{point}: `clone` ended with {}", clone.status);
    wait_until_served(vm, next);
    assert_eq!(vm.boot_id(), boot, "the parent ran on");
    if clone.status == 0 {
        let clone = Vm::named(clone.text().trim());
        assert_eq!(clone.boot_id(), boot, "it goes on from its parent");
        clone.kill();
    }
}

/// Checks that the VM has ended, whichever process reports its end.
#[track_caller]
fn stop(kills: &mut Kills<'_>, vm: &Vm) {
    let shard = vm.shard();
    let (stopped, _) = kills.at("vm_ended", || mirrorball(["stop", vm.name()]).run());
    expect_done_or_refused(&stopped);
    vm.wait_ended(SERVE_LIMIT);
    host::wait_gone(&[shard], SERVE_LIMIT);
}

/// Promise HOSTILE-20.
#[test]
fn cell_killed_at_each_of_its_fault_points_loses_no_vm() {
    let scratch = Scratch::new("points");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let kills = &mut Kills {
        cluster: &cluster,
        count: 0,
    };
    for _ in 0..repetitions(ROUNDS) {
        for point in PLACE {
            start_while_the_place_is_given(kills, &scratch, point);
        }
        for (number, point) in START.into_iter().enumerate() {
            let vm = start(kills, &scratch, point);
            REBOOT
                .get(number)
                .iter()
                .for_each(|point| reset(kills, &vm, point));
            ADOPTION
                .get(number)
                .iter()
                .for_each(|point| adopt(kills, &vm, point));
            if let Some(point) = number.checked_sub(START.len() - CLONE.len()) {
                clone(kills, &vm, CLONE[point]);
            }
            if number == 0 {
                stop(kills, &vm);
            } else {
                vm.stop();
            }
        }
    }
    cells_are_empty(&cluster);
    drop(cluster);
    before.expect_unchanged("VMs whose cell was killed at its fault points");
}
