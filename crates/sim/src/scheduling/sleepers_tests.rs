use policy::cpu::entitlement::Class;
use policy::cpu::entry::VcpuState;
use policy::cpu::topology::Topology;
use policy::cpu::tunables::Tunables;
use policy::cpu::view::Terms;
use policy::cpu::word::Mode;
use policy::cpu::{CpuId, VmId};

use super::costs::Costs;
use super::program::Program;
use super::sleepers::Scheduler::{self, Gangs, Linux, StrictGangs};
use super::sleepers::Wait::{self, Sleep, Spin};
use super::sleepers::run;
use super::world::World;
use crate::{MILLISECOND, SECOND, Time};

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

/// Interval of the samples of a [`Story`].
const SAMPLE_INTERVAL: Time = MILLISECOND;

/// A VM with a reservation and a small weight beside five others on four CPUs: two whose threads sleep at
/// barriers, two that compute, one that halts often and uses much time, and one that uses little.
struct Story {
    world: World,
    reserved: VmId,
    others: Vec<VmId>,
    /// Samples in which Linux runs a vCPU of the VM with the reservation, or of one whose threads sleep.
    ungated: [u32; 2],
    /// Samples in which a CPU runs a vCPU by its reservation, and those of them in which Linux runs another
    /// one there.
    by_reservation: [u32; 2],
}

impl Story {
    fn new(program: Program, seed: u64) -> Self {
        let cpus: Vec<CpuId> = (0..4).map(CpuId).collect();
        let topology = Topology::regular(1, 1, 4);
        let mut world = World::new(topology, Tunables::default(), Costs::PRESENT, 0, seed);
        let reserved = Terms {
            reservation_permille: 1_200,
            weight: 10,
            ..Terms::default()
        };
        let reserved = world.add(reserved, program, &cpus, 0);
        let bursts = |busy_ns, idle_ns| Program::Bursts { busy_ns, idle_ns };
        let idle_ns = 1 + world.below(2 * MILLISECOND);
        let programs = [
            barriers(Some(0)),
            Program::Busy,
            bursts(200_000, idle_ns),
            barriers(Some(0)),
            Program::Busy,
            bursts(20_000, 2 * MILLISECOND),
        ];
        let mut add = |program| world.add(Terms::default(), program, &cpus, 20 * MILLISECOND);
        let others = programs.map(&mut add).to_vec();
        Self {
            world,
            reserved,
            others,
            ungated: [0; 2],
            by_reservation: [0; 2],
        }
    }

    /// Runs to a time, and takes samples.
    fn run(&mut self, until: Time) {
        while self.world.now < until && self.world.violation.is_none() {
            self.world.run(self.world.now + SAMPLE_INTERVAL);
            let published = &self.world.history.now;
            let has_ungated = |vm: VmId| {
                let entries = published.entries[usize::from(vm.0)].iter();
                entries.into_iter().any(|entry| entry.state == VcpuState::Ungated)
            };
            self.ungated[0] += u32::from(has_ungated(self.reserved));
            self.ungated[1] += u32::from(has_ungated(self.others[0]) || has_ungated(self.others[3]));
            for (cpu, word) in (0..).map(CpuId).zip(&published.words) {
                if word.mode != Mode::Entitled || word.class != Class::Reserved {
                    continue;
                }
                let mut entries = published.entries.iter().flatten();
                let is_shared = entries.any(|one| one.cpu == cpu && one.state == VcpuState::Ungated);
                self.by_reservation[0] += 1;
                self.by_reservation[1] += u32::from(is_shared);
            }
        }
        assert_eq!(self.world.violation, None);
    }
}

#[test]
fn no_vcpu_starves_and_reservations_are_had_beside_vcpus_that_halt_often() {
    for seed in 0..4 {
        let mut story = Story::new(Program::Busy, seed);
        story.run(2 * SECOND);
        (story.ungated, story.by_reservation) = ([0; 2], [0; 2]);
        let ran = |story: &Story, vm| story.world.ran_ns(vm) / MILLISECOND;
        let before: Vec<Time> = story.others.iter().map(|vm| ran(&story, *vm)).collect();
        let mut former = ran(&story, story.reserved);
        for period in 1..=20 {
            story.run(2 * SECOND + period * 100 * MILLISECOND);
            let had = ran(&story, story.reserved) - former;
            assert!(had >= 115, "seed {seed}, period {period}: {had} ms of 120");
            former += had;
        }
        let others: Vec<Time> = story
            .others
            .iter()
            .zip(before)
            .map(|(vm, before)| ran(&story, *vm) - before)
            .collect();
        println!(
            "seed {seed}: {others:?} ms, {:?} ungated, {:?} by reservation",
            story.ungated, story.by_reservation
        );
        let [reserved, sleeping] = story.ungated;
        assert_eq!(
            reserved, 0,
            "seed {seed}: a VM with a reservation has left the order"
        );
        assert!(
            sleeping > 500,
            "seed {seed}: Linux had sleepers in {sleeping} ms of 2,000"
        );
        let [samples, shared] = story.by_reservation;
        assert!(samples > 1_000, "seed {seed}: {samples}");
        assert!(
            shared * 100 < samples,
            "seed {seed}: CPUs were shared during a reservation: {shared}"
        );
        // The first five want more than they have, and have equal weights.
        let most = others.iter().max().copied().unwrap_or(0);
        for (vm, ran) in others[..5].iter().enumerate() {
            assert!(
                6 * ran > most,
                "seed {seed}: VM {vm} ran for {ran} ms, another for {most} ms"
            );
        }
        let wait = story.world.longest_wait_ns();
        assert!(
            wait < 2 * SECOND,
            "seed {seed}: a vCPU waited for {} ms",
            wait / MILLISECOND
        );
    }
}

#[test]
fn vm_with_a_reservation_whose_threads_sleep_stays_in_the_order() {
    let mut story = Story::new(barriers(Some(0)), 1);
    story.run(2 * SECOND);
    assert_eq!(story.ungated[0], 0);
    assert!(story.ungated[1] > 0, "no other VM was left to Linux");
    let [samples, shared] = story.by_reservation;
    // A driver follows a change at its next event.
    assert!(samples > 1_000 && shared * 100 < samples, "{samples} {shared}");
    // It runs by its reservation most of the time, which puts none of those behind it that wake often.
    let wait = story.world.longest_wait_ns();
    assert!(wait < 500 * MILLISECOND, "{} ms", wait / MILLISECOND);
}
