//! Limits of admitted users and of their VMs, held by control groups where the host has them.

use std::fs;

use guest_tests::{Setting, wait};
use serde_json::Value;

use super::host::{ALICE, BOB, Host, MALLORY, SOON, cpus, has_groups};

/// Promise SHARD-31.
#[test]
fn admitted_users_have_places_within_their_limits_under_names_of_their_own() {
    let host = Host::new("admitted");
    host.up();
    for uid in [ALICE, BOB, 0, MALLORY] {
        host.run(uid, "web", &[]).ok();
    }
    assert_eq!(host.placed(), ["61001:web", "61002:web", "web"]);
    let place = |uid| host.listed(uid, "web").expect("it runs")["host_place"].clone();
    let limits = if has_groups() { "group" } else { "best-effort" };
    assert_eq!(place(ALICE)["limits"], limits);
    assert_eq!(place(BOB)["limits"], limits);
    assert_eq!((place(MALLORY), place(0)), (Value::Null, Value::Null));

    // The view of each user.
    let status = host.user(ALICE, ["cluster", "status", "--json"]).ok().json();
    let names: Vec<&Value> = status["vms"]
        .as_array()
        .expect("an array")
        .iter()
        .map(|vm| &vm["name"])
        .collect();
    assert_eq!(names, ["web"], "{status}");
    assert_eq!(
        (&status["used"]["vcpus"], &status["most"]["vcpus"]),
        (&1.into(), &3.into()),
        "{status}"
    );
    let free: u64 = status["cells"]
        .as_array()
        .expect("an array")
        .iter()
        .map(|cell| cell["free_bytes"].as_u64().expect("bytes"))
        .sum();
    assert_eq!(free, (1024 - 3 * 64) << 20, "{status}");
    let sample = ["top", "--json", "--count", "1", "--interval", "0.1"];
    let sample = host.user(ALICE, sample).ok().json();
    assert_eq!(sample["vms"].as_array().map(Vec::len), Some(1), "{sample}");
    assert_eq!(sample["vms"][0]["host_cell"], place(ALICE)["cell"], "{sample}");
    let room = &sample["cells"][0];
    assert!(room["free_bytes"].is_u64() && room["vms"].is_null(), "{sample}");
    let text = host.root(["cluster", "status"]).ok().text();
    let words = if has_groups() {
        "held by control groups"
    } else {
        "best effort"
    };
    assert!(
        text.contains(&format!("user 61001: 1 of 3 vCPUs, 64M of 256M; limits: {words}")),
        "{text}"
    );

    // A user may not take more than the limits.
    for (name, more, why) in [
        ("web", &[][..], "a VM named web has a place"),
        ("wide", &["--cpus", "3"], "3 vCPUs, 2 more than your VMs have"),
        ("wide", &["--cell", "7"], "no cell 7"),
    ] {
        let output = host.run(ALICE, name, more).run().expect(1);
        assert!(output.errors().contains(why), "{output}");
    }
    for name in ["b", "c"] {
        host.run(ALICE, name, &["--cell", "1"]).ok();
        assert_eq!(
            host.listed(ALICE, name).expect("it runs")["host_place"]["cell"],
            1
        );
    }
    let output = host.run(ALICE, "d", &[]).run().expect(1);
    assert!(output.errors().contains("3 vCPUs"), "{output}");
    let output = host.run(MALLORY, "d", &["--cell", "0"]).run().expect(1);
    assert!(output.errors().contains("does not admit you"), "{output}");

    // Resources of an ended VM are the user's again.
    host.user(ALICE, ["kill", "b"]).ok();
    host.user(ALICE, ["kill", "c"]).ok();
    host.run(ALICE, "d", &["--cpus", "2"]).ok();
    host.wait_placed(&["61001:d", "61001:web", "61002:web", "web"]);
}

/// Promise SHARD-31.
#[test]
fn processes_of_a_users_vm_are_held_to_its_place_and_do_not_leave_it() {
    let host = Host::new("held");
    host.up();
    host.run(ALICE, "web", &["--cell", "1"]).ok();
    let vm = host.listed(ALICE, "web").expect("it runs");
    let pid = |key: &str| vm[key].as_u64().unwrap_or_else(|| panic!("{key} in {vm}")) as u32;
    let processes = [pid("monitor_pid"), pid("keeper_pid"), pid("shard_pid")];
    let status = |pid: u32| fs::read_to_string(format!("/proc/{pid}/status")).expect("running");
    let field = |status: &str, name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.expect("a field").trim().to_owned()
    };
    let cpu = cpus()[1].to_string();
    for pid in processes {
        let status = status(pid);
        assert!(field(&status, "Uid:").starts_with("61001"), "{status}");
    }
    // All threads of the shard, and root's process is not in the group.
    for pid in &processes[1..] {
        assert_eq!(field(&status(*pid), "Cpus_allowed_list:"), cpu);
    }
    if !has_groups() {
        return println!("best effort: no cgroup v2 here");
    }
    let group = |pid: u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("running");
        text.trim().replacen("0::", "/sys/fs/cgroup", 1)
    };
    let own = group(processes[0]);
    assert!(own.starts_with("/sys/fs/cgroup/mirrorball-users/61001/"), "{own}");
    for pid in processes {
        assert_eq!(group(pid), own);
    }
    let read = |name: &str| {
        fs::read_to_string(format!("{own}/{name}"))
            .expect("a limit")
            .trim()
            .to_owned()
    };
    assert_eq!(read("cpuset.cpus"), cpu);
    assert_eq!(read("memory.max"), ((64 + 256) << 20).to_string());
    let user = fs::read_to_string(format!("{own}/../cpu.max")).expect("a limit");
    assert_eq!(user.trim(), "300000 100000");
    // Alice moves no process out, not even her own.
    for target in [
        "/sys/fs/cgroup/cgroup.procs",
        "/sys/fs/cgroup/mirrorball-users/61001/cgroup.procs",
    ] {
        let script = format!("echo {} > {target}", processes[1]);
        let uid = ALICE.to_string();
        let moved = guest_tests::command::Call::new("setpriv")
            .args([
                "--reuid",
                &uid,
                "--regid",
                &uid,
                "--clear-groups",
                "sh",
                "-c",
                &script,
            ])
            .run();
        assert_ne!(moved.status, 0, "{moved}");
    }
    assert_eq!(group(processes[1]), own);
    host.user(ALICE, ["kill", "web"]).ok();
    wait::until("the end of the group", SOON, || {
        (!fs::exists(&own).expect("root looks")).then_some(())
    });
}

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
