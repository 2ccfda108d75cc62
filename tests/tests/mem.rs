//! Risk: `mirrorball mem` reports memory that the host does not spend, or leaves out memory that it does.

use std::fs;
use std::path::Path;
use std::time::Duration;

use guest_tests::command::binary;
use guest_tests::vm::SHARE_BETWEEN_ALL;
use guest_tests::{Scratch, Vm, VmFile, mirrorball, wait};
use serde_json::Value;

const MIB: i64 = 1 << 20;
const SOON: Duration = Duration::from_secs(20);

#[track_caller]
fn mem() -> Value {
    mirrorball(["mem", "--json"]).limit(SOON).ok().json()
}

#[track_caller]
fn bytes(of: &Value, key: &str) -> i64 {
    of[key]
        .as_i64()
        .unwrap_or_else(|| panic!("no number {key} in {of:#}"))
}

#[track_caller]
fn row<'a>(table: &'a Value, vm: &Vm) -> &'a Value {
    let rows = table["vms"].as_array().expect("a list of VMs");
    rows.iter()
        .find(|row| row["name"] == vm.name())
        .unwrap_or_else(|| panic!("no {} in {table:#}", vm.name()))
}

/// The table when it has settled: two in a row whose totals differ by less than 1 MiB.
#[track_caller]
fn settled() -> Value {
    let mut last = mem();
    wait::until(
        "memory that stays as it is for 2 s",
        Duration::from_secs(60),
        || {
            std::thread::sleep(Duration::from_secs(2));
            let now = mem();
            let moved = ["vms_bytes", "used_bytes"]
                .iter()
                .map(|key| (bytes(&now["host"], key) - bytes(&last["host"], key)).abs())
                .max();
            last = now.clone();
            (moved < Some(MIB)).then_some(now)
        },
    )
}

/// Bytes of the programs beside the command that lie in a file system of the host's memory. They are there
/// whether or not a VM runs, and the table has them while one does.
fn programs(table: &Value) -> i64 {
    let binary = binary();
    let folder = binary.parent().expect("a file in a folder");
    let kind = nix::sys::statfs::statfs(folder)
        .expect("a folder")
        .filesystem_type();
    if kind != nix::sys::statfs::TMPFS_MAGIC {
        return 0;
    }
    let files = table["files"].as_array().into_iter().flatten();
    files
        .filter(|file| Path::new(file["path"].as_str().expect("a path")).starts_with(folder))
        .map(|file| bytes(file, "resident_bytes"))
        .sum()
}

#[test]
fn columns_add_up_to_the_memory_that_the_host_loses() {
    let scratch = Scratch::new("columns");
    let start = |number: u32| VmFile::new(&format!("columns-{number}")).start(&scratch);
    // The programs' own pages, and pages that the kernel keeps for a second time, are there before the check.
    start(0).kill();
    fs::write("/proc/sys/vm/drop_caches", "3").expect("these tests run as root");
    let before = settled();
    assert_eq!(before["vms"], Value::Array(Vec::new()), "another VM is running");

    let vms: Vec<Vm> = (1..=3).map(start).collect();
    let after = settled();
    let grown = |key: &str| bytes(&after["host"], key) - bytes(&before["host"], key);
    let lost = grown("used_bytes");
    // Tables of KVM, and objects of the kernel, for these VMs: the host was at rest before.
    let kernel = grown("kvm_page_tables_bytes") + grown("kernel_bytes");
    let told =
        grown("vms_bytes") + grown("files_unmapped_bytes") + kernel - (programs(&after) - programs(&before));
    let report = format!(
        "lost {lost}, reported {told}, of it the kernel's {kernel}\nbefore {before:#}\nafter {after:#}"
    );
    assert!(lost > 3 * 40 * MIB, "three guests take more than that: {report}");
    assert!(kernel < 3 * 8 * MIB, "so much is not the VMs': {report}");
    assert!(
        (lost - told).abs() * 100 <= 2 * lost,
        "more than 2% apart: {report}"
    );
    println!("{report}");

    let total = &after["total"];
    for key in [
        "host_bytes",
        "private_bytes",
        "base_bytes",
        "monitor_bytes",
        "memory_bytes",
    ] {
        let sum: i64 = vms.iter().map(|vm| bytes(row(&after, vm), key)).sum();
        assert_eq!(sum, bytes(total, key), "the total of {key}: {after:#}");
    }
    vms.iter().for_each(|vm| drop(vm.kill()));
}

/// The row of a use in a VM's map, or the total.
#[track_caller]
fn use_of<'a>(map: &'a Value, name: &str) -> &'a Value {
    let rows = map["uses"].as_array().expect("a list of uses");
    rows.iter()
        .find(|row| row["use"] == name)
        .unwrap_or_else(|| panic!("no {name} in {map:#}"))
}

#[track_caller]
fn explain(vm: &Vm) -> Value {
    mirrorball(["mem", vm.name(), "--explain", "--json"])
        .limit(SOON)
        .ok()
        .json()
}

#[test]
fn explained_pages_add_up_to_the_memory_that_the_host_counts() {
    let scratch = Scratch::new("explain");
    let vm = VmFile::new("explain").memory("256M").start(&scratch);
    vm.add_tool();
    // A guest that has just booted gives memory back.
    settled();
    let (map, table) = (explain(&vm), settled());
    let row = row(&table, &vm);
    let report = format!("{map:#}\n{row:#}");
    assert_eq!(map["unread"], Value::Null, "{report}");
    let total = &map["total"];
    assert_eq!(bytes(total, "bytes"), 256 * MIB, "{report}");
    let (counted, explained) = (
        bytes(row, "private_bytes") + bytes(row, "copied_bytes"),
        bytes(total, "private_bytes"),
    );
    assert!(
        (counted - explained).abs() * 100 <= 3 * counted,
        "more than 3% apart: {report}"
    );
    let uses = map["uses"].as_array().expect("a list of uses");
    let sum: i64 = uses.iter().map(|row| bytes(row, "private_bytes")).sum();
    assert_eq!(sum, explained, "{report}");
    // A Debian kernel has 14 MiB of code and 8 MiB of read-only data, and 2 MiB of page structs for each
    // 128 MiB. The files of this image are in a tmpfs.
    for (name, least, most) in [
        ("kernel-text", 8, 24),
        ("kernel-rodata", 2, 16),
        ("kernel-data", 1, 32),
        ("page-structs", 4, 4),
        ("slab", 1, 48),
        ("shared-memory", 1, 64),
        ("free", 64, 256),
    ] {
        let found = bytes(use_of(&map, name), "bytes");
        assert!(
            (least * MIB..=most * MIB).contains(&found),
            "{found} of {name}: {report}"
        );
    }
    let text = &use_of(&map, "kernel-text")["origins"];
    let loaded = text["loaded"].as_i64().unwrap_or(0) + text["overwritten"].as_i64().unwrap_or(0);
    assert!(
        loaded * 10 >= bytes(use_of(&map, "kernel-text"), "bytes") * 9,
        "{report}"
    );

    // Memory of a process is anonymous, and of unknown origin.
    let mut program = vm.tool(&["hold", "64", "30"]).spawn();
    program.wait_for("held", Duration::from_secs(60));
    let full = explain(&vm);
    program.wait().expect(0);
    let anonymous = |map: &Value| bytes(use_of(map, "anonymous"), "private_bytes");
    let grown = anonymous(&full) - anonymous(&map);
    assert!(
        (60 * MIB..80 * MIB).contains(&grown),
        "{grown} bytes more: {full:#}"
    );
    let people = mirrorball(["mem", vm.name(), "--explain"])
        .limit(SOON)
        .ok()
        .text();
    for word in ["USE ", "kernel text ", "anonymous ", "total "] {
        assert!(
            people.lines().any(|line| line.starts_with(word)),
            "{word}:\n{people}"
        );
    }
    vm.kill();
}

#[test]
fn memory_that_a_guest_fills_counts_as_its_private_memory() {
    let scratch = Scratch::new("fills");
    let vm = VmFile::new("fills").memory("256M").start(&scratch);
    vm.add_tool();
    let before = row(&settled(), &vm).clone();
    assert_eq!(bytes(&before, "memory_bytes"), 256 * MIB);
    let mut program = vm.tool(&["hold", "100", "8"]).spawn();
    program.wait_for("held", Duration::from_secs(60));
    let full = row(&mem(), &vm).clone();
    program.wait().expect(0);
    let grown = |key: &str| bytes(&full, key) - bytes(&before, key);
    assert!(grown("private_bytes") >= 75 * MIB, "{before:#} {full:#}");
    assert!(
        (grown("host_bytes") - grown("private_bytes")).abs() < 4 * MIB,
        "{before:#} {full:#}"
    );
    // The guest reports the same, once its balloon has counted.
    wait::until("the guest's own figures", SOON, || {
        let used = row(&mem(), &vm)["guest_used_bytes"].as_i64()?;
        (8 * MIB..256 * MIB).contains(&used).then_some(())
    });
    vm.kill();
}

#[test]
fn pages_of_a_file_mapped_by_two_vms_are_shared_until_they_are_written() {
    const FILE_BYTES: usize = 32 << 20;
    let scratch = Scratch::new("base");
    let base = scratch.write("base.raw", vec![0x5a; FILE_BYTES]);
    let vms: Vec<Vm> = ["base-a", "base-b"]
        .iter()
        .map(|name| {
            let file = VmFile::new(name).disk(&base, "as = \"pmem\"");
            file.host_file(SHARE_BETWEEN_ALL).start(&scratch)
        })
        .collect();
    for vm in &vms {
        vm.sh("for i in $(seq 50); do [ -b /dev/pmem0 ] && break; sleep 0.1; done");
        vm.sh("dd if=/dev/pmem0 of=/dev/null bs=1M");
    }
    let (table, size) = (mem(), FILE_BYTES as i64);
    for vm in &vms {
        let row = row(&table, vm);
        let (resident, part) = (bytes(row, "base_resident_bytes"), bytes(row, "base_bytes"));
        assert!(resident >= size, "{resident} of {size} mapped: {table:#}");
        assert!(
            part <= resident * 6 / 10,
            "{part} of {resident} is not half: {table:#}"
        );
    }
    vms[0].sh("dd if=/dev/zero of=/dev/pmem0 bs=1M count=16 conv=notrunc && sync");
    let table = mem();
    let copied = bytes(row(&table, &vms[0]), "copied_bytes");
    assert!(
        copied >= size / 2,
        "{copied} bytes copied by a write of half of the file: {table:#}"
    );
    assert!(
        bytes(row(&table, &vms[1]), "copied_bytes") < copied / 2,
        "{table:#}"
    );
    vms.iter().for_each(|vm| drop(vm.kill()));
}

#[test]
fn the_table_for_people_has_every_vm_and_a_total() {
    let scratch = Scratch::new("people");
    let vm = VmFile::new("people").start(&scratch);
    let text = mirrorball(["mem"]).limit(SOON).ok().text();
    let starts = |word: &str| text.lines().any(|line| line.starts_with(word));
    for word in ["VM ", vm.name(), "total ", "host: "] {
        assert!(starts(word), "no line starts with {word}:\n{text}");
    }
    let mut watching = mirrorball(["mem", "--watch", "--json"]).spawn();
    watching.wait_for(vm.name(), SOON);
    watching.signal(nix::sys::signal::Signal::SIGINT);
    let watched = watching.wait().expect(128 + 2);
    let line = watched
        .text()
        .lines()
        .next()
        .map(str::to_owned)
        .unwrap_or_default();
    let table: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
    assert_eq!(row(&table, &vm)["name"], vm.name());
    vm.kill();
}
