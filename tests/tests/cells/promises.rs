//! Paged VMs on a host that is short of memory: they are trimmed in order of their weights, keep what they
//! were promised, and have their limits back.

use std::path::PathBuf;
use std::time::Duration;

use guest_tests::cluster::allowed_cpus;
use guest_tests::halting::{NUMBERED_BYTES, numbering_guest, numbering_guest_of};
use guest_tests::{Scratch, host, wait};
use serde_json::Value;

use super::{BY_COMMAND, Cells, as_pid};

const MIB: u64 = 1 << 20;
/// Time limit until guests have paged for a while, on an emulated host that other loads slow down.
const PAGING_LIMIT: Duration = Duration::from_secs(240);
/// The same for a host that has nothing left.
const SHORT_LIMIT: Duration = Duration::from_secs(900);
/// Part of memory by which a resident set exceeds its limit for a moment.
const SLACK_BYTES: u64 = 2 * MIB;
/// Memory of the largest host that the test with real pressure fills.
const HOST_BYTES_MAX: u64 = 6 << 30;

const LIGHT: &str = "light";
const HEAVY: &str = "heavy";
/// A paged VM that says nothing of a promise: it keeps all that it may have.
const WHOLE: &str = "whole";

/// Cells of a CPU each, which have memory of all nodes of the host, with VMs of this guest.
#[track_caller]
fn up(test: &str, cells: usize, memory: &str, tables: &str, guest: &[u8]) -> Cells {
    let nodes = host::nodes();
    let cpus = allowed_cpus().take(cells);
    let text: Vec<String> = cpus
        .map(|cpu| format!("[[cells]]\ncpus = \"{cpu}\"\nnodes = {nodes:?}\nmemory = \"{memory}\"\n"))
        .collect();
    assert_eq!(text.len(), cells, "each cell needs a CPU");
    let text = format!("{}{BY_COMMAND}{tables}", text.concat());
    Cells::up_of(Scratch::new(test), &text, guest)
}

/// Keys of a paged VM with a promise.
fn keys(memory_mib: u64, resident_mib: u64, promised_mib: u64, weight: u16) -> String {
    format!(
        "memory = \"{memory_mib}M\"\nresident = \"{resident_mib}M\"\nmemory_min = \"{promised_mib}M\"\n\
         memory_weight = {weight}\n"
    )
}

fn number(value: &Value, pointer: &str) -> u64 {
    let number = value.pointer(pointer).and_then(Value::as_u64);
    number.unwrap_or_else(|| panic!("no {pointer} in {value:#}"))
}

/// The limit that a VM's watch has ordered, in MiB, once the shard has it too.
fn limit_mib(cells: &Cells, name: &str) -> Option<u64> {
    let vm = cells.inspect(name)?;
    let status = &vm["status"];
    let ordered = status.pointer("/memory_promise/limit_bytes")?.as_u64()?;
    (status.pointer("/paging/limit_bytes")?.as_u64()? == ordered).then_some(ordered / MIB)
}

#[track_caller]
fn expect_limits(cells: &Cells, limits: &[(&str, u64)]) {
    for (name, limit) in limits {
        wait::until(&format!("a limit of {limit} MiB of {name}"), PAGING_LIMIT, || {
            (limit_mib(cells, name)? == *limit).then_some(())
        });
    }
}

/// Rounds of a guest that has never read a wrong number.
#[track_caller]
fn rounds(cells: &Cells, name: &str) -> usize {
    let logs = cells.call(["logs", name]).run().text();
    assert!(!logs.contains('B'), "{name} has read a wrong number: {logs}");
    logs.matches('r').count()
}

#[track_caller]
fn expect_rounds(cells: &Cells, names: &[&str]) {
    for name in names {
        let done = rounds(cells, name);
        wait::until(&format!("a round of {name}"), PAGING_LIMIT, || {
            (rounds(cells, name) > done).then_some(())
        });
    }
}

/// The kernel's file of the group that a VM's shard is in; none where the host has no control groups.
fn group_file(shard: u32, name: &str) -> Option<String> {
    if !host::has_controllers(&["cpu", "memory", "pids"]) {
        println!("NOT TESTED HERE: memory.min, since this host has no cgroup v2");
        return None;
    }
    let text = std::fs::read_to_string(format!("/proc/{shard}/cgroup")).expect("a process");
    let group = PathBuf::from(text.trim().replacen("0::", "/sys/fs/cgroup", 1));
    Some(std::fs::read_to_string(group.join(name)).expect("a file of the group"))
}

/// A low water that no host reaches stands for a shortage that lasts.
#[test]
fn vms_fall_to_their_promises_and_rise_again_under_the_next_process_that_serves_them() {
    let cells = up(
        "promises",
        2,
        "192M",
        "[pressure]\nlow_water = \"16T\"\n",
        &numbering_guest(),
    );
    let files = [
        cells.vm_file(LIGHT, &format!("cell = 1\n{}", keys(96, 80, 32, 100)), None),
        cells.vm_file(HEAVY, &format!("cell = 1\n{}", keys(96, 80, 48, 300)), None),
        cells.vm_file(WHOLE, "cell = 1\nmemory = \"96M\"\nresident = \"80M\"\n", None),
    ];
    // The cell counts 33, 49 and 96 MiB of 192, where the VMs have 288.
    let run = |file: &String| cells.call(["run", "-d", file]).ok();
    let told = run(&files[0]).errors();
    assert!(
        told.contains("32M of memory are promised, 145M are needed at worst"),
        "{told}"
    );
    run(&files[1]);
    assert!(!run(&files[2]).errors().contains("promised"));
    let file = cells.vm_file("more", &format!("cell = 1\n{}", keys(96, 80, 16, 100)), None);
    let refused = cells.call(["run", "-d", &file]).run().expect(1);
    let why = refused.errors();
    assert!(
        why.contains("no cell has 17 MiB for it") && why.contains("cell 1 has 14 MiB"),
        "{why}"
    );

    let trimmed = [(LIGHT, 32), (HEAVY, 48), (WHOLE, 80)];
    expect_limits(&cells, &trimmed);
    for (name, limit) in trimmed {
        wait::until(&format!("memory of {name} below its limit"), PAGING_LIMIT, || {
            let paging = cells.inspect(name)?["status"]["paging"].clone();
            let in_memory = number(&paging, "/resident_bytes") + number(&paging, "/second_chance_bytes");
            (in_memory <= limit * MIB + SLACK_BYTES).then_some(())
        });
    }
    expect_rounds(&cells, &[LIGHT, HEAVY, WHOLE]);
    for (name, promised) in [(LIGHT, 32), (HEAVY, 48)] {
        let vm = cells.inspect(name).expect("it runs");
        let promise = &vm["status"]["memory_promise"];
        assert_eq!(promise["is_trimmed"], true, "{promise}");
        assert_eq!(number(promise, "/promised_bytes"), promised * MIB);
        let shard = as_pid(&vm["shard_pid"]).expect("a shard");
        match group_file(shard, "memory.min") {
            Some(kept) => {
                assert_eq!(kept.trim(), (promised * MIB).to_string());
                assert_eq!(promise["kept_by"], "memory.min", "{promise}");
            }
            None => assert_eq!(promise["kept_by"], "best effort", "{promise}"),
        }
    }
    // The host's OOM killer takes the VM first to which least is promised.
    let score = |name: &str| {
        let vm = cells.inspect(name).expect("it runs");
        vm.pointer("/status/memory_promise/oom_score_adj")
            .and_then(Value::as_i64)
    };
    let [light, heavy, whole] = [LIGHT, HEAVY, WHOLE].map(score);
    assert!(
        light > heavy && heavy > whole && whole.is_some(),
        "{light:?} {heavy:?} {whole:?}"
    );

    // Neither the user's change nor the next process of the cell undoes a trim while the shortage lasts.
    cells.call(["update", LIGHT, "--resident", "64M"]).ok();
    let [_, process] = cells.processes(1);
    host::kill9(process);
    cells.wait_served(&[HEAVY, LIGHT, WHOLE]);
    expect_limits(&cells, &trimmed);
    assert_eq!(cells.inspect(LIGHT).expect("it runs")["spec"]["resident"], "64M");

    // Monitors serve the VMs now. They find a host with enough memory, and the former limits are restored.
    cells.call(["cluster", "down", "--leave"]).ok();
    expect_limits(&cells, &[(LIGHT, 64), (HEAVY, 80), (WHOLE, 80)]);
    expect_rounds(&cells, &[LIGHT, HEAVY, WHOLE]);
}

/// Processes that the kernel has killed since the host started, as it had no memory left.
fn killed_for_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").expect("/proc is mounted");
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count
        .and_then(|count| count.trim().parse().ok())
        .expect("Linux counts them since 4.13")
}

/// Takes memory from the host, as a program outside would, until it has `left_bytes` available.
fn take_memory(left_bytes: u64) -> Vec<Vec<u8>> {
    const PIECE_BYTES: u64 = 16 * MIB;
    let mut pieces = Vec::new();
    while host::available_bytes() > left_bytes + PIECE_BYTES {
        // Content, so that each page is the process's own.
        pieces.push(std::hint::black_box(vec![0x5a_u8; PIECE_BYTES as usize]));
    }
    pieces
}

/// Real pressure: VMs that want more than the host has beside a program that has taken most of it.
#[test]
#[ignore = "it takes all memory of its host; `make campaign NAME=cells` runs it"]
fn vms_that_want_more_than_the_host_has_share_it_by_weight_and_nothing_is_killed() {
    const NAMES: [&str; 3] = [LIGHT, "second", HEAVY];
    const PROMISED_MIB: u64 = 16;
    const LIMIT_MIB: u64 = 200;
    let total_bytes = host::total_bytes();
    if total_bytes > HOST_BYTES_MAX {
        return println!(
            "left out: the test takes all memory of its host, which has {} GiB",
            total_bytes >> 30
        );
    }
    // A lab host's own directories are in its memory, which paging is to relieve.
    let paging = Scratch::shared("real-pressure-paging");
    let guest = numbering_guest_of(3 * NUMBERED_BYTES);
    let cells = up(
        "real-pressure",
        1,
        "512M",
        "[pressure]\nlow_water = \"192M\"\n",
        &guest,
    );
    let killed = killed_for_memory();
    for name in NAMES {
        let weight = if name == HEAVY { 400 } else { 100 };
        let paging_file = format!("paging_file = {:?}\n", paging.join(name));
        let keys = keys(224, LIMIT_MIB, PROMISED_MIB, weight) + &paging_file;
        let file = cells.vm_file(name, &keys, None);
        cells.call(["run", "-d", &file]).ok();
    }
    let shard = |name: &str| as_pid(&cells.inspect(name).expect("it runs")["shard_pid"]);
    let shards = NAMES.map(shard);
    // 192 MiB of each guest are in use, or will be: 576 MiB in all.
    let in_memory: u64 = NAMES
        .iter()
        .map(|name| {
            let paging = cells.inspect(name).expect("it runs")["status"]["paging"].clone();
            number(&paging, "/resident_bytes") + number(&paging, "/second_chance_bytes")
        })
        .sum();
    // The VMs and this program have 560 MiB together; 150 MiB are below the low water.
    let ballast = take_memory((560 * MIB).saturating_sub(in_memory).max(150 * MIB));
    wait::until("limits by weight", SHORT_LIMIT, || {
        // The heavy one first: limits fall.
        let [heavy, light, second] = [HEAVY, LIGHT, "second"].map(|name| limit_mib(&cells, name));
        let (heavy, light, second) = (heavy?, light?, second?);
        for limit in [heavy, light, second] {
            assert!(
                (PROMISED_MIB..=LIMIT_MIB).contains(&limit),
                "{heavy} {light} {second}"
            );
        }
        (light < LIMIT_MIB && second < LIMIT_MIB && light < heavy && second < heavy).then_some(())
    });
    // All of them go on, if slowly.
    for name in NAMES {
        let faults = || {
            number(
                &cells.inspect(name).expect("it runs"),
                "/status/paging/faults/with_io",
            )
        };
        let before = faults();
        wait::until(&format!("pages read back of {name}"), SHORT_LIMIT, || {
            (faults() > before + 100).then_some(())
        });
    }
    assert_eq!(killed_for_memory(), killed, "the host's OOM killer was reached");
    assert_eq!(NAMES.map(shard), shards, "a VM has started again");

    drop(ballast);
    let limits = NAMES.map(|name| (name, LIMIT_MIB));
    expect_limits(&cells, &limits);
    for name in NAMES {
        rounds(&cells, name);
    }
    assert_eq!(NAMES.map(shard), shards, "a VM has started again");
    assert_eq!(killed_for_memory(), killed, "the host's OOM killer was reached");
}
