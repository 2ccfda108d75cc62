//! Moves that are interrupted by other events: each has happened or has not.

use std::time::Duration;

use guest_tests::pattern::Numbers;
use guest_tests::storm::{Extent, Storm};
use guest_tests::{Cluster, Scratch, Vm, repetitions, wait};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{CPUS, LIMIT, STORM};

/// The cells of all vCPUs; each is in a cell of the two.
#[track_caller]
fn places(vm: &Vm) -> Vec<u64> {
    let places = vm.places();
    assert!(
        places.len() == CPUS && places.iter().all(|cell| *cell < 2),
        "{places:?}"
    );
    places
}

#[test]
fn interrupted_and_simultaneous_moves_lose_no_interrupt() {
    let scratch = Scratch::new("between");
    let _cluster = Cluster::up(&scratch);
    let endless = Extent { epochs: 0, ..STORM };
    let mut storm = Storm::start(&scratch, "between", endless, &["--span", "0,1"]);
    let vm = &storm.vm;
    let mut numbers = Numbers::new(55);

    // The command dies somewhere in the midst of a move.
    for _ in 0..repetitions(30) {
        let vcpu = numbers.below(CPUS as u64) as usize;
        let call = vm.move_vcpu(vcpu, 1 - places(vm)[vcpu]).spawn();
        std::thread::sleep(Duration::from_millis(numbers.below(60)));
        call.signal(Signal::SIGKILL);
        call.wait();
    }

    // Several commands at once: a command that reports a vCPU's move finds the vCPU there.
    for _ in 0..repetitions(15) {
        let to: Vec<u64> = places(vm).iter().map(|cell| 1 - cell).collect();
        let calls: Vec<_> = (0..CPUS)
            .map(|vcpu| vm.move_vcpu(vcpu, to[vcpu]).spawn())
            .collect();
        let ends: Vec<_> = calls.into_iter().map(|call| call.wait()).collect();
        let now = places(vm);
        for (vcpu, end) in ends.iter().enumerate() {
            assert!([0, 1].contains(&end.status), "{end}");
            assert!(
                end.status == 1 || now[vcpu] == to[vcpu],
                "vCPU {vcpu} in {now:?}:\n{end}"
            );
        }
    }

    // A shard is stopped while vCPUs move to it and from it.
    let shards = vm.shards();
    for shard in [1, 0] {
        let stopped = Pid::from_raw(shards[shard] as i32);
        kill(stopped, Signal::SIGSTOP).expect("ours");
        let now: Vec<_> = (0..2)
            .map(|vcpu| vm.move_vcpu(vcpu, shard as u64).spawn())
            .collect();
        std::thread::sleep(Duration::from_secs(2));
        kill(stopped, Signal::SIGCONT).expect("ours");
        for call in now {
            let end = call.wait();
            assert!([0, 1].contains(&end.status), "{end}");
        }
        wait::until("all vCPUs are somewhere", LIMIT, || {
            let first = places(vm);
            std::thread::sleep(Duration::from_millis(300));
            (places(vm) == first).then_some(())
        });
    }
    storm.stop();
    let counts = storm.counts(LIMIT);
    println!("moves that were interrupted: {}", counts.line());
    counts.expect_exact();
}
