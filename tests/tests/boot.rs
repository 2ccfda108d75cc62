//! Risk: a kernel does not start, CPUs are missing or wrong, memory is missing or aliased.

use std::fs;
use std::time::Duration;

use guest_tests::{Scratch, Setting, VmFile, host, mirrorball};

/// Boots with `cpus` vCPUs and lets every one of them compute while the others do.
fn all_cpus_work(image: &str, cpus: u8) -> String {
    let scratch = Scratch::new("boot");
    let vm = VmFile::of(&format!("cpus{cpus}"), image)
        .cpus(cpus)
        .start(&scratch);
    let last = cpus - 1;
    let range = if cpus == 1 {
        "0".to_owned()
    } else {
        format!("0-{last}")
    };
    assert_eq!(vm.sh("cat /sys/devices/system/cpu/online").trim(), range);
    assert_eq!(vm.sh("nproc").trim(), cpus.to_string());
    for cpu in 0..cpus {
        assert_eq!(
            vm.sh(&format!("taskset -c {cpu} nproc")).trim(),
            "1",
            "taskset to CPU {cpu}"
        );
    }
    vm.add_tool();
    let worked = vm.tool(&["pinned", &cpus.to_string()]).ok().text();
    let names: Vec<String> = (0..cpus).map(|cpu| cpu.to_string()).collect();
    assert_eq!(worked.trim(), names.join(" "));
    let kernel = vm.sh("uname -r").trim().to_owned();
    vm.stop();
    kernel
}

#[test]
fn cloud_kernel_boots_with_one_cpu() {
    let kernel = all_cpus_work(VmFile::TINY, 1);
    assert!(kernel.contains("cloud"), "booted {kernel}");
}

#[test]
fn cloud_kernel_boots_with_two_cpus() {
    all_cpus_work(VmFile::TINY, 2);
}

#[test]
fn cloud_kernel_boots_with_four_cpus() {
    all_cpus_work(VmFile::TINY, 4);
}

#[test]
fn generic_kernel_boots_with_two_cpus() {
    let kernel = all_cpus_work(VmFile::TINY_GENERIC, 2);
    assert!(!kernel.contains("cloud"), "booted {kernel}");
}

/// A number in the output of `guest-tool memory`, in MiB.
fn part(said: &str, name: &str) -> u64 {
    let value = said
        .split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value
        .and_then(|mib| mib.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in {said:?}"))
}

/// Boots with this memory, expects the guest to see nearly all of it, fills `fill_mib` of the free part and
/// checks it.
fn memory_holds(size: &str, mib: u64, pages: &str, fill_mib: u64, limit: Duration) -> String {
    let scratch = Scratch::new("memory");
    let _huge_pages = (pages == "thp").then(Setting::huge_pages);
    let vm = VmFile::new(&format!("memory{size}"))
        .memory(size)
        .key("pages", &format!("{pages:?}"))
        .start(&scratch);
    let total = vm.sh("sed -n 's/^MemTotal: *//p' /proc/meminfo");
    let total_mib = total
        .trim()
        .trim_end_matches(" kB")
        .parse::<u64>()
        .expect("a number of KiB")
        >> 10;
    // The kernel keeps its text and tables, and 64 bytes for each page.
    let least = mib - 40 - mib / 32;
    assert!(
        (least..mib).contains(&total_mib),
        "the guest has {total_mib} MiB of {mib}"
    );
    vm.add_tool();
    let said = vm
        .tool(&["memory", &fill_mib.to_string()])
        .limit(limit)
        .ok()
        .text();
    vm.kill();
    said
}

#[test]
fn smallest_memory_boots_and_works() {
    let said = memory_holds("96M", 96, "4K", 4, Duration::from_secs(60));
    assert!(part(&said, "below") >= 2, "{said}");
    assert_eq!(part(&said, "above"), 0, "{said}");
}

#[test]
fn half_a_gigabyte_holds_its_pattern() {
    let said = memory_holds("512M", 512, "thp", 400, Duration::from_secs(60));
    assert_eq!(part(&said, "below"), 400, "{said}");
}

#[test]
fn five_gigabytes_hold_their_pattern_on_both_sides_of_the_hole() {
    // Linux takes memory above 4 GiB first; this is all of it and some from below.
    let said = memory_holds("5G", 5 << 10, "thp", 2304, Duration::from_secs(200));
    assert!(part(&said, "below") >= 200, "{said}");
    assert!(part(&said, "above") >= 900, "{said}");
    assert_eq!(part(&said, "whole"), 4096, "{said}");
}

#[test]
fn a_bzimage_boots_by_flags_and_when_imported() {
    let image = host::data_directory().join("images").join(VmFile::TINY_GENERIC);
    let (kernel, initrd) = (image.join("vmlinuz"), image.join("initrd"));
    let start = fs::read(&kernel).expect("the generic kernel is kept as a bzImage");
    assert_eq!(
        &start[0x202..0x206],
        b"HdrS",
        "{} is no bzImage",
        kernel.display()
    );
    let script = "uname -r; cat /proc/cmdline; cat /sys/kernel/boot_params/version";
    let said = mirrorball([
        "run", "--memory", "192M", "--net", "none", "--cpus", "2", "--kernel",
    ])
    .args([&kernel])
    .args(["--initrd".as_ref(), initrd.as_os_str()])
    .args(["--cmdline", "some.word=1", "--", "sh", "-c", script])
    .ok()
    .text();
    assert!(said.contains("amd64") && !said.contains("cloud"), "{said}");
    assert!(said.contains("some.word=1"), "{said}");
    let scratch = Scratch::new("import");
    let in_store = |arguments: &[&str]| mirrorball(arguments).env("MIRRORBALL_DATA", scratch.path());
    in_store(&["image", "import", "--name", "own"])
        .args(["--kernel".as_ref(), kernel.as_os_str()])
        .args(["--initrd".as_ref(), initrd.as_os_str()])
        .ok();
    let said = in_store(&["run", "--image", "own", "--memory", "192M", "--net", "none"])
        .args(["--cmdline", "some.word=2", "--", "sh", "-c", script])
        .ok()
        .text();
    assert!(said.contains("amd64") && !said.contains("cloud"), "{said}");
    // The image's words, then the user's.
    assert!(said.contains(" console=ttyS0 some.word=2\n"), "{said}");
}

#[test]
fn guest_nodes_have_their_cpus_memory_and_distances() {
    let scratch = Scratch::new("nodes");
    // The second node's memory lies on both sides of the hole below 4 GiB.
    let vm = VmFile::new("nodes")
        .cpus(4)
        .memory("3584M")
        .table("[[nodes]]\ncpus = \"0,3\"\nmemory = \"256M\"\ndistances = [10, 21]")
        .table("[[nodes]]\ncpus = \"1-2\"\nmemory = \"3328M\"\ndistances = [31, 10]")
        .start(&scratch);
    let read = |name: &str| {
        let path = format!("/sys/devices/system/node/{name}");
        vm.sh(&format!("cat {path}")).trim().to_owned()
    };
    assert_eq!(read("online"), "0-1");
    assert_eq!(read("node0/cpulist"), "0,3");
    assert_eq!(read("node1/cpulist"), "1-2");
    assert_eq!(read("node0/distance"), "10 21");
    assert_eq!(read("node1/distance"), "31 10");
    for (node, mib) in [(0, 256), (1, 3328)] {
        let info = read(&format!("node{node}/meminfo"));
        let total = info.lines().find(|line| line.contains("MemTotal:"));
        let kib: Option<u64> = total.and_then(|line| line.split_whitespace().nth(3)?.parse().ok());
        let found = kib.unwrap_or_else(|| panic!("no MemTotal in {info}")) >> 10;
        // The kernel keeps its text, its tables, and 64 bytes for each page.
        let least = mib - mib / 10 - 80;
        assert!(
            (least..=mib).contains(&found),
            "node {node} has {found} MiB of {mib}"
        );
    }
    vm.kill();
}

#[test]
fn cloud_kernel_boots_with_eight_cpus() {
    all_cpus_work(VmFile::TINY, 8);
}
