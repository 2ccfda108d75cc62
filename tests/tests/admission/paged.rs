//! Paged VMs of admitted users.

use std::fs;

use guest_tests::Setting;

use super::host::{ALICE, Host, has_groups};

/// Promise CELL-58.
#[test]
fn users_vm_takes_its_resident_memory_of_the_cell_and_nothing_else() {
    let host = Host::new("paged");
    // Users have a userfaultfd for faults of the kernel only where root has given it.
    let _userfaultfd = Setting::new("/proc/sys/vm/unprivileged_userfaultfd", "1");
    host.up();
    // Four times what the cluster file permits Alice.
    let start = |name: &str, more: &[&str]| host.run_with_memory(ALICE, name, "1G", more);
    let whole = start("whole", &["--resident", "64M"]).run();
    assert_ne!(whole.status, 0, "{whole}");
    assert_eq!(whole.errors().lines().count(), 1, "{whole}");
    assert!(whole.errors().contains("256M"), "{whole}");
    start("web", &["--resident", "64M", "--memory-min", "32M"]).ok();
    // The states of its pages take 10 MiB.
    const COUNTED: u64 = (64 + 10) << 20;
    let status = host.user(ALICE, ["cluster", "status", "--json"]).ok().json();
    assert_eq!(status["used"]["memory_bytes"], COUNTED, "{status}");
    if has_groups() {
        let pid = host.listed(ALICE, "web").expect("it runs")["shard_pid"].clone();
        let group = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("running");
        let group = group.trim().replacen("0::", "/sys/fs/cgroup", 1);
        let most = fs::read_to_string(format!("{group}/memory.max")).expect("a limit");
        assert_eq!(most.trim(), (COUNTED + (256 << 20)).to_string());
    } else {
        println!("best effort: no cgroup v2 here");
    }
    let update = |limit: &str| host.user(ALICE, ["update", "web", "--resident", limit]).run();
    let refused = update("65M");
    assert_ne!(refused.status, 0, "{refused}");
    assert!(
        refused.errors().contains("has memory for 64M, not for 65M"),
        "{refused}"
    );
    for limit in ["32M", "64M"] {
        assert_eq!(update(limit).status, 0);
    }
    host.user(ALICE, ["kill", "web"]).ok();
    host.wait_placed(&[]);
}
