//! Observations of a cell's VMs: their CPUs, their records, and the processes that serve them.

use guest_tests::{Cluster, Vm, mirrorball, wait};
use serde_json::Value;

use crate::BACK_LIMIT;

/// The CPUs that a thread of the process may use, for each of its threads.
pub fn allowed(pid: u32) -> Vec<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"))
        .expect("runs")
        .flatten();
    let status = threads.map(|thread| std::fs::read_to_string(thread.path().join("status")).expect("runs"));
    status
        .map(|text| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            line.expect("Linux says so").trim().to_owned()
        })
        .collect()
}

/// CPU seconds that a shard has used so far.
pub fn cpu_seconds(vm: &Vm) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", vm.shard())).expect("runs");
    let fields: Vec<&str> = stat
        .rsplit_once(") ")
        .expect("a name in parentheses")
        .1
        .split(' ')
        .collect();
    let ticks = |index: usize| fields[index].parse::<f64>().expect("a number");
    // Of user and system mode, in hundredths.
    (ticks(11) + ticks(12)) / 100.0
}

/// Waits until this process serves all of the VMs.
#[track_caller]
pub fn wait_until_served(vms: &[&Vm], by: u32) {
    wait::until(&format!("VMs served by process {by}"), BACK_LIMIT, || {
        let served = |vm: &&Vm| vm.listed().is_some_and(|record| record["monitor_pid"] == by);
        vms.iter().all(served).then_some(())
    });
}

/// Runs an operation that only the process that serves the VM can do.
#[track_caller]
pub fn expect_service(vm: &Vm) {
    mirrorball(["pause", vm.name()]).ok();
    assert_eq!(vm.listed().expect("listed")["paused"], true);
    mirrorball(["resume", vm.name()]).ok();
}

/// The record of a VM that may be starting just now.
pub fn record(name: &str) -> Option<Value> {
    let text = std::fs::read(Vm::folder_of(name).join("vm.json")).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Memory that cell 0 has lent cell 1, as both sides show it, MiB.
#[track_caller]
pub fn lent_mib(cluster: &Cluster) -> u64 {
    let cells = cluster.cells();
    let sum = |parts: &Value| -> u64 {
        let parts = parts.as_array().expect("an array").iter();
        parts.map(|part| part["bytes"].as_u64().expect("bytes")).sum()
    };
    let (lent, borrowed) = (sum(&cells[0]["lent"]), sum(&cells[1]["borrowed"]));
    assert_eq!(lent, borrowed);
    lent >> 20
}
