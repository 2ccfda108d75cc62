//! Two hosts with a cell each that lose sight of each other, or of etcd.

mod relays;

use knowledge::{Base, fact};
use registry::cluster::interface::{AdmitVm, CellRequest, VmShare};

use super::*;

const SEEDS: u64 = 200;

/// Two cells in their first lives.
fn two(seed: u64) -> World {
    let facts = include_str!("../../../knowledge/machines/two-sockets.facts");
    let base: Base = fact::parse(facts).unwrap().into_iter().collect();
    let cells = Cells::of(&base, None).unwrap().on_hosts(2);
    let mut world = World::new(cells, Chance::new(seed));
    world.run(SECOND).unwrap();
    assert_eq!(first_lives(&world), 2);
    world
}

fn first_lives(world: &World) -> usize {
    world.living().iter().filter(|cell| cell.life == 1).count()
}

fn cut(world: &mut World, both_ways: bool, time: Time) {
    world.inject(Fault::Cut(0, 1), time);
    if both_ways {
        world.inject(Fault::Cut(1, 0), time);
    }
}

#[test]
fn of_two_that_lose_sight_of_each_other_exactly_one_dies() {
    for seed in 0..SEEDS {
        let mut world = two(seed);
        cut(&mut world, seed % 2 == 0, SECOND);
        // A reply of etcd may be lost, and its time limit must pass.
        world.run(7 * SECOND / 2).unwrap();
        assert_eq!(first_lives(&world), 1, "seed {seed}");
        world.rest().unwrap();
    }
}

#[test]
fn a_short_silence_kills_nobody() {
    for seed in 0..SEEDS {
        let mut world = two(seed);
        cut(&mut world, seed % 2 == 0, 100 * MILLISECOND);
        world.rest().unwrap();
        assert_eq!(first_lives(&world), 2, "seed {seed}");
    }
}

#[test]
fn without_etcd_nobody_dies() {
    for seed in 0..SEEDS {
        let mut world = two(seed);
        world.inject(Fault::NoEtcd, 19 * SECOND);
        cut(&mut world, seed % 2 == 0, SECOND);
        world.run(19 * SECOND).unwrap();
        assert_eq!(first_lives(&world), 2, "seed {seed}");
        // Once it is there again, one of the two does.
        world.run(25 * SECOND).unwrap();
        assert_eq!(first_lives(&world), 1, "seed {seed}");
        world.rest().unwrap();
    }
}

#[test]
fn lost_keys_of_etcd_kill_nobody_and_no_life_is_given_twice() {
    for seed in 0..SEEDS {
        let mut world = two(seed);
        // One that has just entered may be unknown to the other still; then one of them starts anew.
        world.run(3 * SECOND).unwrap();
        world.inject(Fault::LostKeys, 0);
        world.run(5 * SECOND).unwrap();
        assert_eq!(first_lives(&world), 2, "seed {seed}");
        // Again and again, while each cell may be writing its entry back.
        for part in 0..20 {
            world.inject(Fault::LostKeys, 0);
            world.run((5000 + 37 * part) * MILLISECOND).unwrap();
        }
        world.run(15 * SECOND).unwrap();
        assert_eq!(first_lives(&world), 2, "seed {seed}");
        world.rest().unwrap();
    }
}

#[test]
fn of_two_that_lose_sight_of_each_other_and_etcds_keys_not_both_live_on_apart() {
    for seed in 0..SEEDS {
        let mut world = two(seed);
        cut(&mut world, seed % 2 == 0, SECOND);
        world.run(SECOND + seed * 3 * MILLISECOND).unwrap();
        world.inject(Fault::LostKeys, 0);
        world.run(9 * SECOND).unwrap();
        assert!(first_lives(&world) < 2, "seed {seed}");
        world.rest().unwrap();
    }
}

/// A VM of this name for one cell.
fn vm_for(cell: u16, name: &str) -> AdmitVm {
    AdmitVm {
        only: Some(cell),
        ..AdmitVm::new(
            name.to_owned(),
            VmShare {
                vcpus: 1,
                memory_bytes: 1 << 28,
                ..VmShare::default()
            },
        )
    }
}

#[test]
fn name_of_a_host_that_was_put_off_is_free_once_it_is_forgotten_and_never_runs_twice() {
    for seed in 0..SEEDS {
        let mut world = two(seed);
        world.ask_for_place(1, vm_for(1, "web"));
        world.run(2 * SECOND).unwrap();
        assert_eq!(world.counts.hosted, 1, "seed {seed}");
        // While its host runs, it is not forgotten.
        world.command(0, CellRequest::Forget { cells: vec![1] });
        world.run(3 * SECOND).unwrap();
        world.inject(Fault::Down(1), 20 * SECOND);
        world.run(10 * SECOND + seed * MILLISECOND).unwrap();
        world.ask_for_place(0, vm_for(0, "web"));
        world.run(12 * SECOND).unwrap();
        assert_eq!(world.counts.hosted, 1, "seed {seed}: the name is taken");
        world.command(0, CellRequest::Forget { cells: vec![1] });
        world.run(13 * SECOND).unwrap();
        world.ask_for_place(0, vm_for(0, "web"));
        world.run(14 * SECOND).unwrap();
        assert_eq!(world.counts.hosted, 2, "seed {seed}: the name is free");
        assert_eq!(world.counts.forgotten, 0, "seed {seed}");
        world.rest().unwrap();
    }
}
