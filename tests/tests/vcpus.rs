//! Risk: of many vCPUs some do not start, start twice, have another's id, or are missing in the ACPI tables.
//! A stopped vCPU runs, never goes on, or takes the rest of its VM with it.

use std::thread;
use std::time::{Duration, Instant};

use guest_tests::repetitions::in_campaign;
use guest_tests::storm::Storm;
use guest_tests::{Scratch, Vm, VmFile, mirrorball, wait};

/// The most vCPUs of a machine.
const MOST: usize = 254;
/// vCPUs of Linux in a campaign, and at a landing, where a lab host of two CPUs boots them.
const LINUX_MOST: u8 = 64;
const LINUX_LANDING: u8 = 16;
/// Measured in a busy lab host of two CPUs, 2026-11-24: 174 s with 64 vCPUs, 27 s with 16.
const LINUX_LIMIT: Duration = Duration::from_secs(500);
/// Commands that renew a stop at the same time: one takes longer than a stop lasts in a busy lab host.
const RENEWERS: usize = 4;
/// Words of Linux's reports of a CPU that stands still.
const LOCKUPS: [&str; 4] = [
    "soft lockup",
    "hard LOCKUP",
    "detected stall",
    "rcu_sched kthread",
];

/// Promise SHARD-07.
#[test]
fn each_of_254_vcpus_starts_once_with_its_own_id_and_the_acpi_tables_list_them() {
    let scratch = Scratch::new("enumeration");
    let start = Instant::now();
    let counts = Storm::enumerate(&scratch, "enumeration", MOST, Duration::from_secs(150));
    println!("{MOST} vCPUs after {:.1?}: {}", start.elapsed(), counts.line());
    assert!(counts.line().ends_with("all well"), "{}", counts.line());
    for (name, wanted) in [
        ("started", MOST as u64),
        ("again", 0),
        ("foreign", 0),
        ("different", 0),
        ("checksums_wrong", 0),
        ("listed", MOST as u64),
        ("unlisted", 0),
    ] {
        assert_eq!(counts.of(name), wanted, "{name}: {}", counts.line());
    }
    // RSDP, XSDT, FADT, MADT and MCFG.
    assert!(counts.of("tables") >= 5, "{}", counts.line());
}

/// Promise SHARD-07.
#[test]
fn linux_boots_on_many_vcpus_and_works_on_each() {
    let cpus = if in_campaign() { LINUX_MOST } else { LINUX_LANDING };
    let scratch = Scratch::new("many");
    let start = Instant::now();
    let vm = VmFile::new("many").cpus(cpus).memory("512M").start_only(&scratch);
    wait::until("the agent", LINUX_LIMIT, || {
        let answer = vm.exec(["true"]).limit(Duration::from_secs(10)).run();
        (answer.status == 0).then_some(())
    });
    println!("{cpus} vCPUs: the agent answers after {:.1?}", start.elapsed());
    let last = cpus - 1;
    assert_eq!(
        vm.sh("cat /sys/devices/system/cpu/online").trim(),
        format!("0-{last}")
    );
    let ids = vm.sh("sed -n 's/^apicid[^0-9]*//p' /proc/cpuinfo");
    let ids: Vec<u8> = ids.lines().filter_map(|id| id.parse().ok()).collect();
    assert_eq!(ids, (0..cpus).collect::<Vec<_>>(), "APIC ids in /proc/cpuinfo");
    vm.add_tool();
    let worked = vm.tool(&["pinned", &cpus.to_string()]).ok().text();
    let names: Vec<String> = (0..cpus).map(|cpu| cpu.to_string()).collect();
    assert_eq!(worked.trim(), names.join(" "));
    vm.kill();
}

/// Run time of a vCPU, and the time for which orders stopped it, ms each.
fn ran_and_stopped(vm: &Vm, vcpu: usize) -> (u64, u64) {
    let status = &vm.inspect()["status"];
    let known = (&status["vcpus"][vcpu], &status["stops"][vcpu]);
    assert_eq!(known.0["vcpu"], vcpu, "{status:#}");
    let stopped_ns = known.1["stopped_ns"].as_u64().expect("a time");
    (
        known.0["ran_ms"].as_u64().expect("a time"),
        stopped_ns / 1_000_000,
    )
}

#[test]
fn vcpu_is_stopped_for_a_second_by_renewals_while_the_other_goes_on_and_no_lockup_is_reported() {
    let scratch = Scratch::new("stopped");
    let vm = VmFile::new("stopped").cpus(2).memory("256M").start(&scratch);
    for vcpu in 0..2 {
        let kvm = &vm.inspect()["status"]["vcpus"][vcpu]["kvm"];
        assert!(
            kvm["halts"].as_u64() > Some(0),
            "KVM's statistics of vCPU {vcpu}: {kvm}"
        );
        assert!(kvm["exits"].as_u64() >= kvm["halts"].as_u64(), "{kvm}");
    }
    let refused = |arguments: &[&str], why: &str| {
        let output = mirrorball(["pause", vm.name()]).args(arguments).run();
        assert_ne!(output.status, 0, "{output}");
        assert!(output.errors().contains(why), "{output}");
    };
    refused(&["--vcpu", "2"], "the VM has no vCPU 2");
    refused(&["--vcpu", "1", "--for", "101ms"], "for 1ms to 100ms at a time");
    refused(&["--for", "5ms"], "--vcpu");

    // Both would run all the time.
    for mask in [1, 2] {
        vm.background(&format!("taskset {mask} sh -c 'while :; do :; done'"));
    }
    let begun = Instant::now();
    let before = [0, 1].map(|vcpu| ran_and_stopped(&vm, vcpu));
    wait::until("a second of stops", Duration::from_secs(120), || {
        let round = Instant::now();
        thread::scope(|scope| {
            for _ in 0..RENEWERS {
                scope.spawn(|| {
                    while round.elapsed() < Duration::from_secs(1) {
                        mirrorball(["pause", vm.name(), "--vcpu", "1", "--for", "100ms"]).ok();
                    }
                });
            }
        });
        mirrorball(["resume", vm.name(), "--vcpu", "1"]).ok();
        let (_, stopped_ms) = ran_and_stopped(&vm, 1);
        (stopped_ms >= before[1].1 + 1000).then_some(())
    });
    let after = [0, 1].map(|vcpu| ran_and_stopped(&vm, vcpu));
    let elapsed_ms = begun.elapsed().as_millis() as u64;
    let [(ran_0, stopped_0), (ran_1, stopped_1)] =
        [0, 1].map(|vcpu| (after[vcpu].0 - before[vcpu].0, after[vcpu].1 - before[vcpu].1));
    println!("of {elapsed_ms} ms vCPU 1 was stopped for {stopped_1} and ran for {ran_1}; vCPU 0 ran {ran_0}");
    assert_eq!(stopped_0, 0, "the other vCPU");
    assert!(ran_0 > 0, "the other vCPU stood still");
    assert!(ran_1 + stopped_1 <= elapsed_ms, "vCPU 1 ran while it was stopped");

    // It goes on by itself, without an order.
    mirrorball(["pause", vm.name(), "--vcpu", "1"]).ok();
    assert_eq!(
        vm.exec(["taskset", "2", "echo", "well"]).ok().text().trim(),
        "well"
    );
    let logs = vm.logs();
    for lockup in LOCKUPS {
        assert!(!logs.contains(lockup), "{lockup}: {logs}");
    }
    vm.kill();
}
