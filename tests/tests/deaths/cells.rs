//! The death of a cell that a VM spans: its next process takes its part back, or the VM ends.

use std::time::Duration;

use guest_tests::host::{self, Traces};
use guest_tests::span::{cells_are_empty, foreground, two_cells};
use guest_tests::{Cluster, Scratch, Vm, wait};

/// Time limit until a cell's next process and the VM's monitor find each other.
const BACK_LIMIT: Duration = Duration::from_secs(20);
/// Longer than a VM waits for the next process of a cell that it spans.
const LOST_AFTER: Duration = Duration::from_secs(12);

#[test]
fn a_cells_next_process_takes_its_part_of_the_vm_back() {
    let scratch = Scratch::new("next");
    let cluster = Cluster::up(&scratch);
    let vm = two_cells("next").start(&scratch);
    let boot = vm.boot_id();
    let given = [0, 1].map(|cell| cluster.given_bytes(cell));
    // A part's cell, the home's, and both.
    for killed in [&[1][..], &[0], &[0, 1]] {
        let before: Vec<u32> = killed.iter().map(|cell| cluster.pid(*cell)).collect();
        before.iter().copied().for_each(host::kill9);
        wait::until("the cells start anew and have their parts", BACK_LIMIT, || {
            let cells = guest_tests::mirrorball(["cluster", "status", "--json"]).run();
            if cells.status != 0 {
                return None;
            }
            let cells = cells.json();
            let back = |cell: usize| {
                let now = &cells[cell];
                let parts = now["vms"].as_array().is_some_and(|vms| vms.len() == 1);
                parts && now["given_bytes"] == given[cell]
            };
            let anew = killed.iter().zip(&before).all(|(cell, pid)| {
                let now = &cells[*cell];
                Cluster::is_new(now) && now["pid"] != *pid
            });
            (anew && back(0) && back(1)).then_some(())
        });
    }
    std::thread::sleep(LOST_AFTER);
    assert_eq!(vm.boot_id(), boot);
    let places = vm.places();
    vm.move_vcpu(0, 1 - places[0]).ok();
    assert_eq!(vm.sh("nproc").trim(), "4");
    vm.stop();
    cells_are_empty(&cluster);
}

#[test]
fn a_vm_ends_with_a_cell_that_stays_dead() {
    let scratch = Scratch::new("stays");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let (mut terminal, vm) = foreground(&two_cells("stays"), &scratch);
    let shards = vm.shards();
    cluster.kill_for_good(1);
    let status = terminal.wait(LOST_AFTER + Duration::from_secs(20));
    let told = terminal.seen();
    assert_eq!(status, 73, "exit status; the terminal:\n{told}");
    assert!(told.contains("cell 1, which it spans, is lost"), "{told}");
    host::wait_gone(&shards, BACK_LIMIT);
    wait::until("the other cell has its memory back", BACK_LIMIT, || {
        (cluster.given_bytes(0) == 0).then_some(())
    });
    drop((terminal, vm, cluster));
    // The dead cell's own files are the next `cluster up`'s.
    let cluster = Cluster::up(&scratch);
    let again = two_cells("stays").start(&scratch);
    again.kill();
    cells_are_empty(&cluster);
    drop((again, cluster));
    before.expect_unchanged("a dead cell");
}

#[test]
fn a_vm_over_cells_that_are_left_runs_on_and_joins_again() {
    let scratch = Scratch::new("left");
    let cluster = Cluster::up(&scratch);
    let vm: Vm = two_cells("left").start(&scratch);
    let boot = vm.boot_id();
    drop(cluster);
    std::thread::sleep(LOST_AFTER);
    assert_eq!(vm.boot_id(), boot);
    let cluster = Cluster::up(&scratch);
    wait::until("both cells have their parts again", BACK_LIMIT, || {
        let has = |cell| cluster.given_bytes(cell) > 0;
        (has(0) && has(1)).then_some(())
    });
    vm.stop();
    cells_are_empty(&cluster);
}
