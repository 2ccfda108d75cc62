//! Risk: Linux over two cells finds other CPUs, memory or time than one machine would have, or loses them at
//! work.

mod cpus;
mod machine;
mod pauses;
mod stops;

use std::time::Duration;

use guest_tests::command::Output;
use guest_tests::host::{self, Traces};
use guest_tests::{Cluster, Scratch, Vm, VmFile, repetitions};

/// Time limit of one program in the guest.
const LIMIT: Duration = Duration::from_secs(120);
const CPUS: usize = 4;
const MEMORY_MIB: u64 = 768;

fn two_cells(name: &str) -> VmFile {
    VmFile::new(name)
        .cpus(CPUS as u8)
        .memory(&format!("{MEMORY_MIB}M"))
        .span(&[0, 1])
}

/// Runs `guest-tool` with these words; returns its line.
#[track_caller]
fn tool(vm: &Vm, words: &[&str]) -> String {
    let said: Output = vm.tool(words).limit(LIMIT).ok();
    let line = said.text().trim().to_owned();
    println!("{} ({:.1} s)", line, said.took.as_secs_f32());
    line
}

#[test]
fn cells_are_nodes_and_their_memory_holds_across_them() {
    let scratch = Scratch::new("nodes");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let vm = two_cells("nodes").start(&scratch);
    assert_eq!(vm.shards().len(), 2, "a process for each cell");
    for number in [0, 1] {
        assert!(!cluster.vms(number).is_empty(), "cell {number} has nothing");
        assert_eq!(cluster.given_bytes(number), (MEMORY_MIB / 2) << 20);
    }
    machine::has_a_node_for_each_cell(&vm, &scratch);
    vm.add_tool();
    // 50 MiB of each, by every CPU's node.
    let said = tool(&vm, &["nodes", "50"]);
    assert!(
        said.contains("node0=50MiB") && said.contains("node1=50MiB"),
        "{said}"
    );
    vm.reboot();
    machine::has_a_node_for_each_cell(&vm, &scratch);
    let stopped = vm.stop();
    assert!(stopped.took < LIMIT, "{stopped}");
    vm.wait_ended(Duration::from_secs(10));
    for number in [0, 1] {
        assert_eq!(cluster.given_bytes(number), 0, "cell {number}");
        assert!(cluster.vms(number).is_empty(), "cell {number}");
    }
    drop(cluster);
    before.expect_unchanged("a VM over two cells");
}

#[test]
fn every_cpu_works_and_sees_the_same_time() {
    let scratch = Scratch::new("time");
    let _cluster = Cluster::up(&scratch);
    let vm = two_cells("time").start(&scratch);
    cpus::all_work(&vm);
    let hand_overs = repetitions(if host::in_lab() { 20_000 } else { 100_000 }).to_string();
    let said = tool(&vm, &["clock", "4", &hand_overs]);
    assert!(said.contains("pairs=12"), "not every pair of CPUs: {said}");
    assert!(said.ends_with("tsc_back=0 clock_back=0"), "{said}");
    let said = tool(&vm, &["ipi", "4", &repetitions(30).to_string()]);
    assert!(!said.contains("function_calls=0"), "{said}");
    tool(&vm, &["churn", "4", &repetitions(30).to_string()]);
    vm.expect_sound_clock();
    vm.stop();
}

#[test]
fn cpus_go_offline_and_come_back_and_get_nmis() {
    let scratch = Scratch::new("offline");
    let _cluster = Cluster::up(&scratch);
    let vm = two_cells("offline").start(&scratch);
    cpus::go_and_come(&vm, repetitions(20));
    cpus::all_work(&vm);
    for sender in 0..CPUS {
        cpus::get_nmis_from(&vm, sender);
    }
    cpus::get_nmis_of_the_host(&vm);
    vm.expect_sound_clock();
    vm.stop();
}
