//! Threads that sleep beside threads that spin: two or three VMs of two vCPUs on two CPUs, as in
//! `make bench-gangs`, by the drivers and by an ideal Linux.

use policy::cpu::CpuId;
use policy::cpu::topology::Topology;
use policy::cpu::tunables::Tunables;
use policy::cpu::view::Terms;

use super::costs::Costs;
use super::program::Program;
use super::world::World;
use crate::{MILLISECOND, SECOND, Time};

/// How CPUs choose what they run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scheduler {
    /// Linux, with all vCPUs on both CPUs.
    Linux,
    /// The drivers, of which vCPUs that halt often leave their gangs.
    Gangs,
    /// The drivers without that rule.
    StrictGangs,
}

/// How the two threads of a VM wait for each other at barriers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Wait {
    /// They spin.
    Spin,
    /// They sleep.
    Sleep,
}

/// Work of a thread between two barriers, as in `make bench-gangs`.
pub const WORK_NS: Time = 100_000;
/// Time before the barriers are counted, and for which they are.
const WARM_UP_NS: Time = SECOND;
const MEASURED_NS: Time = 4 * SECOND;
/// CPUs of the machine.
const CPUS: u16 = 2;

/// Barriers that each VM passes in a second; `None` if a rule was broken.
pub fn run(waits: &[Wait], scheduler: Scheduler, seed: u64) -> Option<Vec<f64>> {
    let tunables = Tunables {
        halts_high_per_s: match scheduler {
            Scheduler::StrictGangs => u64::MAX,
            Scheduler::Linux | Scheduler::Gangs => Tunables::default().halts_high_per_s,
        },
        ..Tunables::default()
    };
    let mut world = World::new(Topology::regular(1, 1, CPUS), tunables, Costs::PRESENT, 0, seed);
    if scheduler == Scheduler::Linux {
        world = world.with_linux();
    }
    let cpus: Vec<CpuId> = (0..CPUS).map(CpuId).collect();
    let vms: Vec<_> = waits
        .iter()
        .map(|wait| {
            let program = Program::Barrier {
                work_ns: WORK_NS,
                rounds: u64::MAX,
                halt_after_ns: (*wait == Wait::Sleep).then_some(0),
            };
            world.add(Terms::default(), program, &cpus, 30 * MILLISECOND)
        })
        .collect();
    world.run(WARM_UP_NS);
    let before: Vec<u64> = vms.iter().map(|vm| world.rounds(*vm)).collect();
    world.run(WARM_UP_NS + MEASURED_NS);
    let passed = vms
        .iter()
        .zip(before)
        .map(|(vm, before)| world.rounds(*vm) - before);
    let per_s = passed.map(|rounds| rounds as f64 * SECOND as f64 / MEASURED_NS as f64);
    world.violation.is_none().then(|| per_s.collect())
}
