//! Moves of vCPUs between cells by decision, in stories by seed.

mod world;

use policy::cpu::cell_balancer::{CellBalancer, CellLoad, HOLD, PERIOD};

use self::world::{Death, HOME, Move, OUT, World};
use crate::{SECOND, Time};

/// Time in which loads that do not change have settled: holds of moved and refused cells, and some periods.
const SETTLED: Time = 6 * HOLD;

impl World {
    #[track_caller]
    fn check_consistent(&self, at: &str) {
        for (number, vcpu) in self.vcpus.iter().enumerate().filter(|(_, vcpu)| !vcpu.has_ended) {
            assert!(
                vcpu.thread == vcpu.record && vcpu.table == vcpu.record,
                "{at}: {number}: {vcpu:?}"
            );
            let failed = vcpu
                .record
                .is_some_and(|cell| self.cells[usize::from(cell)].has_failed);
            assert!(!failed, "{at}: {number} runs on a CPU of a failed cell");
        }
    }

    /// That no cell lends more than it has, and none could still move a vCPU.
    #[track_caller]
    fn check_even(&self, at: &str) {
        let all: Vec<CellLoad> = (0..)
            .zip(&self.cells)
            .filter(|(_, cell)| !cell.has_failed)
            .map(|(cell, _): (u16, _)| self.own(cell).load(cell))
            .collect();
        for load in &all {
            assert!(
                load.lent == 0 || load.busy + load.lent <= load.cpus,
                "{at}: {load:?}"
            );
            let others: Vec<CellLoad> = all
                .iter()
                .filter(|other| other.cell != load.cell)
                .copied()
                .collect();
            let own = self.own(load.cell);
            let chosen = CellBalancer::default().choose(&own, &others);
            assert!(
                load.busy <= load.cpus || chosen.is_err(),
                "{at}: {load:?}: {chosen:?}"
            );
        }
    }

    fn moves(&self) -> usize {
        self.vcpus.iter().map(|vcpu| vcpu.moves.len()).sum()
    }

    /// Two busy vCPUs in cell 0, and an idle cell 1, each with one CPU.
    fn two_cells() -> Self {
        let mut world = Self::new(&[1, 1], 1);
        world.add(0, true, &[1]);
        world.add(0, true, &[1]);
        world.add(1, false, &[]);
        world
    }
}

#[test]
fn vcpu_moves_to_an_idle_cell_and_returns_when_that_gets_busy() {
    let mut world = World::two_cells();
    world.run(3 * PERIOD);
    assert_eq!(world.busy(), [(0, 1), (1, 1)].into());
    world.run(SETTLED);
    assert_eq!(world.moves(), 1, "it stays there");
    // It goes home though the hold is not over; then cell 1 is not asked again.
    world.vcpus[2].is_busy = true;
    world.run(SETTLED + 4 * PERIOD);
    assert_eq!(world.busy(), [(0, 2), (1, 1)].into());
    world.run(2 * SETTLED);
    assert_eq!(world.moves(), 1);
    world.check_consistent("recalled");
    // Less load at home brings a vCPU back, too.
    world.vcpus[2].is_busy = false;
    world.run(2 * SETTLED + HOLD);
    assert_eq!(world.moves(), 2);
    let away = world
        .vcpus
        .iter()
        .position(|vcpu| vcpu.thread.is_some())
        .expect("one is away");
    world.vcpus[1 - away].is_busy = false;
    world.run(2 * SETTLED + 3 * HOLD);
    assert_eq!(world.busy(), [(0, 1)].into());
    world.check_consistent("returned");
}

#[test]
fn vcpu_moves_only_to_a_cell_on_which_its_vm_may_depend() {
    let mut world = World::new(&[1, 1, 1], 2);
    for allowed in [&[2][..], &[2], &[1], &[]] {
        world.add(0, true, allowed);
    }
    world.run(SETTLED);
    assert_eq!(world.busy(), [(0, 2), (1, 1), (2, 1)].into());
    let may = |vcpu: &world::VcpuState| vcpu.thread.is_none_or(|cell| vcpu.allowed.contains(&cell));
    assert!(world.vcpus.iter().all(may), "{:?}", world.vcpus);
}

#[test]
fn two_borrowers_of_one_cpu_get_it_once() {
    for seed in 0..100 {
        let mut world = World::new(&[1, 1, 1], seed);
        for home in [0, 0, 1, 1] {
            world.add(home, true, &[2]);
        }
        // The load that cell 2 reports is as old as its last evaluation.
        world.run(SETTLED);
        assert_eq!((world.moves(), world.busy()[&2]), (1, 1), "{seed}");
        world.check_even(&format!("{seed}"));
    }
}

#[test]
fn nothing_is_lost_whichever_side_dies_before_whichever_step() {
    let processes = [true, false].map(|is_lender| Death::Process { is_lender });
    for death in processes.into_iter().chain([Death::Lender]) {
        for step in OUT.into_iter().chain(HOME) {
            let at = format!("{death:?} before {step:?}");
            let mut world = World::two_cells();
            world.death = Some((step, death));
            world.run(SETTLED);
            if HOME.contains(&step) {
                world.vcpus[2].is_busy = true;
                world.run(2 * SETTLED);
            }
            assert_eq!(world.death, None, "{at}: it did not happen");
            world.run(world.now + SETTLED);
            world.check_consistent(&at);
            world.check_even(&at);
            let ended: Vec<usize> = (0..3).filter(|vcpu| world.vcpus[*vcpu].has_ended).collect();
            // The VM depends on the lender from the record to the end of the table's entry.
            let depends = !matches!(step, Move::Agree | Move::Record);
            match death {
                Death::Lender if depends => assert_eq!(ended.len(), 2, "{at}: {ended:?}"),
                Death::Lender => assert_eq!(ended, [2], "{at}"),
                Death::Process { .. } if HOME.contains(&step) => {
                    assert_eq!(world.busy(), [(0, 2), (1, 1)].into(), "{at}");
                }
                Death::Process { .. } => assert_eq!(world.busy(), [(0, 1), (1, 1)].into(), "{at}"),
            }
        }
    }
}

/// A world of two to four cells, and vCPUs that may use some of them.
fn random(seed: u64) -> World {
    let mut world = World::new(&[], seed);
    let count = 2 + world.chance.below(3);
    let cpus: Vec<u32> = (0..count).map(|_| 1 + world.chance.below(4) as u32).collect();
    let chance = world.chance.clone();
    world = World::new(&cpus, seed);
    world.chance = chance;
    for home in 0..count as u16 {
        for _ in 0..world.chance.below(7) {
            let mut allowed: Vec<u16> = (0..count as u16).filter(|cell| *cell != home).collect();
            let kept = world.chance.below(4);
            allowed.retain(|cell| kept == 0 || u64::from(*cell) % 3 != kept - 1);
            let is_busy = world.chance.once_in(2);
            world.add(home, is_busy, &allowed);
        }
    }
    world
}

#[test]
fn loads_become_even_and_nothing_moves_again_after_changes_and_deaths() {
    let mut moves = 0;
    for seed in 0..400 {
        let mut world = random(seed);
        world.deaths_once_in = Some(20);
        for _ in 0..20 {
            for vcpu in 0..world.vcpus.len() {
                if world.chance.once_in(4) {
                    world.vcpus[vcpu].is_busy ^= true;
                }
            }
            if world.chance.once_in(10) {
                let cell = world.chance.below(world.cells.len() as u64) as u16;
                world.kill(cell);
            }
            let pause = (1 + world.chance.below(15)) * SECOND;
            world.run(world.now + pause);
        }
        world.deaths_once_in = None;
        world.run(world.now + SETTLED);
        let at = format!("seed {seed}");
        world.check_consistent(&at);
        world.check_even(&at);
        let before = world.moves();
        world.run(world.now + SETTLED);
        assert_eq!(world.moves(), before, "{at}: vCPUs move though no load changes");
        moves += before;
        for vcpu in &world.vcpus {
            assert!(
                vcpu.moves.iter().all(|(_, cell)| vcpu.allowed.contains(cell)),
                "{at}"
            );
        }
    }
    assert!(moves > 1_000, "{moves} moves: the stories test nothing");
}

#[test]
fn vcpu_whose_load_alternates_moves_once_in_the_hold_unless_it_is_recalled() {
    for seed in 0..100 {
        let mut world = random(seed);
        for _ in 0..200 {
            for vcpu in 0..world.vcpus.len() {
                world.vcpus[vcpu].is_busy = world.chance.once_in(2);
            }
            world.run(world.now + 2 * SECOND);
        }
        for vcpu in &world.vcpus {
            for pair in vcpu.moves.windows(2) {
                let [first, second] = [pair[0].0, pair[1].0];
                let was_recalled = vcpu.recalled.iter().any(|at| (first..second).contains(at));
                assert!(was_recalled || second - first >= HOLD, "{seed}: {vcpu:?}");
            }
        }
    }
}
