//! Two VMs of two vCPUs each, which spin, on a cell of two CPUs whose drivers run each VM's vCPUs together.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest_tests::cluster::allowed_cpus;
use guest_tests::halting::spinning_guest;
use guest_tests::{Scratch, host, wait};
use serde_json::Value;

use super::{Cells, SOON, as_pid};

/// Time over which CPU times are compared: 50 slices of each VM.
pub(super) const MEASURED: Duration = Duration::from_secs(3);
/// Number and interval of samples of the threads' states.
pub(super) const SAMPLES: u32 = 500;
pub(super) const SAMPLE_INTERVAL: Duration = Duration::from_millis(2);
/// Time after which all leases have run out, and a margin for a busy host.
pub(super) const LEASES: Duration = Duration::from_millis(300);

const VMS: [&str; 2] = ["one", "two"];

/// The directories of the threads of a VM's vCPUs in `/proc`; none if its cell does not list both.
#[track_caller]
pub(super) fn threads(cells: &Cells, name: &str) -> Option<[PathBuf; 2]> {
    let listed = cells.call(["cluster", "vcpus", "--json"]).ok().json();
    let all = listed.as_array()?.iter();
    let of_vm = all.filter(|vcpu| vcpu["vm"] == name);
    let thread = |vcpu: &Value| {
        let (pid, thread) = (&vcpu["shard_pid"], &vcpu["thread_id"]);
        PathBuf::from(format!("/proc/{pid}/task/{thread}"))
    };
    let threads: Vec<PathBuf> = of_vm.map(thread).collect();
    threads.try_into().ok()
}

/// Whether a thread runs or is ready.
pub(super) fn is_ready(thread: &Path) -> bool {
    let stat = fs::read_to_string(thread.join("stat")).expect("the VM runs");
    let (_, fields) = stat.rsplit_once(") ").expect("a name");
    fields.starts_with('R')
}

/// CPU time of a thread, milliseconds.
pub(super) fn ran_ms(thread: &Path) -> u64 {
    let times = fs::read_to_string(thread.join("schedstat")).expect("the VM runs");
    let ran_ns: u64 = times
        .split(' ')
        .next()
        .expect("a time")
        .parse()
        .expect("a number");
    ran_ns / 1_000_000
}

/// Samples in which both vCPUs of the first VM were ready, one of them, and none.
pub(super) fn sample(threads: &[PathBuf; 2]) -> [u32; 3] {
    let mut counts = [0; 3];
    for _ in 0..SAMPLES {
        let ready = threads.iter().filter(|thread| is_ready(thread)).count();
        counts[2 - ready] += 1;
        std::thread::sleep(SAMPLE_INTERVAL);
    }
    counts
}

/// Waits until the process of the cell, which is not `former`, serves both VMs and its drivers have them.
#[track_caller]
fn wait_for_gangs(cells: &Cells, former: u32) -> u32 {
    wait::until("VMs whose vCPUs are driven", SOON, || {
        let status = cells.call(["cluster", "status", "--json"]).run();
        let pid = (status.status == 0).then(|| as_pid(&status.json()[0]["pid"]))??;
        let served = |name: &&str| cells.inspect(name).is_some_and(|vm| vm["monitor_pid"] == pid);
        if pid == former || !VMS.iter().all(served) {
            return None;
        }
        // A vCPU stands still only by an order of a driver.
        let one = threads(cells, VMS[0])?;
        let stands = |_| {
            std::thread::sleep(SAMPLE_INTERVAL);
            !is_ready(&one[0])
        };
        (0..100).any(stands).then_some(pid)
    })
}

#[test]
fn spinning_vms_run_in_turns_with_all_their_vcpus_and_both_at_once_when_their_cell_dies() {
    let scratch = Scratch::new("gangs");
    let cpus: Vec<String> = allowed_cpus().take(2).map(|cpu| cpu.to_string()).collect();
    let cell = format!("[[cells]]\ncpus = \"{}\"\nmemory = \"256M\"\n", cpus.join(","));
    let text = format!("{cell}[scheduling]\ncpus = \"gangs\"\n");
    let cells = Cells::up_of(scratch, &text, &spinning_guest());
    for name in VMS {
        let file = cells.vm_file(name, "memory = \"64M\"\ncpus = 2\n", None);
        cells.call(["run", "-d", &file]).ok();
    }
    let cell = wait_for_gangs(&cells, 0);
    let all = VMS.map(|name| threads(&cells, name).expect("its vCPUs"));

    // Both have the same part of the CPUs.
    let ran = || {
        all.each_ref()
            .map(|vm| vm.iter().map(|thread| ran_ms(thread)).sum::<u64>())
    };
    let (before, begun) = (ran(), Instant::now());
    std::thread::sleep(MEASURED);
    let (after, ms) = (ran(), begun.elapsed().as_millis());
    let [one, two] = [after[0] - before[0], after[1] - before[1]];
    // Other programs may use the CPUs, too.
    assert!(one.min(two) > 100, "{one} and {two} ms of {ms}");
    assert!(one.max(two) < 2 * one.min(two), "{one} and {two} ms of {ms}");

    // The vCPUs of a VM run and stand still together.
    let counts = sample(&all[0]);
    let [both, single, none] = counts;
    assert!(single * 2 < SAMPLES, "{counts:?}");
    assert!(both * 8 > SAMPLES && none * 8 > SAMPLES, "{counts:?}");

    // `top` shows the queues.
    wait::until("the queues of both CPUs", SOON, || {
        let options = ["top", "--json", "--count", "1", "--interval", "0.1"];
        let sample = cells.call(options).ok().json();
        let shown = sample["cpus"].as_array().expect("an array");
        let is_whole = |cpu: &String| {
            let number: u64 = cpu.parse().expect("a number");
            let queue = shown.iter().find(|shown| shown["cpu"] == number);
            let queue = &queue.expect("its CPU")["queue"];
            VMS.iter().any(|vm| queue["gang"] == *vm) && queue["waiting"] == 1 && queue["load_milli"] == 2000
        };
        cpus.iter().all(is_whole).then_some(())
    });

    // A pin that would have both on one CPU is refused; one that suits the gang is kept.
    let pin = |vcpu: &str, cpu: &str| cells.call(["update", "one", "--pin", &format!("{vcpu}={cpu}")]);
    pin("0", &cpus[1]).ok();
    let refused = pin("1", &cpus[1]).run().expect(1);
    assert!(refused.errors().contains("no two of a VM share one"), "{refused}");
    wait::until("a vCPU on the CPU of its pin", SOON, || {
        let listed = cells.call(["cluster", "vcpus", "--json"]).ok().json();
        let vcpus = listed.as_array().expect("an array").iter();
        let cpus_of: Vec<&Value> = vcpus
            .filter(|vcpu| vcpu["vm"] == "one")
            .map(|vcpu| &vcpu["cpus"])
            .collect();
        let expected: Vec<Value> = [1, 0]
            .iter()
            .map(|index| serde_json::json!([cpus[*index].parse::<u64>().expect("a number")]))
            .collect();
        (cpus_of == expected.iter().collect::<Vec<_>>()).then_some(())
    });

    // Without a cell the leases run out, and Linux runs all.
    let guard = host::parent(cell);
    host::stop(guard);
    host::kill9(cell);
    std::thread::sleep(LEASES);
    for _ in 0..50 {
        let ready = all.as_flattened().iter().all(|thread| is_ready(thread));
        assert!(ready, "a vCPU stands still without a cell");
        std::thread::sleep(SAMPLE_INTERVAL);
    }
    host::go_on(guard);
    wait_for_gangs(&cells, cell);
    let [_, single, _] = sample(&all[0]);
    assert!(single * 2 < SAMPLES, "{single} after the cell's death");
}
