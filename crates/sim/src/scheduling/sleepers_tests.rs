use policy::cpu::entry::VcpuState;
use policy::cpu::topology::Topology;
use policy::cpu::tunables::Tunables;
use policy::cpu::view::Terms;
use policy::cpu::{CpuId, VmId};

use super::costs::Costs;
use super::program::Program;
use super::sleepers::Scheduler::{self, Gangs, Linux, StrictGangs};
use super::sleepers::Wait::{self, Sleep, Spin};
use super::sleepers::run;
use super::world::World;
use crate::{MILLISECOND, SECOND};

/// Barriers that each VM passes beside what it passes under another scheduler.
fn ratios(waits: &[Wait], scheduler: Scheduler, other: Scheduler, seed: u64) -> Vec<f64> {
    let [one, other] = [scheduler, other].map(|by| run(waits, by, seed).expect("all rules hold"));
    one.iter().zip(other).map(|(one, other)| one / other).collect()
}

#[test]
fn threads_that_sleep_are_as_fast_as_under_linux_where_strict_gangs_have_them_lose_a_third() {
    for seed in 1..=8 {
        for ratio in ratios(&[Sleep, Sleep], Gangs, Linux, seed) {
            assert!(ratio > 0.95, "seed {seed}: {ratio}");
        }
        for ratio in ratios(&[Sleep, Sleep], StrictGangs, Linux, seed) {
            assert!(ratio < 0.67, "seed {seed}: {ratio}");
        }
    }
}

#[test]
fn threads_that_spin_keep_their_gang_beside_threads_that_sleep() {
    for seed in 1..=8 {
        for waits in [
            &[Spin, Spin][..],
            &[Sleep, Spin],
            &[Sleep, Spin, Spin],
            &[Sleep, Sleep, Spin],
        ] {
            let strict = ratios(waits, Gangs, StrictGangs, seed);
            assert!(
                strict.iter().all(|ratio| *ratio > 0.9),
                "seed {seed}: {waits:?}: {strict:?}"
            );
            let linux = ratios(waits, Gangs, Linux, seed);
            for (wait, ratio) in waits.iter().zip(linux) {
                assert!(*wait == Sleep || ratio > 0.97, "seed {seed}: {waits:?}: {ratio}");
            }
        }
    }
}

fn barriers(halt_after_ns: Option<u64>) -> Program {
    Program::Barrier {
        work_ns: 100_000,
        rounds: u64::MAX,
        halt_after_ns,
    }
}

#[test]
fn vm_is_left_to_linux_while_it_sleeps_and_is_in_a_gang_within_a_second_of_its_first_spin() {
    let cpus = [CpuId(0), CpuId(1)];
    let mut world = World::new(
        Topology::regular(1, 1, 2),
        Tunables::default(),
        Costs::PRESENT,
        0,
        1,
    );
    for _ in 0..2 {
        world.add(Terms::default(), barriers(Some(0)), &cpus, 0);
    }
    world.run(SECOND);
    // A vCPU that is halted for a tick is idle; the others are Linux's.
    let is_driven = |world: &World| {
        world
            .history
            .now
            .entries
            .iter()
            .flatten()
            .any(|one| one.state.is_gated())
    };
    assert!(!is_driven(&world) && world.history.now.entries[0][0].state == VcpuState::Ungated);
    for vm in &mut world.vms {
        vm.program = barriers(None);
    }
    world.run(2 * SECOND);
    let all: Vec<_> = world
        .history
        .now
        .entries
        .iter()
        .flatten()
        .map(|one| one.state)
        .collect();
    assert!(all.iter().all(|state| state.is_gated()), "{all:?}");
    let before = [0, 1].map(|vm| world.rounds(VmId(vm)));
    world.run(3 * SECOND);
    for (vm, before) in before.into_iter().enumerate() {
        let rounds = world.rounds(VmId(vm as u16)) - before;
        assert!(rounds > 4_500, "{rounds} of 5,000");
    }
}

#[test]
fn no_vcpu_starves_and_reservations_are_had_beside_vcpus_that_halt_often() {
    for seed in 0..4 {
        let cpus: Vec<CpuId> = (0..4).map(CpuId).collect();
        let mut world = World::new(
            Topology::regular(1, 1, 4),
            Tunables::default(),
            Costs::PRESENT,
            0,
            seed,
        );
        let reserved = Terms {
            reservation_permille: 1_200,
            weight: 10,
            ..Terms::default()
        };
        let reserved = world.add(reserved, Program::Busy, &cpus, 0);
        for vm in 0..5_u64 {
            let program = match vm % 3 {
                0 => barriers(Some(0)),
                1 => Program::Busy,
                _ => Program::Bursts {
                    busy_ns: 200_000,
                    idle_ns: 1 + world.below(2 * MILLISECOND),
                },
            };
            world.add(Terms::default(), program, &cpus, 20 * MILLISECOND);
        }
        world.run(2 * SECOND);
        let before = world.ran_ns(reserved);
        world.run(4 * SECOND);
        assert_eq!(world.violation, None, "seed {seed}");
        let had = world.ran_ns(reserved) - before;
        assert!(
            had > 2_300 * MILLISECOND,
            "seed {seed}: {} ms of 2,400",
            had / MILLISECOND
        );
        let wait = world.longest_wait_ns();
        assert!(
            wait < 2 * SECOND,
            "seed {seed}: a vCPU waited for {} ms",
            wait / MILLISECOND
        );
    }
}
