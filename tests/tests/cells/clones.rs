//! Clones whose parent ends at the fault points of its freeze.

use guest_tests::fault_points::FaultPoints;
use guest_tests::host;

use super::{Cells, END_LIMIT, NAME, SMALL, SOON};

/// The names of the VMs that run.
#[track_caller]
fn running(cells: &Cells) -> Vec<String> {
    let listed = cells.call(["ps", "--json"]).ok().json();
    let vms = listed.as_array().expect("an array").iter();
    let names = vms.map(|vm| vm["name"].as_str().expect("a name").to_owned());
    names.collect()
}

#[test]
fn clone_is_refused_or_whole_when_its_parents_keeper_or_cell_dies() {
    let cells = Cells::up("clones");
    let file = cells.vm_file(NAME, &format!("{SMALL}cell = 1\n"), None);
    for point in ["freeze_begun", "freeze_served"] {
        for cell_fails in [false, true] {
            let run = cells.follow(&file);
            let (keeper, shard) = (cells.pid("keeper_pid"), cells.pid("shard_pid"));
            let [_, cell] = cells.processes(1);
            let points = FaultPoints::of(&[cell]);
            let held = points.hold(point);
            let clone = cells.call(["clone", NAME]).limit(2 * SOON).spawn();
            assert_eq!(held.reached(SOON), cell);
            if cell_fails {
                cells.call(["cluster", "fail", "1"]).ok();
            } else {
                host::kill9(keeper);
            }
            drop(held);
            let clone = clone.wait();
            run.wait().expect(73);
            host::wait_gone(&[keeper, shard], END_LIMIT);
            let left = match clone.status {
                0 => vec![clone.text().trim().to_owned()],
                _ => Vec::new(),
            };
            let reasons = ["ended before the VM was frozen", "cell 1"];
            let named = reasons.iter().any(|reason| clone.errors().contains(reason));
            assert!(clone.status == 0 || (clone.status == 1 && named), "{clone}");
            assert_eq!(running(&cells), left, "{clone}");
            for clone in left {
                cells.call(["kill", &clone]).ok();
            }
            // The breakpoints end with the process.
            if cell_fails {
                cells.call(["cluster", "down"]).ok();
                cells.up_again();
            } else {
                host::kill9(cell);
                cells.wait_served(&[]);
            }
            points.wait();
        }
    }
}
