//! Risk: a command acts on other VMs than it names, or a cell takes VMs that it was told not to take.

use std::time::Duration;

use guest_tests::host::Traces;
use guest_tests::{Cluster, Scratch, Vm, VmFile, mirrorball};

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

#[test]
fn labels_select_the_vms_that_a_command_acts_on() {
    let scratch = Scratch::new("labels");
    let mine = format!("run-{}", std::process::id());
    let file = |name: &str, tier: &str| {
        let labels = format!("{{ \"example.com/of\" = \"{mine}\", tier = \"{tier}\" }}");
        VmFile::new(name).key("labels", &labels)
    };
    let a = file("labels-a", "1").start(&scratch);
    let b = file("labels-b", "1").start_only(&scratch);
    let other = file("labels-c", "2").start_only(&scratch);
    let of_mine = format!("example.com/of={mine}");
    let listed = |words: &[&str]| -> Vec<String> {
        let records = mirrorball(["ps", "--json"]).args(words).ok().json();
        let records = records.as_array().expect("an array").iter();
        records
            .map(|record| record["name"].as_str().expect("a name").to_owned())
            .collect()
    };
    assert_eq!(listed(&["--label", &of_mine]), [a.name(), b.name(), other.name()]);
    assert_eq!(
        listed(&["--label", &of_mine, "--label", "tier=2"]),
        [other.name()]
    );
    assert_eq!(listed(&["--label", &of_mine, "--label", "tier"]).len(), 3);
    // A clone has its parent's labels.
    mirrorball(["clone", a.name(), "--name", "t-labels-copy"]).ok();
    let copy = Vm::named("t-labels-copy");
    let inspected = mirrorball(["inspect", copy.name()]).ok().json();
    assert_eq!(inspected["spec"]["labels"]["example.com/of"], mine.as_str());

    let first = ["--label", &of_mine[..], "--label", "tier=1"];
    let paused = mirrorball(["pause"]).args(first).ok().text();
    let lines: Vec<&str> = paused.lines().collect();
    assert_eq!(lines.len(), 3, "{paused}");
    for vm in [&a, &b, &copy] {
        assert!(lines.contains(&&format!("{}: paused", vm.name())[..]), "{paused}");
        assert_eq!(vm.listed().expect("listed")["paused"], true);
    }
    assert_eq!(other.listed().expect("listed")["paused"], false);
    mirrorball(["resume"]).args(first).ok();
    mirrorball(["wait", "--for", "running", "--limit", "60"])
        .args(first)
        .ok();
    let late = mirrorball(["wait", "--limit", "1"]).args(first).run().expect(124);
    assert_eq!(late.errors().lines().count(), 3, "{late}");
    mirrorball(["kill"]).args(first).ok();
    assert_eq!(listed(&["--label", &of_mine]), [other.name()]);
    let none = mirrorball(["kill"]).args(first).run().expect(1);
    assert!(none.errors().contains("no running VM has the label"), "{none}");
    let both = mirrorball(["kill", other.name(), "--label", "tier"])
        .run()
        .expect(2);
    assert!(both.errors().contains("cannot be used with"), "{both}");
    other.kill();
    for vm in [a, b, copy, other] {
        vm.wait_ended(END_LIMIT);
    }
}
