//! Gangs beside other schedulers: VMs of eight vCPUs with a barrier-heavy program on 32 CPUs (Cellular Disco,
//! section 4.4, which ran raytrace with eight processes).

use policy::cpu::CpuId;
use policy::cpu::assignment::{Reserved, assign};
use policy::cpu::set::CpuSet;
use policy::cpu::topology::Topology;
use policy::cpu::tunables::{HALT_HYSTERESIS, Tunables};
use policy::cpu::view::Terms;

use super::costs::Costs;
use super::program::Program;
use super::world::World;
use crate::{MILLISECOND, SECOND, Time};

/// How CPUs choose what they run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scheduler {
    /// Gangs: the drivers of the product.
    Gang,
    /// The same drivers without gangs: vCPUs of a VM never share a CPU, and each CPU takes the first of its
    /// vCPUs by the VM's virtual time.
    Balance,
    /// Each CPU alternates between its vCPUs and looks at no other CPU.
    RoundRobin,
}

/// How vCPUs wait at a barrier.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Wait {
    /// vCPUs spin until all have come.
    Spin,
    /// vCPUs spin for 50 us and then halt, as with paravirtual spinlocks.
    SpinThenHalt,
}

/// CPUs of the machine, in four nodes of one cell.
pub const CPUS: u16 = 32;
/// vCPUs of each VM.
pub const VCPUS: usize = 8;
/// Work between two barriers.
pub const WORK_NS: Time = 500_000;

/// Result of a run.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Mean time until a VM's program ended.
    pub mean_ns: Time,
    /// Time until the last one ended.
    pub last_ns: Time,
    /// Moves of vCPUs.
    pub moves: usize,
    /// Messages between drivers.
    pub messages: u64,
    /// Switches of CPUs from one vCPU to another.
    pub switches: u64,
}

/// Runs `vms` VMs until each has done `work_ns` of work on each vCPU; `None` if they have not within 60 times
/// that, or a rule was broken.
pub fn run(vms: u16, scheduler: Scheduler, wait: Wait, work_ns: Time, seed: u64) -> Option<Run> {
    let topology = Topology::regular(1, 4, CPUS / 4);
    let tunables = Tunables {
        // The simulated driver notices a halt at once, and keeps the CPU for the hysteresis alone.
        halts_high_per_s: SECOND / (4 * HALT_HYSTERESIS),
        ..Tunables::default()
    };
    let mut world = World::new(topology.clone(), tunables, Costs::PAPER, 0, seed);
    if scheduler == Scheduler::RoundRobin {
        world = world.with_round_robin();
    }
    let terms = Terms {
        is_gang: scheduler == Scheduler::Gang,
        ..Terms::default()
    };
    let program = Program::Barrier {
        work_ns: WORK_NS,
        rounds: work_ns / WORK_NS,
        halt_after_ns: (wait == Wait::SpinThenHalt).then_some(50_000),
    };
    let mut loads = [0; CPUS as usize];
    for _ in 0..vms {
        let cpus: Vec<CpuId> = assign(&topology, &loads, &[CpuSet::ALL; VCPUS], &Reserved::default())?;
        for cpu in &cpus {
            loads[cpu.index()] += 1;
        }
        // vCPUs of a running host start at any time of each other's slices.
        world.add(terms, program, &cpus, 30 * MILLISECOND);
    }
    world.run(60 * work_ns.max(SECOND));
    if world.violation.is_some() {
        return None;
    }
    let ends: Option<Vec<Time>> = world.vms.iter().map(|vm| vm.ended_at).collect();
    let ends = ends?;
    Some(Run {
        mean_ns: ends.iter().sum::<Time>() / ends.len().max(1) as Time,
        last_ns: ends.iter().copied().max().unwrap_or(0),
        moves: world.moves.len(),
        messages: world.messages,
        switches: world
            .drivers
            .iter()
            .map(|driver| driver.counters().switches)
            .sum(),
    })
}
