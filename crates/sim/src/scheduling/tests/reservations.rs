//! Reserved time of CPUs: where VMs with reservations start, and which moves balancers make.

use policy::cpu::assignment::{Reserved, assign};
use policy::cpu::reserved_time::{excess, share};
use policy::cpu::set::CpuSet;

use super::*;

/// Reserved time of each CPU, by the queues of the drivers.
fn reserved(world: &World) -> Vec<u32> {
    let of = |vcpu: VcpuId| share(&world.history.vms[usize::from(vcpu.vm.0)].terms);
    let queues = world.drivers.iter().map(|driver| driver.queue());
    queues
        .map(|queue| queue.iter().map(|queued| of(queued.vcpu)).sum())
        .collect()
}

/// Adds a VM on the CPUs that assignment chooses for it. None if these have no room for its reservation.
fn place(
    world: &mut World,
    topology: &Topology,
    loads: &mut [u32],
    reserved: &mut [u32],
    (terms, program): (Terms, Program),
) -> Option<VmId> {
    let sets = vec![CpuSet::ALL; usize::from(terms.vcpus)];
    let share_permille = share(&terms);
    let known = Reserved {
        share_permille,
        cpus: reserved,
    };
    let chosen = assign(topology, loads, &sets, &known)?;
    if chosen.iter().any(|cpu| known.excess(*cpu) > 0) {
        return None;
    }
    for cpu in &chosen {
        loads[cpu.index()] += 1;
        reserved[cpu.index()] += share_permille;
    }
    // At once: a move in between may take the room.
    Some(world.add(terms, program, &chosen, 0))
}

fn reserving(vcpus: u16, reservation_permille: u32) -> Terms {
    Terms {
        vcpus,
        reservation_permille,
        ..Terms::default()
    }
}

#[test]
fn reservations_that_one_cpu_has_no_room_for_are_had_on_two() {
    let topology = Topology::regular(1, 1, 2);
    let mut world = World::new(topology.clone(), Tunables::default(), Costs::PAPER, 3, 9);
    let (mut loads, mut taken) = ([0; 2], [0; 2]);
    let mut add = |world: &mut World, permille| {
        let vm = (reserving(1, permille), Program::Busy);
        place(world, &topology, &mut loads, &mut taken, vm).expect("room")
    };
    // By loads alone both would start on the first CPU: two of the others start on the second one.
    let first = add(&mut world, 800);
    let others = [0; 3].map(|permille| add(&mut world, permille));
    world.run(1);
    let second = add(&mut world, 800);
    let mut former = [0, 0];
    for period in 1..=30 {
        world.run(period * 100 * MILLISECOND);
        let ran = [first, second].map(|vm| world.ran_ns(vm));
        for (ran, former) in ran.iter().zip(former).filter(|_| period > 1) {
            assert!(
                ran - former >= 77 * MILLISECOND,
                "period {period}: {} ns",
                ran - former
            );
        }
        former = ran;
    }
    assert!(others.iter().all(|vm| world.ran_ns(*vm) > 0));
    assert_eq!(world.violation, None);
}

/// Number of moves of vCPUs with a reservation in a world of this seed. The reserved time of each CPU has to
/// be within its limit all the time.
fn check(seed: u64) -> usize {
    let count = 2 + (seed % 7) as u16;
    let topology = Topology::regular(1, 1, count);
    let mut world = World::new(topology.clone(), Tunables::default(), Costs::PAPER, 3, seed);
    let (mut loads, mut taken) = (vec![0; usize::from(count)], vec![0; usize::from(count)]);
    for _ in 0..2 * count {
        let vcpus = 1 + world.below(2) as u16;
        let permille = match world.below(3) {
            0 => 0,
            _ => world.below(900 * u64::from(vcpus)) as u32,
        };
        let program = match world.below(3) {
            0 => Program::Busy,
            _ => Program::Bursts {
                busy_ns: 20 * MILLISECOND,
                idle_ns: 10 * MILLISECOND,
            },
        };
        let vm = (reserving(vcpus, permille), program);
        place(&mut world, &topology, &mut loads, &mut taken, vm);
    }
    for step in 1..=50 {
        world.run(step * 10 * MILLISECOND);
        let reserved = reserved(&world);
        assert!(
            reserved.iter().all(|permille| excess(*permille) == 0),
            "seed {seed}, {} ms: {reserved:?}",
            step * 10
        );
    }
    assert_eq!(world.violation, None, "seed {seed}");
    let has_reserved = |vm: VmId| world.history.vms[usize::from(vm.0)].terms.reservation_permille > 0;
    world.moves.iter().filter(|one| has_reserved(one.vcpu.vm)).count()
}

#[test]
fn balancers_with_stale_views_keep_reserved_time_within_what_a_cpu_has() {
    let moves: usize = (0..1_000).map(check).sum();
    println!("{moves} moves of vCPUs with a reservation");
    assert!(moves > 100, "they moved {moves} times");
}
