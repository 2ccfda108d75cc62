//! Risk: shards that each have a copy of the memory see different ones, or one that is gone leaves the others
//! waiting.
//!
//! The guests are the counting kernel of `moves`, whose CPUs share memory with each other, and Linux.

use std::time::Duration;

use guest_tests::host::{self, Traces};
use guest_tests::span::{Moves, cells_are_empty};
use guest_tests::storm::{Extent, Storm};
use guest_tests::{Cluster, Scratch, Vm, VmFile, mirrorball, repetitions, wait};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
/// Time limit of a start: a machine that other loads slow down takes three times as long as an idle one.
const LIMIT: Duration = Duration::from_secs(400);
/// Time limit of a command in a guest whose pages take milliseconds to arrive.
const CALL: Duration = Duration::from_secs(240);
/// A little more than the tool's own limit: its threads meet at every batch, and four CPUs are emulated on
/// few.
const LITMUS: Duration = Duration::from_secs(500);
const COHERENT: [&str; 4] = ["--span", "0,1", "--span-memory", "coherent"];
const SWAP_BYTES: u64 = 32 << 20;
/// A small storm: with emulation a page takes milliseconds to arrive.
const SMALL: Extent = Extent {
    cpus: 2,
    epochs: 1,
    sweeps: 4,
};

#[test]
fn copies_of_the_memory_are_one_memory() {
    let scratch = Scratch::new("coherent");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let storm = Storm::start(&scratch, "coherent", SMALL, &COHERENT);
    let counted = storm.vm.inspect();
    let told = &counted["status"]["span"]["coherence"];
    let shards = told["shards"].as_array().expect("a list of shards");
    assert_eq!(shards.len(), 2, "{told:#}");
    for shard in shards {
        let waits = ["read", "write", "upgrade"].map(|kind| shard["faults"][kind]["count"].as_u64());
        assert!(
            waits.iter().flatten().sum::<u64>() > 0,
            "no thread waited: {told:#}"
        );
        assert!(shard["pages"].as_u64() > Some(0), "no page was sent: {told:#}");
    }
    assert!(!told["heat"].as_array().expect("pages").is_empty(), "{told:#}");
    let counts = storm.counts(LIMIT);
    println!("{}", counts.line());
    counts.expect_nothing_wrong();
    assert_eq!(counts.of("restarts"), 1);
    cells_are_empty(&cluster);
    drop(cluster);
    before.expect_unchanged("a VM with copies of its memory");
}

/// Promise COH-26.
#[test]
fn every_interrupt_comes_once_over_two_copies_while_vcpus_move() {
    let scratch = Scratch::new("coherent-moves");
    let cluster = Cluster::up(&scratch);
    let endless = Extent { epochs: 0, ..SMALL };
    let mut storm = Storm::start(&scratch, "coherent-moves", endless, &COHERENT);
    let moves = Moves::by_chance(&storm.vm, 2, repetitions(50), 74);
    storm.stop();
    let counts = storm.counts(LIMIT);
    println!("{moves}\n{}", counts.line());
    counts.expect_nothing_wrong();
    cells_are_empty(&cluster);
}

#[test]
fn linux_runs_its_processes_on_two_copies() {
    let scratch = Scratch::new("coherent-linux");
    let cluster = Cluster::up(&scratch);
    let swap = scratch.sparse("swap", SWAP_BYTES);
    let vm = VmFile::new("coherent-linux")
        .cpus(2)
        .memory("256M")
        .disk(&swap, "mode = \"exclusive\"\npersistent = true")
        .key("span", "{ cells = [0, 1], memory = \"coherent\" }")
        .start_only(&scratch);
    // The agent answers when all CPUs are online.
    wait::until("its agent", LIMIT, || {
        let answer = vm.exec(["nproc"]).limit(CALL).run();
        (answer.status == 0).then(|| assert_eq!(answer.text().trim(), "2", "CPUs"))
    });
    let on = |cpu: usize, script: &str| {
        let mask = (1 << cpu).to_string();
        vm.exec(["taskset", &mask, "sh", "-c", script])
            .limit(CALL)
            .ok()
            .text()
    };
    // The others came when the system was up: the kernel's command line has it leave them.
    let told = on(0, "cat /proc/cmdline");
    assert!(told.contains("maxcpus=1"), "{told}");
    // The scheduler knows by then that moves between nodes are expensive: one domain for each CPU.
    let tries = on(0, "cat /sys/kernel/debug/sched/domains/*/*/cache_nice_tries");
    assert_eq!(tries, "20\n20\n");
    // A process of one node reads the writes of one of the other, both ways; and each starts others.
    for (writer, reader) in [(0, 1), (1, 0)] {
        let sum = on(
            writer,
            "dd if=/dev/urandom of=/tmp/data bs=64k count=64 2>/dev/null; sha256sum /tmp/data",
        );
        assert_eq!(sum.len(), "  /tmp/data\n".len() + 64, "{sum}");
        assert_eq!(on(reader, "sha256sum /tmp/data"), sum, "written on CPU {writer}");
        let forked = on(
            writer,
            "i=0; while [ $i -lt 10 ]; do i=$((i+1)); /bin/true || exit 1; done; echo $i",
        );
        assert_eq!(forked.trim(), "10");
    }
    vm.add_tool();
    mappings_come_and_go(&vm);
    pages_are_taken_from_threads_of_both_nodes(&vm);
    let told = vm.inspect();
    let shards = told["status"]["span"]["coherence"]["shards"].as_array().cloned();
    for shard in shards.expect("a list of shards") {
        let tables = &shard["tables"];
        assert!(tables["merged"].as_u64() > Some(0), "{shard:#}");
        assert_eq!(tables["conflicts"], 0, "{shard:#}");
    }
    vm.kill();
    vm.wait_ended(SOON);
    cells_are_empty(&cluster);
}

/// Promise COH-10.
#[test]
fn threads_on_two_cpus_of_each_shard_see_the_memory_order_of_x86() {
    let scratch = Scratch::new("coherent-order");
    let cluster = Cluster::up(&scratch);
    let vm = VmFile::new("coherent-order")
        .cpus(4)
        .memory("256M")
        .key("span", "{ cells = [0, 1], memory = \"coherent\" }")
        .start_only(&scratch);
    wait::until("its agent", LIMIT, || {
        let answer = vm.exec(["nproc"]).limit(CALL).run();
        (answer.status == 0).then(|| assert_eq!(answer.text().trim(), "4", "CPUs"))
    });
    let told = vm.inspect();
    let places = told["status"]["span"]["vcpus"].as_array();
    assert_eq!(
        places.map(|places| json!(places)),
        Some(json!([0, 0, 1, 1])),
        "{told:#}"
    );
    vm.add_tool();
    let millis = repetitions(1000).to_string();
    let said = vm.tool(&["litmus", "2", "2", &millis]).limit(LITMUS).ok().text();
    println!("{said}");
    assert!(said.contains(" forbidden=0"), "{said}");
    assert!(!said.contains(" ordinary=0 "), "{said}");
    vm.kill();
    vm.wait_ended(SOON);
    cells_are_empty(&cluster);
}

/// Threads of one process on both nodes change mappings that the other's CPU has to flush; and processes.
#[track_caller]
fn mappings_come_and_go(vm: &Vm) {
    let said = vm.tool(&["churn", "2", "6"]).limit(CALL).ok().text();
    println!("{said}");
    assert!(!said.contains("=0"), "{said}");
}

/// Linux reclaims pages by their use in page tables, and swaps, while threads on both nodes use them.
#[track_caller]
fn pages_are_taken_from_threads_of_both_nodes(vm: &Vm) {
    vm.sh("mkswap /dev/vda >/dev/null && swapon /dev/vda");
    let said = vm.tool(&["reclaim", "64", "6"]).limit(CALL).ok().text();
    println!("{said}");
    let count = |name: &str| {
        let word = said.split_whitespace().find_map(|word| word.strip_prefix(name));
        word.and_then(|count| count.parse::<u64>().ok())
    };
    assert!(count("takes=") > Some(0), "{said}");
    assert!(count("swapped=") > Some(0), "{said}");
}

/// A value of each shard, by its name in the reports of coherence.
fn each_shard(vm: &Vm, what: &str) -> Vec<u64> {
    let told = vm.inspect();
    let shards = told["status"]["span"]["coherence"]["shards"].as_array();
    let shards = shards.unwrap_or_else(|| panic!("no shards in {told:#}"));
    let one = |shard: &Value| shard[what].as_u64();
    let all: Option<Vec<u64>> = shards.iter().map(one).collect();
    all.unwrap_or_else(|| panic!("no {what} in {told:#}"))
}

/// The host's memory that all copies take.
fn resident(vm: &Vm) -> u64 {
    each_shard(vm, "resident_bytes").iter().sum()
}

/// Waits until the guest reports no further free pages.
fn wait_for_no_more_discards(vm: &Vm) {
    let mut before = each_shard(vm, "discarded");
    wait::until("no further free pages are reported", LIMIT, || {
        std::thread::sleep(Duration::from_secs(5));
        let now = each_shard(vm, "discarded");
        std::mem::replace(&mut before, now.clone()).eq(&now).then_some(())
    });
}

#[test]
fn pages_that_linux_frees_or_its_balloon_takes_leave_both_copies() {
    const MIB: u64 = 1 << 20;
    const FILLED: u64 = 32 * MIB;
    let scratch = Scratch::new("coherent-balloon");
    let cluster = Cluster::up(&scratch);
    // Linux reports nothing of a node with less than some 70 MiB free (`page_reporting_process_zone`).
    let vm = VmFile::new("coherent-balloon")
        .cpus(2)
        .memory("512M")
        .key("span", "{ cells = [0, 1], memory = \"coherent\" }")
        .start_only(&scratch);
    wait::until("its agent", LIMIT, || {
        let answer = vm.exec(["nproc"]).limit(CALL).run();
        (answer.status == 0).then(|| assert_eq!(answer.text().trim(), "2", "CPUs"))
    });
    let on = |cpu: usize, script: &str| {
        let mask = (1 << cpu).to_string();
        let call = vm.exec(["taskset", &mask, "sh", "-c", script]);
        call.limit(CALL).ok().text()
    };
    let fill =
        "mount -t tmpfs none /mnt && dd if=/dev/zero bs=1M count=32 2>/dev/null | tr '\\0' x >/mnt/full";
    let sum = on(
        0,
        "dd if=/dev/urandom of=/tmp/kept bs=64k count=48 2>/dev/null; sha256sum </tmp/kept",
    );
    for cpu in [0, 1] {
        // Memory that was never written was given back already: only used pages count from now on.
        wait_for_no_more_discards(&vm);
        let before = resident(&vm);
        on(cpu, fill);
        // The other copy has it too, after a read.
        on(1 - cpu, "cat /mnt/full >/dev/null");
        let full = resident(&vm);
        assert!(
            full >= before + FILLED,
            "{before} bytes, and {full} with {FILLED} written on CPU {cpu}"
        );
        on(cpu, "umount /mnt");
        // Linux reports free blocks of 4 MiB (2 MiB on some kernels) every 2 s.
        let least = full - (full - before) / 2;
        wait::until(
            &format!("less than {least} of {full} bytes, as {before} before"),
            LIMIT,
            || (resident(&vm) <= least).then_some(()),
        );
    }
    let told = each_shard(&vm, "discarded");
    assert!(
        told.iter().all(|pages| *pages > 0),
        "pages that each manages: {told:?}"
    );

    // A balloon takes free memory, also before it is reported.
    on(0, fill);
    let full = resident(&vm);
    on(0, "rm /mnt/full");
    let balloon = |mib: u64| {
        mirrorball(["balloon", vm.name(), &format!("{mib}M")]).ok();
        wait::until(&format!("a balloon of {mib} MiB"), LIMIT, || {
            (vm.counters("balloon")["actual_bytes"].as_u64() == Some(mib * MIB)).then_some(())
        });
    };
    balloon(96);
    let taken = vm.counters("balloon")["inflated_bytes"].as_u64();
    assert!(taken >= Some(64 * MIB), "{taken:?} bytes of 96 MiB");
    wait::until("memory back from both copies", LIMIT, || {
        (resident(&vm) + FILLED / 2 <= full).then_some(())
    });
    // The guest's own report comes by the balloon's statistics.
    wait::until("the guest's own figures", LIMIT, || {
        let free = vm.counters("balloon").pointer("/guest/free_bytes")?.as_u64()?;
        (free > 0 && free < 512 * MIB).then_some(())
    });
    balloon(0);
    // Memory in use is unchanged, and all memory can be used again, on both CPUs.
    for cpu in [1, 0] {
        assert_eq!(on(cpu, "sha256sum </tmp/kept"), sum, "read on CPU {cpu}");
    }
    on(
        1,
        "dd if=/dev/zero bs=1M count=32 2>/dev/null | tr '\\0' x >/mnt/full",
    );
    let counted = on(0, "tr -d x </mnt/full | wc -c; wc -c </mnt/full");
    let counted: Vec<&str> = counted.split_whitespace().collect();
    assert_eq!(
        counted,
        ["0", &FILLED.to_string()],
        "written on CPU 1, read on CPU 0"
    );
    vm.kill();
    vm.wait_ended(SOON);
    cells_are_empty(&cluster);
}

#[test]
fn vm_ends_with_any_of_its_shards_and_names_it() {
    let scratch = Scratch::new("coherent-killed");
    let cluster = Cluster::up(&scratch);
    let endless = Extent { epochs: 0, ..SMALL };
    for killed in [1, 0] {
        let storm = Storm::start(&scratch, "coherent-killed", endless, &COHERENT);
        let shards = storm.vm.shards();
        assert_eq!(shards.len(), 2, "{shards:?}");
        host::kill9(shards[killed]);
        let (status, told) = storm.ended(SOON);
        assert_eq!(status, 73, "exit status; the terminal:\n{told}");
        // A shard that saw the home's end has less detail than the home's process.
        let reasons = match killed {
            0 => vec!["SIGKILL".to_owned()],
            _ => vec![
                format!("cell {killed} is gone"),
                format!("cell {killed}: its process"),
            ],
        };
        assert!(
            reasons.iter().any(|reason| told.contains(reason)),
            "the shard is not named:\n{told}"
        );
        host::wait_gone(&shards, SOON);
        cells_are_empty(&cluster);
    }
}

#[test]
fn one_cell_is_enough_and_unknown_kinds_of_memory_are_refused() {
    let scratch = Scratch::new("coherent-one");
    let cluster = Cluster::up(&scratch);
    let one = ["--span", "0", "--span-memory", "coherent"];
    let counts = Storm::start(&scratch, "coherent-one", SMALL, &one).counts(LIMIT);
    counts.expect_nothing_wrong();
    cells_are_empty(&cluster);
    for (span, words) in [
        ("{ cells = [0, 1], memory = \"magic\" }", ["magic", "coherent"]),
        ("{ cells = [0, 1], memory = 1 }", ["memory", "coherent"]),
    ] {
        let file = VmFile::new("nonsense").cpus(2).memory("256M").key("span", span);
        let output = mirrorball(["run", "-d"])
            .args([file.write(&scratch)])
            .limit(SOON)
            .run();
        let said = output.expect(1).errors();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }
}
