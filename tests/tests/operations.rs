//! Risk: a command acts on other VMs than it names, or a cell takes VMs that it was told not to take.

use std::time::Duration;

use guest_tests::host::Traces;
use guest_tests::{Cluster, Scratch, VmFile, mirrorball};

/// How long a VM may take to be gone after a command that ends it.
const END_LIMIT: Duration = Duration::from_secs(20);

#[test]
fn cordoned_cell_takes_no_vm_and_keeps_those_that_run() {
    let scratch = Scratch::new("cordon");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let file = |name: &str| VmFile::new(name).key("cell", "1");
    let kept = file("cordon-kept").start(&scratch);
    mirrorball(["cluster", "cordon", "1"]).ok();
    let shown = mirrorball(["cluster", "status"]).ok().text();
    assert!(shown.lines().any(|line| line.contains(" cordoned ")), "{shown}");
    let new = mirrorball(["run", "-d"])
        .args([file("cordon-new").write(&scratch)])
        .run()
        .expect(1);
    assert!(
        new.errors().contains("cell 1 is cordoned") && new.errors().contains("mirrorball cluster uncordon 1"),
        "{new}"
    );
    // A clone of one that runs there is a new VM there, too: its file names the cell.
    let clone = mirrorball(["clone", kept.name()]).run().expect(1);
    assert!(clone.errors().contains("cell 1 is cordoned"), "{clone}");
    let span = VmFile::new("cordon-span").cpus(2).memory("256M").span(&[0, 1]);
    let span = mirrorball(["run", "-d"])
        .args([span.write(&scratch)])
        .run()
        .expect(1);
    assert!(span.errors().contains("cell 1 is cordoned"), "{span}");
    // Cell 0 has more vCPUs than cell 1 by the second of these.
    let others = ["cordon-a", "cordon-b"].map(|name| VmFile::new(name).start_only(&scratch));
    assert_eq!(cluster.vms(0), others.each_ref().map(|vm| vm.name()));
    mirrorball(["cluster", "lend", "128M", "--from", "1", "--to", "0"]).ok();

    let process = cluster.pid(1);
    guest_tests::host::kill9(process);
    cluster.pid_after(1, process);
    assert_eq!(cluster.cell(1)["cordoned"], true);
    assert_eq!(cluster.vms(1), [kept.name()]);
    kept.sh("echo still here");
    let still = mirrorball(["run", "-d"])
        .args([file("cordon-new").write(&scratch)])
        .run()
        .expect(1);
    assert!(still.errors().contains("cell 1 is cordoned"), "{still}");
    mirrorball(["cluster", "uncordon", "1"]).ok();
    let taken = file("cordon-new").start_only(&scratch);
    assert_eq!(taken.listed().expect("listed")["cell"], 1);
    for vm in others.iter().chain([&kept, &taken]) {
        vm.kill();
        vm.wait_ended(END_LIMIT);
    }
    mirrorball(["cluster", "down"]).ok();
    drop((others, kept, taken, cluster));
    before.expect_unchanged("a cordon");
}
