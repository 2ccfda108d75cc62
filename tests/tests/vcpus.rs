//! Risk: of many vCPUs some do not start, start twice, have another's id, or are missing in the ACPI tables.

use std::time::{Duration, Instant};

use guest_tests::repetitions::in_campaign;
use guest_tests::storm::Storm;
use guest_tests::{Scratch, VmFile, wait};

/// The most vCPUs of a machine.
const MOST: usize = 254;
/// vCPUs of Linux in a campaign, and at a landing, where a lab host of two CPUs boots them.
const LINUX_MOST: u8 = 64;
const LINUX_LANDING: u8 = 16;
/// Measured in a busy lab host of two CPUs, 2026-11-24: 174 s with 64 vCPUs, 27 s with 16.
const LINUX_LIMIT: Duration = Duration::from_secs(500);

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
