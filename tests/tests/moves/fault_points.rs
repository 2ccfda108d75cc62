//! Moves that are interrupted, and shards that die, at each fault point of a move.

use std::time::Duration;

use guest_tests::fault_points::FaultPoints;
use guest_tests::host;
use guest_tests::span::cells_are_empty;
use guest_tests::storm::{Extent, Storm};
use guest_tests::{Cluster, Scratch, Vm, repetitions, wait};
use nix::sys::signal::Signal;

use crate::{CPUS, LIMIT, STORM};

/// The points of a move in their order, and whether the shard that the vCPU leaves reaches them, or the one
/// that it moves to.
const POINTS: [(&str, bool); 8] = [
    ("move_ordered", true),
    ("move_stopped", true),
    ("move_read", true),
    ("move_sent", true),
    ("move_departed", true),
    ("move_received", false),
    ("move_installed", false),
    ("move_resumed", false),
];
/// Time limit until a vCPU that was ordered to move is at a point.
const REACH_LIMIT: Duration = Duration::from_secs(20);
/// Duration of a hold in which another command reaches the VM.
const HOLD: Duration = Duration::from_millis(400);
/// Time limit of a VM's end after one of its shards died.
const END_LIMIT: Duration = Duration::from_secs(20);
/// Exit status of `run` for a failed shard.
const FAILED: i32 = 73;

/// Breakpoints in both shards. The program has the points of [`POINTS`] and no others.
#[track_caller]
fn points_of(vm: &Vm) -> (FaultPoints, Vec<u32>) {
    let shards = vm.shards();
    let points = FaultPoints::of(&shards);
    let mut expected = POINTS.map(|(name, _)| name);
    expected.sort_unstable();
    assert_eq!(points.names("move_"), expected);
    (points, shards)
}

/// Waits until a vCPU is in a cell.
#[track_caller]
fn wait_in(vm: &Vm, vcpu: usize, cell: u64) {
    wait::until(&format!("vCPU {vcpu} in cell {cell}"), LIMIT, || {
        (vm.places()[vcpu] == cell).then_some(())
    });
}

#[test]
fn move_interrupted_at_each_of_its_points_loses_no_interrupt() {
    let scratch = Scratch::new("points");
    let _cluster = Cluster::up(&scratch);
    let endless = Extent { epochs: 0, ..STORM };
    let mut storm = Storm::start(&scratch, "points", endless, &["--span", "0,1"]);
    let vm = &storm.vm;
    let (points, _) = points_of(vm);
    let mut vcpu = 0;
    for _ in 0..repetitions(5) {
        for (point, _) in POINTS {
            vcpu = (vcpu + 1) % CPUS;
            // The command dies while the vCPU stands at the point. Its move happens all the same.
            let to = 1 - vm.places()[vcpu];
            let held = points.hold(point);
            let call = vm.move_vcpu(vcpu, to).spawn();
            held.reached(REACH_LIMIT);
            call.signal(Signal::SIGKILL);
            std::thread::sleep(HOLD / 4);
            drop(held);
            call.wait();
            wait_in(vm, vcpu, to);

            // Another command wants the vCPU back while it stands there.
            let back = 1 - to;
            let held = points.hold(point);
            let away = vm.move_vcpu(vcpu, back).spawn();
            held.reached(REACH_LIMIT);
            let home = vm.move_vcpu(vcpu, to).spawn();
            std::thread::sleep(HOLD);
            drop(held);
            let ends = [away.wait(), home.wait()];
            let now = vm.places()[vcpu];
            assert!(
                ends.iter().all(|end| [0, 1].contains(&end.status)),
                "{} {}",
                ends[0],
                ends[1]
            );
            // The last order is the last to be carried out.
            if ends[1].status == 0 {
                assert_eq!(now, to, "vCPU {vcpu}, held at {point}");
            }
        }
    }
    let hits = points.hits();
    for (point, _) in POINTS {
        assert!(
            hits.get(point).is_some_and(|hits| *hits >= 3 * repetitions(5)),
            "{point} of {hits:?}"
        );
    }
    storm.stop();
    let counts = storm.counts(LIMIT);
    println!("moves held at their points: {hits:?}\n{}", counts.line());
    counts.expect_exact();
    points.wait();
}

#[test]
fn vm_ends_with_a_shard_that_dies_at_any_point_of_a_move() {
    let scratch = Scratch::new("dies");
    let cluster = Cluster::up(&scratch);
    let endless = Extent { epochs: 0, ..STORM };
    for (number, (point, in_source)) in (0..).zip(POINTS) {
        // The shard that stands at the point dies, or the other one. A landing takes turns.
        for dies_here in [true, false] {
            if repetitions(2) == 1 && dies_here != (number % 2 == 0) {
                continue;
            }
            let storm = Storm::start(&scratch, "dies", endless, &["--span", "0,1"]);
            let (points, shards) = points_of(&storm.vm);
            let held = points.hold(point);
            let from_home = number % 4 < 2;
            let (vcpu, to) = if from_home { (0, 1) } else { (CPUS - 1, 0) };
            let call = storm.vm.move_vcpu(vcpu, to).spawn();
            let at = held.reached(REACH_LIMIT);
            let source = if from_home { shards[0] } else { shards[1] };
            assert_eq!(at == source, in_source, "{point} is in {at} of {shards:?}");
            let other = shards.iter().copied().find(|pid| *pid != at).expect("two shards");
            host::kill9(if dies_here { at } else { other });
            drop(held);
            let (status, told) = storm.ended(END_LIMIT);
            assert_eq!(status, FAILED, "{point}, exit status; the terminal:\n{told}");
            assert!(
                told.contains("SIGKILL"),
                "{point}: the reason is not reported:\n{told}"
            );
            let moved = call.wait();
            assert!([0, 1].contains(&moved.status), "{moved}");
            host::wait_gone(&shards, END_LIMIT);
            cells_are_empty(&cluster);
            points.wait();
            println!(
                "{point}: the VM ended with shard {}",
                if dies_here { at } else { other }
            );
        }
    }
}
