//! The real time that balancing takes, for each CPU and second.
//!
//! A simulated machine runs until its loads are published; then the product's code is called on it, for every
//! CPU, and timed.

use std::hint::black_box;
use std::time::Instant;

use policy::cpu::CpuId;
use policy::cpu::assignment::{Reserved, assign};
use policy::cpu::idle_balancer;
use policy::cpu::load_tree::{Branch, REGION_CPUS};
use policy::cpu::periodic_balancer::Pass;
use policy::cpu::set::CpuSet;
use policy::cpu::topology::Topology;
use policy::cpu::tunables::Tunables;
use policy::cpu::view::Terms;

use super::costs::Costs;
use super::program::Program;
use super::world::World;
use crate::{MILLISECOND, SECOND};

/// Costs of one machine, nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Number of CPUs of the machine.
    pub cpus: u16,
    /// A CPU's update of its nodes of the load tree.
    pub update_ns: f64,
    /// A pass over a region of eight CPUs.
    pub region_ns: f64,
    /// A pass over the machine.
    pub machine_ns: f64,
    /// A search by an idle CPU.
    pub search_ns: f64,
    /// All for one CPU in one second, if it is busy.
    pub busy_ns: f64,
    /// The same, if it is idle all the time.
    pub idle_ns: f64,
    /// The greatest number of levels that a CPU updates.
    pub levels_max: usize,
}

/// Measures a machine of cells of eight CPUs, three of four of which have two vCPUs or three.
pub fn measure(cpus: u16, rounds: u32) -> Cost {
    let tunables = Tunables::default();
    let cells = (cpus / 8).max(1);
    let topology = Topology::regular(cells, 1, cpus / cells);
    // Without moves, so that each round finds the same loads.
    let still = Tunables {
        region_balance_period_ns: 1_000 * SECOND,
        machine_balance_period_ns: 1_000 * SECOND,
        idle_delay_intra_node_ns: 1_000 * SECOND,
        idle_delay_inter_node_ns: 1_000 * SECOND,
        ..tunables
    };
    let mut world = World::new(topology.clone(), still, Costs::PAPER, 0, 1);
    let mut loads = vec![0; usize::from(cpus)];
    for vm in 0..cpus / 2 {
        let sets = vec![CpuSet::ALL; if vm % 4 == 3 { 1 } else { 4 }];
        if let Some(assigned) = assign(&topology, &loads, &sets, &Reserved::default()) {
            for cpu in &assigned {
                loads[cpu.index()] += 1;
            }
            world.add(Terms::default(), Program::Busy, &assigned, 0);
        }
    }
    world.run(200 * MILLISECOND);
    let view = world.history.lagging(0);
    let all = || (0..cpus).map(CpuId);
    let time = |runs: usize, act: &mut dyn FnMut()| {
        let best = (0..rounds).map(|_| {
            let begin = Instant::now();
            act();
            begin.elapsed().as_nanos()
        });
        best.min().unwrap_or(0) as f64 / runs as f64
    };
    let update_ns = time(usize::from(cpus), &mut || {
        for cpu in all() {
            let mut branch = Branch::default();
            black_box(branch.update(&view, cpu, 2, cpus));
        }
    });
    let mut pass = Pass::default();
    let regions = usize::from(cpus.div_ceil(REGION_CPUS));
    let region_ns = time(regions, &mut || {
        for cpu in all().step_by(usize::from(REGION_CPUS)) {
            pass.region(&view, &topology, cpu, &tunables);
            black_box(&pass.suggestions);
        }
    });
    let machine_ns = time(1, &mut || {
        pass.machine(&view, &topology, &tunables);
        black_box(&pass.suggestions);
    });
    let now = world.now;
    let search_ns = time(usize::from(cpus), &mut || {
        for cpu in all() {
            black_box(idle_balancer::search(
                &view,
                &topology,
                cpu,
                0,
                |_| false,
                now,
                &tunables,
            ));
        }
    });
    let times = |period_ns: u64| SECOND as f64 / period_ns as f64;
    let has_machine_pass = cpus > REGION_CPUS;
    let machine = if has_machine_pass {
        machine_ns / f64::from(cpus)
    } else {
        0.0
    };
    let busy_ns = times(tunables.tick_ns) * update_ns
        + times(tunables.region_balance_period_ns) * region_ns / f64::from(REGION_CPUS)
        + times(tunables.machine_balance_period_ns) * machine;
    let idle_ns = busy_ns + times(tunables.idle_delay_intra_node_ns) * search_ns;
    Cost {
        cpus,
        update_ns,
        region_ns,
        machine_ns: if has_machine_pass { machine_ns } else { 0.0 },
        search_ns,
        busy_ns,
        idle_ns,
        levels_max: policy::cpu::load_tree::levels(cpus),
    }
}
