//! Two VMs of two vCPUs over two cells of a CPU each, as in `make bench-gangs`: how often both vCPUs of a VM
//! run at the same time, and what their threads do meanwhile.

use super::costs::Costs;
use super::program::Program;
use super::sleepers::{WORK_NS, Wait};
use super::spanning::{Cells, Machine, Scheduler};
use crate::{SECOND, Time};

/// Time until both VMs have windows.
const WARM_UP_NS: Time = 3 * SECOND;
/// Time for which the figures are taken.
const MEASURED_NS: Time = 6 * SECOND;
/// Interval of samples of which vCPUs run. It divides no time of the schedule.
const SAMPLE_INTERVAL: Time = 97_000;

/// Figures of the VMs.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// Barriers that each VM passes in a second.
    pub rounds_per_s: [f64; 2],
    /// Share of the time in which both vCPUs of each VM run.
    pub both: [f64; 2],
    /// Share of the time in which one of them runs alone.
    pub single: [f64; 2],
}

/// Runs both VMs; `None` if a rule was broken. `lost_permille` of the orders that let a vCPU go on in its
/// window are not sent.
pub fn run(scheduler: Scheduler, wait: Wait, lost_permille: u64, seed: u64) -> Option<Pair> {
    let machine = Machine {
        cells: 2,
        cpus: 2,
        costs: Costs::PRESENT,
        lost_permille,
    };
    let mut cells = Cells::new(machine, scheduler, seed);
    let program = Program::Barrier {
        work_ns: WORK_NS,
        rounds: u64::MAX,
        halt_after_ns: (wait == Wait::Sleep).then_some(0),
    };
    for _ in 0..2 {
        cells.add_spanning(program);
    }
    cells.run(WARM_UP_NS);
    let before = [0, 1].map(|vm| cells.rounds(vm));
    let (mut both, mut single, mut samples) = ([0_u32; 2], [0_u32; 2], 0_u32);
    while cells.world.now < WARM_UP_NS + MEASURED_NS && cells.world.violation.is_none() {
        cells.run(cells.world.now + SAMPLE_INTERVAL);
        samples += 1;
        for vm in 0..2 {
            match cells.running(vm) {
                2 => both[vm] += 1,
                1 => single[vm] += 1,
                _ => {}
            }
        }
    }
    let share = |counts: [u32; 2]| counts.map(|count| f64::from(count) / f64::from(samples));
    let passed = [0, 1].map(|vm| cells.rounds(vm) - before[vm]);
    cells.world.violation.is_none().then(|| Pair {
        rounds_per_s: passed.map(|rounds| rounds as f64 * SECOND as f64 / MEASURED_NS as f64),
        both: share(both),
        single: share(single),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Barriers of both VMs in a second, and the share of the time in which one vCPU of a VM runs alone.
    fn figures(scheduler: Scheduler, wait: Wait, lost_permille: u64) -> (f64, f64) {
        let (mut rounds, mut single) = (0.0, 0.0);
        for seed in 1..=4 {
            let pair = run(scheduler, wait, lost_permille, seed).expect("all rules hold");
            rounds += pair.rounds_per_s.iter().sum::<f64>() / 4.0;
            single += pair.single.iter().sum::<f64>() / 8.0;
        }
        println!("{scheduler:?}, {wait:?}, {lost_permille} lost: {rounds:.0} rounds/s, {single:.3} alone");
        (rounds, single)
    }

    #[test]
    fn both_vcpus_of_spanning_vms_run_at_once_unless_orders_are_lost() {
        let (windows, alone) = figures(Scheduler::Windows, Wait::Spin, 0);
        assert!(alone < 0.01, "{alone}");
        // A VM alone passes 9,700 in a second.
        assert!(windows > 9_300.0, "{windows}");
        let (lossy, alone) = figures(Scheduler::Windows, Wait::Spin, 200);
        assert!(lossy < 0.75 * windows && alone > 0.05, "{lossy} {alone}");
        for rival in [Scheduler::CellGangs, Scheduler::RoundRobin] {
            let (rounds, _) = figures(rival, Wait::Spin, 0);
            assert!(windows > 1.3 * rounds, "{rival:?}: {rounds} beside {windows}");
        }
        figures(Scheduler::Windows, Wait::Sleep, 0);
        figures(Scheduler::RoundRobin, Wait::Sleep, 0);
    }
}
