//! Messages of drivers whose views differ: their number stays bounded.

use super::*;

/// Which rules of the order the VMs of a machine use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Rules {
    Reservations,
    Gangs,
    Both,
}

/// A machine of 2 to 8 CPUs with more vCPUs than these, by seed.
fn machine(rules: Rules, lag: u64, seed: u64) -> World {
    let count = 2 + (seed % 7) as u16;
    let topology = Topology::regular(1, 1, count);
    let mut world = World::new(topology, Tunables::default(), Costs::PRESENT, lag, seed);
    for vm in 0..2 + world.below(4) {
        let mut all: Vec<CpuId> = (0..count).map(CpuId).collect();
        let vcpus = 1 + world.below(u64::from(count));
        while all.len() as u64 > vcpus {
            let index = world.below(all.len() as u64) as usize;
            all.swap_remove(index);
        }
        let program = match vm % 3 {
            0 | 1 => Program::Busy,
            _ => Program::Bursts {
                busy_ns: 3 * MILLISECOND,
                idle_ns: 2 * MILLISECOND,
            },
        };
        let most = 300 * vcpus;
        let terms = Terms {
            is_gang: rules != Rules::Reservations,
            reservation_permille: match rules {
                Rules::Gangs => 0,
                _ if vm % 2 == 0 => 1 + world.below(most) as u32,
                _ => 0,
            },
            cap_permille: (world.below(4) == 0).then_some(1_000),
            ..Terms::default()
        };
        world.add(terms, program, &all, 20 * MILLISECOND);
    }
    world
}

/// The most messages of a tick for each pair of CPUs.
fn greatest(rules: Rules, lag: u64, seeds: std::ops::Range<u64>) -> f64 {
    let of = |seed| {
        let mut world = machine(rules, lag, seed);
        world.run(SECOND);
        assert_eq!(world.violation, None, "{rules:?}, lag {lag}, seed {seed}");
        let cpus = world.drivers.len() as u64;
        world.messages_of_a_tick as f64 / (cpus * (cpus - 1)) as f64
    };
    seeds.map(of).fold(0.0, f64::max)
}

#[test]
fn messages_of_drivers_are_bounded_however_stale_their_views_are() {
    for rules in [Rules::Reservations, Rules::Gangs, Rules::Both] {
        for lag in 0..=3 {
            let most = greatest(rules, lag, 0..60);
            println!("{rules:?}, lag {lag}: {most:.1} messages of a pair of CPUs in a tick");
            assert!(most < 16.0, "{rules:?}, lag {lag}: {most:.1}");
        }
    }
}

/// The scene in which 50 ms of virtual time did not end: a VM with a reservation beside heavy gangs.
#[test]
fn reservation_beside_gangs_is_had_without_a_storm_of_messages() {
    for lag in 0..=3 {
        let all = cpus(&[0, 1, 2, 3]);
        let mut world = World::new(
            Topology::regular(1, 1, 4),
            Tunables::default(),
            Costs::PAPER,
            lag,
            4,
        );
        let reserved = Terms {
            weight: 10,
            reservation_permille: 1_600,
            ..Terms::default()
        };
        let reserved = world.add(reserved, Program::Busy, &all, 0);
        let heavy = Terms {
            weight: 1_000,
            ..Terms::default()
        };
        for _ in 0..3 {
            world.add(heavy, Program::Busy, &all, 0);
        }
        world.run(SECOND);
        let before = world.ran_ns(reserved);
        world.run(3 * SECOND);
        assert_eq!(world.violation, None, "lag {lag}");
        let had = (world.ran_ns(reserved) - before) / MILLISECOND;
        println!("lag {lag}: {had} ms of 3,200, {} messages", world.messages);
        assert!(had >= 3_100, "lag {lag}: {had} ms of 3,200");
    }
}
