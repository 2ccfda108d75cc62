//! vCPUs that are pinned to CPUs of their cell, and move or start again.

use guest_tests::storm::{Extent, Storm};
use guest_tests::{Cluster, Scratch, mirrorball, wait};
use serde_json::Value;

use crate::{CPUS, LIMIT, STORM};

/// The CPUs of a cell.
#[track_caller]
fn cpus_of(cluster: &Cluster, cell: usize) -> Value {
    cluster.cell(cell)["cpus"].clone()
}

/// The cells' record of a vCPU; none while its VM starts.
fn known(cluster: &Cluster, storm: &Storm, vcpu: u64) -> Option<Value> {
    let all = cluster.vcpus(&storm.vm);
    all.into_iter().find(|known| known["vcpu"] == vcpu)
}

/// Waits until a vCPU is in this cell and may use only these CPUs.
#[track_caller]
fn expect_cpus(cluster: &Cluster, storm: &Storm, vcpu: u64, (cell, cpus): (u64, &Value)) {
    wait::until(&format!("vCPU {vcpu} on {cpus}"), LIMIT, || {
        let known = known(cluster, storm, vcpu)?;
        (known["cell"] == cell && known["cpus"] == *cpus).then_some(())
    });
}

#[test]
fn pinned_vcpu_keeps_to_cpus_of_its_cell_through_reboots_until_it_moves() {
    let scratch = Scratch::new("pinned");
    let cluster = Cluster::up(&scratch);
    let endless = Extent { epochs: 0, ..STORM };
    let storm = Storm::start(&scratch, "pinned", endless, &["--span", "0,1"]);
    let vm = storm.vm.name();
    let own = [cpus_of(&cluster, 0), cpus_of(&cluster, 1)];
    let last = own.each_ref().map(|cpus| {
        let last = cpus.as_array().and_then(|cpus| cpus.last()?.as_u64());
        last.expect("a cell's CPU")
    });
    let pin = |vcpu: usize, cpu: u64| mirrorball(["update", vm, "--pin", &format!("{vcpu}={cpu}")]);

    // CPUs of the cell that the vCPU is in, and no others.
    let refused = pin(1, last[1]).run().expect(1);
    let why = format!("vCPU 1 is in cell 0, which has no CPU {}; help: ", last[1]);
    assert!(refused.errors().contains(&why), "{refused}");
    let refused = pin(CPUS, last[0]).run().expect(1);
    assert!(refused.errors().contains(&format!("no vCPU {CPUS}")), "{refused}");
    pin(1, last[0]).ok();
    pin(2, last[1]).ok();
    expect_cpus(&cluster, &storm, 1, (0, &[last[0]].as_slice().into()));
    expect_cpus(&cluster, &storm, 2, (1, &[last[1]].as_slice().into()));
    let record = storm.vm.inspect();
    assert_eq!(record["pins"]["1"], Value::from(&[last[0]][..]), "{record:#}");
    assert_eq!(record["pin_cells"]["2"], 1, "{record:#}");

    // A move ends the pin, and reports it.
    let moved = storm.vm.move_vcpu(2, 0).ok().text();
    let said = format!("its pin to CPUs {} of the host is dropped", last[1]);
    assert!(moved.contains(&said), "{moved}");
    expect_cpus(&cluster, &storm, 2, (0, &own[0]));
    let record = storm.vm.inspect();
    assert!(record["pins"]["2"].is_null(), "{record:#}");
    assert_eq!(
        record["dropped_pins"]["2"],
        format!("CPUs {} of cell 1; vCPU 2 moved to cell 0", last[1])
    );
    // Pinned again, it starts elsewhere after a reset; vCPU 1 starts where it was.
    pin(2, last[0]).ok();
    assert!(storm.vm.inspect()["dropped_pins"].is_null());
    mirrorball(["reset", vm]).limit(LIMIT).ok();
    expect_cpus(&cluster, &storm, 1, (0, &[last[0]].as_slice().into()));
    expect_cpus(&cluster, &storm, 2, (1, &own[1]));
    let record = storm.vm.inspect();
    assert_eq!(
        (&record["pins"]["1"], &record["pins"]["2"]),
        (&Value::from(&[last[0]][..]), &Value::Null)
    );
    let why = &record["dropped_pins"]["2"];
    assert!(why.as_str().is_some_and(|why| why.contains("rebooted")), "{why}");
    mirrorball(["update", vm, "--pin", "1=all"]).ok();
    expect_cpus(&cluster, &storm, 1, (0, &own[0]));
    let (status, _) = storm.end(LIMIT);
    assert_ne!(status, 0, "it was killed");
}
