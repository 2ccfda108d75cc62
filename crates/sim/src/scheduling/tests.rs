mod reservations;
mod storms;

use policy::cpu::gang::Gang;
use policy::cpu::message::{Event, Refusal};
use policy::cpu::topology::Topology;
use policy::cpu::tunables::Tunables;
use policy::cpu::view::Terms;
use policy::cpu::word::Mode;
use policy::cpu::{CpuId, VcpuId, VmId};

use super::costs::Costs;
use super::experiment::{Scheduler, Wait, run};
use super::program::Program;
use super::world::World;
use crate::{MILLISECOND, SECOND, Time};

fn cpus(cpus: &[u16]) -> Vec<CpuId> {
    cpus.iter().copied().map(CpuId).collect()
}

fn vcpu(vm: u16, index: u16) -> VcpuId {
    VcpuId { vm: VmId(vm), index }
}

/// Figure 8 of Cellular Disco: A runs on CPUs 2 and 3; B waits on CPUs 0 and 2. CPU 1 is empty.
fn figure_8(topology: Topology) -> World {
    let mut world = World::new(topology, Tunables::default(), Costs::PAPER, 0, 8);
    world.add(Terms::default(), Program::Busy, &cpus(&[2, 3]), 0);
    world.run(1);
    world.add(Terms::default(), Program::Busy, &cpus(&[0, 2]), 0);
    world
}

/// B's second vCPU waits from 1 ns on, for `delay`.
fn check_figure_8(mut world: World, delay: Time) {
    world.run(delay);
    assert_eq!(world.moves, []);
    assert_ne!(
        world.running(CpuId(0)).map(|one| one.1),
        Some(Mode::Entitled),
        "B runs without its other vCPU"
    );
    world.run(delay + MILLISECOND);
    let moves: Vec<_> = world
        .moves
        .iter()
        .map(|one| (one.vcpu, one.from, one.to))
        .collect();
    assert_eq!(moves, [(vcpu(1, 1), CpuId(2), CpuId(1))]);
    world.run(25 * MILLISECOND);
    assert_eq!(world.moves.len(), 1);
    let running: Vec<_> = (0..4)
        .map(|cpu| world.running(CpuId(cpu)).map(|one| one.0))
        .collect();
    assert_eq!(
        running,
        [vcpu(1, 0), vcpu(1, 1), vcpu(0, 0), vcpu(0, 1)].map(Some)
    );
    assert!((0..4).all(|cpu| {
        world
            .running(CpuId(cpu))
            .is_some_and(|one| one.1 == Mode::Entitled)
    }));
    let starts = |cpu: usize| world.drivers[cpu].counters().switches;
    assert_eq!((starts(2), starts(3)), (1, 1), "A was disturbed");
    assert_eq!(world.violation, None);
}

#[test]
fn figure_8_idle_cpu_of_the_same_node_takes_one_vcpu_after_4_ms() {
    check_figure_8(figure_8(Topology::regular(1, 1, 4)), 4 * MILLISECOND);
}

#[test]
fn figure_8_idle_cpu_of_another_node_takes_one_vcpu_after_6_ms() {
    check_figure_8(figure_8(Topology::regular(1, 2, 2)), 6 * MILLISECOND);
}

#[test]
fn idle_cpu_of_another_cell_takes_nothing() {
    let mut world = figure_8(Topology::regular(2, 1, 2));
    world.run(19 * MILLISECOND);
    assert_eq!(world.moves, []);
}

/// Terms under which a VM is charged nothing, so that ranks stay as they are while slices end as usual.
fn weightless() -> Terms {
    Terms {
        weight: u32::MAX,
        ..Terms::default()
    }
}

/// Tunables under which nothing moves.
fn frozen() -> Tunables {
    let never = 1_000 * SECOND;
    Tunables {
        overdue_ns: never,
        idle_delay_intra_node_ns: never,
        idle_delay_inter_node_ns: never,
        region_balance_period_ns: never,
        machine_balance_period_ns: never,
        ..Tunables::default()
    }
}

/// The VM that each CPU runs in the end: the first VM in the order has all its CPUs, the next one if its CPUs
/// are free, and so on.
fn greedy(world: &World, cpus: u16) -> Vec<Option<VmId>> {
    let view = world.history.lagging(0);
    let mut gangs: Vec<Gang> = (0..world.vms.len() as u16)
        .map(|vm| Gang::of(&view, VmId(vm), world.now, &frozen()))
        .collect();
    gangs.sort_by_key(|gang| gang.rank);
    let mut chosen = vec![None; usize::from(cpus)];
    for gang in gangs {
        let vm = gang.rank.vm;
        let entries = &world.history.now.entries[usize::from(vm.0)];
        if entries.iter().all(|entry| chosen[entry.cpu.index()].is_none()) {
            for entry in entries {
                chosen[entry.cpu.index()] = Some(vm);
            }
        }
    }
    chosen
}

/// Time from the first start by which drivers agree: ten turns of a slice.
const AGREED_BY: Time = 300 * MILLISECOND;

/// The last time at which drivers disagreed with [`greedy`]. Their views lag by up to three ticks,
/// differently
/// at each read; vCPUs start at random times.
fn agree(seed: u64) -> Result<Time, String> {
    let count = 2 + (seed % 15) as u16;
    let mut world = World::new(Topology::regular(1, 1, count), frozen(), Costs::PAPER, 3, seed);
    for _ in 0..1 + world.below(9) {
        let mut all: Vec<CpuId> = (0..count).map(CpuId).collect();
        let vcpus = 1 + world.below(u64::from(count));
        while all.len() as u64 > vcpus {
            let index = world.below(all.len() as u64) as usize;
            all.swap_remove(index);
        }
        world.add(weightless(), Program::Busy, &all, 5 * MILLISECOND);
    }
    let is_settled = |world: &World| {
        let expected = greedy(world, count);
        (0..count).all(|cpu| {
            let entitled = world.running(CpuId(cpu)).filter(|one| one.1 == Mode::Entitled);
            entitled.map(|one| one.0.vm) == expected[usize::from(cpu)]
        })
    };
    let mut disagreed_at = 0;
    for step in 1..=100 {
        world.run(step * 5 * MILLISECOND);
        if !is_settled(&world) {
            disagreed_at = world.now;
        }
    }
    match world.violation {
        Some(violation) => Err(format!("seed {seed}: {violation}")),
        None if disagreed_at >= AGREED_BY => Err(format!("seed {seed}: disagreement at {disagreed_at} ns")),
        None => Ok(disagreed_at),
    }
}

#[test]
fn drivers_with_stale_views_agree_on_the_gangs_and_stay_agreed() {
    let mut latest = 0;
    for seed in 0..1_000 {
        latest = latest.max(agree(seed).unwrap_or_else(|error| panic!("{error}")));
    }
    println!("the last disagreement was at {} ms", latest / MILLISECOND);
}

#[test]
fn gangs_of_eight_vms_take_at_most_2_06_times_as_long_as_one_and_round_robin_longer() {
    let work = 300 * MILLISECOND;
    let time = |vms, scheduler, wait| run(vms, scheduler, wait, work, 1).map(|run| run.last_ns);
    let one = time(1, Scheduler::Gang, Wait::Spin).expect("one VM ends") as f64;
    let ratio = |vms, scheduler, wait| time(vms, scheduler, wait).map(|time| time as f64 / one);
    let four = ratio(4, Scheduler::Gang, Wait::Spin).expect("four VMs end");
    let eight = ratio(8, Scheduler::Gang, Wait::Spin).expect("eight VMs end");
    let halting = ratio(8, Scheduler::Gang, Wait::SpinThenHalt).expect("eight VMs end");
    let without = ratio(8, Scheduler::RoundRobin, Wait::Spin);
    println!("4: {four:.3}, 8: {eight:.3}, that halt: {halting:.3}, 8 without gangs: {without:?}");
    // One VM alone has no wait for its first slice, and 300 ms of work make the start weigh 10%.
    assert!(four < 1.1, "{four}");
    for eight in [eight, halting] {
        assert!(eight < 2.06 + 0.1, "{eight}");
    }
    assert!(
        without.is_none_or(|without| without > 2.0 * eight),
        "{without:?} {eight}"
    );
}

#[test]
fn vms_have_time_in_proportion_to_their_weights() {
    let mut world = World::new(
        Topology::regular(1, 1, 4),
        Tunables::default(),
        Costs::PAPER,
        0,
        3,
    );
    let weights = [100, 200, 400];
    for weight in weights {
        let terms = Terms {
            weight,
            ..Terms::default()
        };
        world.add(terms, Program::Busy, &cpus(&[0, 1, 2, 3]), 20 * MILLISECOND);
    }
    world.run(20 * SECOND);
    let ran: Vec<f64> = (0..3).map(|vm| world.ran_ns(VmId(vm)) as f64).collect();
    let sum: f64 = ran.iter().sum();
    for (ran, weight) in ran.iter().zip(weights) {
        let (share, fair) = (ran / sum, f64::from(weight) / 700.0);
        assert!(
            (share / fair - 1.0).abs() < 0.05,
            "weight {weight}: {share:.3} of the time, not {fair:.3}"
        );
    }
    assert!(sum > 0.97 * 80.0 * SECOND as f64, "the CPUs were idle: {sum}");
}

#[test]
fn reservation_is_had_in_each_period_and_a_cap_is_not_exceeded() {
    let mut world = World::new(
        Topology::regular(1, 1, 4),
        Tunables::default(),
        Costs::PAPER,
        0,
        4,
    );
    let all = cpus(&[0, 1, 2, 3]);
    let reserved = Terms {
        weight: 10,
        reservation_permille: 1_600,
        ..Terms::default()
    };
    let capped = Terms {
        cap_permille: Some(1_000),
        ..Terms::default()
    };
    let heavy = Terms {
        weight: 1_000,
        ..Terms::default()
    };
    let reserved = world.add(reserved, Program::Busy, &all, 0);
    let capped = world.add(capped, Program::Busy, &all, 0);
    for _ in 0..3 {
        world.add(heavy, Program::Busy, &all, 0);
    }
    let mut former = [0, 0];
    for period in 1..=50 {
        world.run(period * 100 * MILLISECOND);
        let ran = [reserved, capped].map(|vm| world.ran_ns(vm));
        // In each period: 1.6 CPUs less a switch of each vCPU for each slice; at most 1 CPU and one look.
        assert!(
            ran[0] - former[0] >= 157 * MILLISECOND,
            "period {period}: {} ns",
            ran[0] - former[0]
        );
        assert!(
            ran[1] - former[1] <= 102 * MILLISECOND,
            "period {period}: {} ns",
            ran[1] - former[1]
        );
        former = ran;
    }
}

/// A machine of two cells of two nodes of four CPUs, VMs of all kinds, and views that lag.
fn mixed(seed: u64) -> World {
    let mut world = World::new(
        Topology::regular(2, 2, 4),
        Tunables::default(),
        Costs::PAPER,
        3,
        seed,
    );
    for vm in 0..8_u64 {
        let mut all: Vec<CpuId> = (0..16).map(CpuId).collect();
        let vcpus = 1 + world.below(6);
        while all.len() as u64 > vcpus {
            let index = world.below(all.len() as u64) as usize;
            all.swap_remove(index);
        }
        let program = match vm % 4 {
            0 => Program::Busy,
            1 => Program::Single,
            2 => Program::Bursts {
                busy_ns: 3 * MILLISECOND,
                idle_ns: 5 * MILLISECOND,
            },
            _ => Program::Barrier {
                work_ns: 4 * MILLISECOND,
                rounds: u64::MAX,
                halt_after_ns: Some(50_000),
            },
        };
        let terms = Terms {
            weight: [50, 100, 200][world.below(3) as usize],
            is_gang: world.below(4) > 0,
            ..Terms::default()
        };
        world.add(terms, program, &all, 20 * MILLISECOND);
    }
    world
}

fn vcpus(world: &World) -> usize {
    world.vms.iter().map(|vm| vm.vcpus.len()).sum()
}

#[test]
fn no_vcpu_starves_whatever_is_random() {
    let mut longest = 0;
    for seed in 0..12 {
        let mut world = mixed(seed);
        world.run(4 * SECOND);
        assert_eq!(world.violation, None, "seed {seed}");
        assert_eq!(world.queued(), vcpus(&world), "seed {seed}: a vCPU is lost");
        let wait = world.longest_wait_ns();
        longest = longest.max(wait);
        // A second until it is overdue, and a turn of each other VM.
        assert!(
            wait < 2 * SECOND,
            "seed {seed}: a vCPU waited for {} ms",
            wait / MILLISECOND
        );
    }
    println!("the longest wait was {} ms", longest / MILLISECOND);
}

#[test]
fn nothing_is_lost_when_cpus_vanish_and_return_drivers_stall_and_clocks_jump() {
    for seed in 0..12 {
        let mut world = mixed(seed);
        for step in 1..=20_u64 {
            world.run(step * 100 * MILLISECOND);
            let cpu = CpuId(world.below(16) as u16);
            match world.below(4) {
                0 => world.send(world.now, cpu, Event::Offline),
                1 => world.send(world.now, cpu, Event::Online),
                2 => world.stall(cpu, world.now + 80 * MILLISECOND),
                _ => {
                    let by = world.below(10 * SECOND) as i64 - 5 * SECOND as i64;
                    world.jump(by);
                }
            }
        }
        for cpu in 0..16 {
            world.send(world.now, CpuId(cpu), Event::Online);
        }
        world.run(4 * SECOND);
        assert_eq!(world.violation, None, "seed {seed}");
        assert_eq!(world.queued(), vcpus(&world), "seed {seed}: a vCPU is lost");
        let before: Vec<Time> = (0..8).map(|vm| world.ran_ns(VmId(vm))).collect();
        world.run(7 * SECOND);
        for (vm, before) in (0..8).map(VmId).zip(before) {
            assert!(world.ran_ns(vm) > before, "seed {seed}: {vm:?} runs no longer");
        }
    }
}

#[test]
fn vcpus_of_a_lost_cpu_move_to_cpus_without_another_of_their_vm() {
    let mut world = World::new(
        Topology::regular(1, 1, 4),
        Tunables::default(),
        Costs::PAPER,
        0,
        5,
    );
    for _ in 0..2 {
        world.add(Terms::default(), Program::Busy, &cpus(&[0, 1, 2]), 0);
    }
    world.run(50 * MILLISECOND);
    world.send(world.now, CpuId(1), Event::Offline);
    world.run(100 * MILLISECOND);
    assert!(world.drivers[1].queue().is_empty());
    assert_eq!(world.drivers[3].queue().len(), 2);
    assert_eq!(world.violation, None);
    // With a second one gone two vCPUs of each VM share a CPU, as the last resort.
    world.send(world.now, CpuId(2), Event::Offline);
    world.run(200 * MILLISECOND);
    assert!(world.drivers[2].queue().is_empty());
    assert_eq!(world.queued(), 6);
    let doubled: u64 = world.drivers.iter().map(|driver| driver.counters().doubled).sum();
    assert_eq!(doubled, 2);
    let before = [0, 1].map(|vm| world.ran_ns(VmId(vm)));
    world.run(400 * MILLISECOND);
    for (vm, before) in before.into_iter().enumerate() {
        assert!(world.ran_ns(VmId(vm as u16)) > before + 50 * MILLISECOND);
    }
}

#[test]
fn clock_that_jumps_charges_one_slice_at_most_and_changes_no_share() {
    let share = |jumps: &[i64]| {
        let mut world = World::new(
            Topology::regular(1, 1, 2),
            Tunables::default(),
            Costs::PAPER,
            0,
            6,
        );
        for _ in 0..2 {
            world.add(Terms::default(), Program::Busy, &cpus(&[0, 1]), 0);
        }
        for (step, by) in (1..).zip(jumps) {
            world.run(step * 95 * MILLISECOND);
            world.jump(*by);
        }
        world.run(10 * SECOND);
        assert_eq!(world.violation, None);
        let ran = [0, 1].map(|vm| world.ran_ns(VmId(vm)) as f64 / SECOND as f64);
        println!("{jumps:?}: {ran:?}");
        ran
    };
    let hour = 3_600 * SECOND as i64;
    for ran in [
        share(&[]),
        share(&[-hour, hour, hour, -hour]),
        share(&[-1, 40_000_000, -3_000_000_000]),
    ] {
        assert!((ran[0] - ran[1]).abs() < 0.2 && ran[0] + ran[1] > 19.0, "{ran:?}");
    }
}

#[test]
fn stalled_driver_holds_its_gang_up_for_a_bounded_time() {
    let mut world = World::new(
        Topology::regular(1, 1, 4),
        Tunables::default(),
        Costs::PAPER,
        0,
        7,
    );
    for _ in 0..2 {
        world.add(Terms::default(), Program::Busy, &cpus(&[0, 1, 2, 3]), 0);
    }
    world.run(305 * MILLISECOND);
    world.stall(CpuId(3), 3 * SECOND);
    let before = [0, 1].map(|vm| world.ran_ns(VmId(vm)));
    world.run(2_300 * MILLISECOND);
    // Three CPUs go on with both VMs in turn.
    let stragglers: u64 = world
        .drivers
        .iter()
        .map(|driver| driver.counters().stragglers)
        .sum();
    assert!(stragglers > 0);
    for (vm, before) in before.into_iter().enumerate() {
        let ran = world.ran_ns(VmId(vm as u16)) - before;
        assert!(
            ran > 2_300 * MILLISECOND,
            "VM {vm} ran for {} ms",
            ran / MILLISECOND
        );
    }
}

#[test]
fn order_moves_a_vcpu_that_runs_and_is_refused_where_its_vm_has_another() {
    let mut world = World::new(
        Topology::regular(2, 1, 2),
        Tunables::default(),
        Costs::PAPER,
        0,
        8,
    );
    world.add(Terms::default(), Program::Busy, &cpus(&[0, 1]), 0);
    world.run(15 * MILLISECOND);
    world.send(world.now, CpuId(1), Event::Order { vcpu: vcpu(0, 0) });
    world.run(16 * MILLISECOND);
    assert_eq!(world.refused, [(vcpu(0, 0), Refusal::SameVm)]);
    assert_eq!(world.history.vms[0].dependencies.cells(), [0]);
    world.send(world.now, CpuId(3), Event::Order { vcpu: vcpu(0, 0) });
    world.run(25 * MILLISECOND);
    assert_eq!(world.running(CpuId(3)), Some((vcpu(0, 0), Mode::Entitled)));
    assert_eq!(world.history.vms[0].dependencies.cells(), [0, 1]);
}

#[test]
fn periodic_balancer_evens_loads_out_and_prefers_cells_that_the_vm_depends_on() {
    let mut world = World::new(
        Topology::regular(2, 1, 8),
        Tunables::default(),
        Costs::PAPER,
        0,
        9,
    );
    // Sixteen VMs of one vCPU on the first CPUs of cell 0; VM 9 depends on cell 1 already.
    for vm in 0..16 {
        world.add(Terms::default(), Program::Busy, &cpus(&[vm % 4]), 0);
    }
    for vm in [9, 13] {
        world.history.vms[vm]
            .dependencies
            .begin(1, policy::cpu::dependency::Use::Memory, 1);
    }
    world.run(3 * SECOND);
    let loads: Vec<usize> = world.drivers.iter().map(|driver| driver.queue().len()).collect();
    let cell_0: usize = loads[..8].iter().sum();
    assert!((8..=9).contains(&cell_0), "{loads:?}");
    assert!(loads.iter().all(|load| *load <= 2), "{loads:?}");
    let crossings: Vec<u16> = world
        .moves
        .iter()
        .filter(|one| one.to.0 >= 8)
        .map(|one| one.vcpu.vm.0)
        .collect();
    assert!(crossings.contains(&9) || crossings.contains(&13), "{crossings:?}");
    let moves = world.moves.len();
    world.run(6 * SECOND);
    assert_eq!(world.moves.len(), moves, "vCPUs move back and forth");
    assert_eq!(world.violation, None);
}

#[test]
fn same_seed_gives_the_same_run() {
    let story = |seed| {
        let mut world = mixed(seed);
        world.run(SECOND);
        (
            world.moves.clone(),
            world.messages,
            (0..8).map(|vm| world.ran_ns(VmId(vm))).collect::<Vec<_>>(),
        )
    };
    assert_eq!(story(3), story(3));
    assert_ne!(story(3), story(4));
}
