//! VMs that span cells on the simulated machine.

use policy::cpu::windows::WindowState;

use super::program::Program;
use super::spanning::{CPUS, Cells, Machine, Scheduler, run};
use crate::{MILLISECOND, SECOND};

#[test]
fn spanning_vms_with_windows_take_turns_and_cell_gangs_and_round_robin_take_longer() {
    for cells in [2, 4] {
        let time = |vms, scheduler| run(vms, cells, scheduler, 7);
        let one = time(1, Scheduler::Windows).unwrap() as f64;
        for vms in [2, 4] {
            let windows = time(vms, Scheduler::Windows).unwrap() as f64;
            let ratio = windows / (one * f64::from(vms));
            assert!(
                ratio < 1.15,
                "{vms} VMs over {cells} cells: {ratio:.3} of their sum"
            );
            for rival in [Scheduler::CellGangs, Scheduler::RoundRobin] {
                let rival_time = time(vms, rival).map_or(f64::INFINITY, |time| time as f64);
                assert!(
                    rival_time > 1.3 * windows,
                    "{rival:?}, {vms} VMs: {:.3}",
                    rival_time / windows
                );
            }
        }
    }
}

#[test]
fn spanning_vms_and_vms_of_one_cell_have_fair_shares() {
    let mut machine = Cells::new(Machine::of(2), Scheduler::Windows, 3);
    machine.add_spanning(Program::Busy);
    machine.add_spanning(Program::Busy);
    let local = machine.add_local(1);
    // The arbiter knows all VMs by then.
    machine.run(3 * SECOND);
    let before = [machine.ran_ns(0), machine.ran_ns(1), machine.world.ran_ns(local)];
    machine.run(13 * SECOND);
    assert_eq!(machine.world.violation, None);
    let after = [machine.ran_ns(0), machine.ran_ns(1), machine.world.ran_ns(local)];
    let cpus = [CPUS, CPUS, CPUS / 2].map(f64::from);
    // A third of the CPUs of cell 1 each, and as much of those of cell 0 for the spanning ones.
    for ((before, after), cpus) in before.iter().zip(after).zip(cpus) {
        let share = (after - before) as f64 / (10.0 * SECOND as f64 * cpus);
        assert!((share - 1.0 / 3.0).abs() < 0.02, "{share:.3}");
    }
    let states = machine.states(0);
    assert_eq!(states.len(), 2);
    assert!(
        states.iter().all(|state| *state != WindowState::Absent),
        "{states:?}"
    );
}

#[test]
fn limit_of_a_spanning_vm_holds_in_each_cell_and_leaves_the_rest_to_another() {
    for has_rival in [false, true] {
        let mut machine = Cells::new(Machine::of(2), Scheduler::Windows, 3);
        machine.add_spanning(Program::Busy);
        if has_rival {
            machine.add_spanning(Program::Busy);
        }
        // Two of the eight CPUs: a quarter of the time in each cell.
        machine.limit(0, 2_000);
        machine.run(3 * SECOND);
        let parts = |machine: &Cells| machine.ran_ns_of_parts(0);
        let (before, other) = (parts(&machine), has_rival.then(|| machine.ran_ns(1)));
        machine.run(9 * SECOND);
        let whole = 6.0 * SECOND as f64 * f64::from(CPUS / 2);
        for (before, after) in before.iter().zip(parts(&machine)) {
            let share = (after - before) as f64 / whole;
            assert!((0.24..=0.25).contains(&share), "{share:.3}");
        }
        if let Some(other) = other {
            let share = (machine.ran_ns(1) - other) as f64 / (2.0 * whole);
            assert!(share > 0.74, "{share:.3}");
        }
        assert_eq!(machine.world.violation, None);
    }
}

#[test]
fn vcpu_that_is_idle_leaves_its_window_to_others() {
    let mut machine = Cells::new(Machine::of(2), Scheduler::Windows, 5);
    // The first vCPU of each part computes.
    machine.add_spanning(Program::Single);
    machine.add_spanning(Program::Busy);
    let local = machine.add_local(1);
    machine.run(3 * SECOND);
    let before = machine.world.ran_ns(local);
    machine.run(13 * SECOND);
    let share = (machine.world.ran_ns(local) - before) as f64 / (10.0 * SECOND as f64 * f64::from(CPUS / 2));
    // Three of four CPUs of the first VM's third are free.
    assert!(share > 0.5, "{share:.3}");
    assert!(machine.world.longest_wait_ns() < 500 * MILLISECOND);
}
