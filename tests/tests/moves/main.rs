//! Risk: an interrupt is lost, doubled or late on its way to a vCPU, wherever that runs or moves; a vCPU that
//! moves loses a part of its state.
//!
//! A kernel that does nothing else counts the interrupts (`guest/`). It also runs on KVM's own controllers
//! here: faults that it finds there are its own. `underway` has Linux while its vCPUs move.

mod fault_points;
mod interrupted;
mod pinned;

use std::time::Duration;

use guest_tests::host::Traces;
use guest_tests::span::Moves;
use guest_tests::storm::{Extent, Storm};
use guest_tests::{Cluster, Scratch, repetitions};

const CPUS: usize = 4;
const LIMIT: Duration = Duration::from_secs(150);
/// Enough for every kind of interrupt.
const STORM: Extent = Extent {
    cpus: CPUS,
    epochs: 4,
    sweeps: 60,
};
const MOVES: usize = 1000;

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
fn every_interrupt_comes_once_with_kvms_own_controllers() {
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
    let moves = Moves::by_chance(&storm.vm, 2, repetitions(MOVES), 51);
    // A shard that no vCPU runs in, the home then.
    for cell in [1, 0] {
        for vcpu in 0..CPUS {
            storm.vm.move_vcpu(vcpu, cell).ok();
        }
        assert_eq!(storm.vm.places(), [cell; CPUS]);
        let vcpus = cluster.vcpus(&storm.vm);
        assert_eq!(vcpus.len(), CPUS, "{vcpus:?}");
        assert!(vcpus.iter().all(|vcpu| vcpu["cell"] == cell), "{vcpus:?}");
    }
    storm.stop();
    let counts = storm.counts(LIMIT);
    println!("under interrupts: {moves}\n{}", counts.line());
    counts.expect_exact();
    assert_eq!(counts.of("early"), 0, "{}", counts.line());
    drop(cluster);
    before.expect_unchanged("a storm");
}
