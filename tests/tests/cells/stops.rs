//! Orders to single vCPUs of a VM over two cells, and KVM's statistics of them. The guest halts at once, so
//! its vCPUs wait outside the guest, where a signal does not wake them.

use guest_tests::{host, wait};
use serde_json::Value;

use super::{Cells, NAME, SOON, as_pid};

/// Stops of a vCPU in all shards: their number, and the time for which its threads were parked, nanoseconds.
#[track_caller]
fn stops(cells: &Cells, vcpu: usize) -> (u64, u64) {
    let vm = cells.inspect(NAME).expect("it runs");
    let of_vcpu = &vm["status"]["stops"][vcpu];
    let number = |key: &str| of_vcpu[key].as_u64();
    match (number("count"), number("stopped_ns")) {
        (Some(count), Some(stopped_ns)) => (count, stopped_ns),
        _ => panic!("no stops of vCPU {vcpu}: {vm:#}"),
    }
}

/// Stops a vCPU, and waits until its thread was parked. The number of its stops is `count` then.
#[track_caller]
fn expect_stop(cells: &Cells, vcpu: usize, count: u64) {
    let (number, (_, before)) = (vcpu.to_string(), stops(cells, vcpu));
    cells
        .call(["pause", NAME, "--vcpu", &number, "--for", "20ms"])
        .ok();
    wait::until(&format!("vCPU {vcpu} is parked"), SOON, || {
        let (known, stopped_ns) = stops(cells, vcpu);
        assert!(known <= count, "{known} stops of vCPU {vcpu}");
        (known == count && stopped_ns > before).then_some(())
    });
}

#[track_caller]
fn move_to(cells: &Cells, vcpu: &str, cell: &str) {
    cells.call(["move", NAME, "--vcpu", vcpu, "--cell", cell]).ok();
}

/// Checks the cells of both vCPUs, and that KVM's statistics are there.
#[track_caller]
fn expect_places(cells: &Cells, places: [u64; 2]) {
    let vm = cells.inspect(NAME).expect("it runs");
    let listed = cells.call(["cluster", "vcpus", "--json"]).ok().json();
    for all in [&vm["status"]["vcpus"], &listed] {
        let all: &Vec<Value> = all.as_array().expect("vCPUs");
        assert_eq!(all.len(), 2, "{all:?}");
        for (vcpu, (known, place)) in all.iter().zip(places).enumerate() {
            assert_eq!(
                (&known["vcpu"], &known["cell"]),
                (&vcpu.into(), &place.into()),
                "{known}"
            );
            let kvm = &known["kvm"];
            assert!(kvm["exits"].is_u64() && kvm["halts"].is_u64(), "{known}");
            assert!(kvm["halted_ms"].is_null(), "{known}");
        }
    }
}

#[test]
fn vcpu_is_stopped_where_it_is_after_moves_and_by_the_next_process_of_its_cell() {
    let cells = Cells::up("stops");
    let keys = "memory = \"128M\"\ncpus = 2\nspan = { cells = [0, 1] }\n";
    let run = cells.follow(&cells.vm_file(NAME, keys, None));
    expect_places(&cells, [0, 1]);
    for vcpu in 0..2 {
        expect_stop(&cells, vcpu, 1);
    }
    let refused = cells.call(["pause", NAME, "--vcpu", "2"]).run().expect(1);
    assert!(refused.errors().contains("the VM has no vCPU 2"), "{refused}");

    move_to(&cells, "1", "0");
    expect_places(&cells, [0, 0]);
    expect_stop(&cells, 1, 2);
    // A stopped vCPU moves when its stop is over.
    cells.call(["pause", NAME, "--vcpu", "1", "--for", "100ms"]).ok();
    move_to(&cells, "1", "1");
    expect_places(&cells, [0, 1]);
    expect_stop(&cells, 1, 4);

    let [_, cell] = cells.processes(0);
    host::kill9(cell);
    wait::until("the next process of the cell", SOON, || {
        let vm = cells.inspect(NAME)?;
        let serves = as_pid(&vm["monitor_pid"]).is_some_and(|pid| pid != cell);
        (serves && vm["status"]["stops"].is_array()).then_some(())
    });
    expect_stop(&cells, 1, 5);
    expect_stop(&cells, 0, 2);
    cells.call(["resume", NAME, "--vcpu", "1"]).ok();
    expect_places(&cells, [0, 1]);
    assert_eq!((stops(&cells, 0).0, stops(&cells, 1).0), (2, 5));
    cells.call(["kill", NAME]).ok();
    run.wait();
}
