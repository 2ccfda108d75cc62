//! Texts as Linux 6.1 prints them, and the sums made of them.

use super::account::{FileReading, GatewayMemory, VmMemory, VmReading, account};
use super::classify::{Classified, classify, helper};
use super::host::HostMemory;
use super::process::{self, OpenFile};
use super::smaps::{FileId, parse};

const KIB: u64 = 1024;

/// A mapping with the fields that matter, in KiB: resident, proportional, anonymous, swapped, and swapped
/// anonymous.
fn area(header: &str, fields: [u64; 5]) -> String {
    private_area(header, 0, fields, "")
}

/// The same with the part that only this process has, and with more flags.
fn private_area(
    header: &str,
    private: u64,
    [rss, pss, anonymous, swap, swap_pss]: [u64; 5],
    flags: &str,
) -> String {
    format!(
        "{header}\nSize:             131072 kB\nKernelPageSize:        4 kB\nRss:     {rss:>8} kB\n\
         Pss:     {pss:>8} kB\n\
         Pss_Dirty:             0 kB\nShared_Clean:          0 kB\nPrivate_Clean: 0 kB\n\
         Private_Dirty: {private:>8} kB\nAnonymous: {anonymous:>8} kB\nLazyFree: 0 kB\n\
         Swap:    {swap:>8} kB\nSwapPss: {swap_pss:>8} kB\nLocked: 0 kB\nTHPeligible:    0\n\
         VmFlags: rd wr sh mr mw me ms {flags} sd\n"
    )
}

/// A shard: program, heap, own memory in two parts, a disk image over it, memory of a clone's parent, what
/// KVM maps.
fn shard() -> String {
    [
        area(
            "00400000-00500000 r--p 00000000 fe:01 77                         \
            /usr/bin/mirrorball",
            [400, 100, 0, 0, 0],
        ),
        area(
            "00500000-00a00000 r-xp 00100000 fe:01 77                         \
            /usr/bin/mirrorball",
            [2000, 500, 0, 0, 0],
        ),
        area(
            "00a00000-00a10000 rw-p 00600000 fe:01 77                         \
            /usr/bin/mirrorball",
            [64, 64, 64, 0, 0],
        ),
        area(
            "01a00000-01b00000 rw-p 00000000 00:00 0                          \
            [heap]",
            [300, 300, 300, 20, 20],
        ),
        area(
            "7f0000000000-7f0004000000 rw-s 00000000 00:01 1033                       /memfd:guest-memory \
            (deleted)",
            [40000, 40000, 0, 1000, 0],
        ),
        area(
            "7f0004000000-7f0005000000 rw-p 01000000 fe:01 900                        /images/a \
            b/root.raw",
            [12000, 4000, 1000, 0, 8],
        ),
        area(
            "7f0005000000-7f0008000000 rw-s 05000000 00:01 1033                       /memfd:guest-memory \
            (deleted)",
            [20000, 20000, 0, 0, 0],
        ),
        area(
            "7f0009000000-7f000a000000 rw-p 00000000 00:01 2044                       /memfd:guest-memory \
            (deleted)",
            [9000, 4000, 1000, 0, 0],
        ),
        area(
            "7f000b000000-7f000b001000 rw-s 00000000 00:0d 12                         \
            anon_inode:kvm-vcpu:0",
            [12, 12, 0, 0, 0],
        ),
        area(
            "7f000c000000-7f000c800000 rw-p 00000000 00:00 0 ",
            [80, 80, 80, 0, 0],
        ),
        area(
            "7f000d000000-7f000d001000 rw-s 00000000 00:01 5                          /dev/zero \
            (deleted)",
            [4, 4, 0, 0, 0],
        ),
        area(
            "7ffe0000000-7ffe00020000 r-xp 00000000 00:00 0                          \
            [vdso]",
            [8, 0, 0, 0, 0],
        ),
    ]
    .concat()
}

const OWN: FileId = FileId {
    device: (0, 1),
    inode: 1033,
};
const PARENT: FileId = FileId {
    device: (0, 1),
    inode: 2044,
};
const IMAGE: FileId = FileId {
    device: (0xfe, 1),
    inode: 900,
};
const PROGRAM: FileId = FileId {
    device: (0xfe, 1),
    inode: 77,
};

#[test]
fn headers_with_spaces_and_without_names_are_read() {
    let areas = parse(&shard());
    assert_eq!(areas.len(), 12);
    assert_eq!(areas[5].name, "/images/a b/root.raw");
    assert_eq!(areas[5].file, IMAGE);
    assert!(!areas[5].shared && areas[4].shared && areas[1].executable);
    assert_eq!(areas[9].name, "");
    assert_eq!(areas[4].resident, 40_000 * KIB);
    assert!(parse("nonsense\nRss: x kB\n-\n").is_empty());
}

#[test]
fn each_mapping_of_a_shard_is_classified() {
    let all = classify(&parse(&shard()));
    assert_eq!(all.own.len(), 1);
    assert_eq!(all.own[&OWN].proportional, 60_000 * KIB);
    assert_eq!(all.own[&OWN].swapped_of_file, 1000 * KIB);
    let image = all.base[&IMAGE];
    assert_eq!((image.resident, image.proportional), (11_000 * KIB, 3_000 * KIB));
    assert_eq!((image.copied, image.swapped_copies), (1_000 * KIB, 8 * KIB));
    let parent = all.frozen[&PARENT];
    assert_eq!(
        (parent.resident, parent.proportional, parent.copied),
        (8_000 * KIB, 3_000 * KIB, 1_000 * KIB)
    );
    assert_eq!(
        all.base.len(),
        1,
        "the program and what has no disk are no base files: {:?}",
        all.base
    );
    assert_eq!(all.monitor, (100 + 500 + 64 + 300 + 12 + 80 + 4) * KIB);
    assert_eq!(all.monitor_swapped, 20 * KIB);
    assert_eq!(all.programs[&PROGRAM].proportional, 600 * KIB);
}

/// A shard whose memory the host scans: memory in no file, an image's page over it, a heap that is scanned,
/// too, as a service manager can set it.
fn scanned_shard() -> String {
    [
        private_area(
            "7f0000000000-7f0004000000 rw-p 00000000 00:00 0 ",
            30_000,
            [40_000, 32_000, 40_000, 8, 5],
            "mg dd",
        ),
        private_area(
            "7f0004000000-7f0005000000 rw-p 01000000 fe:01 900                        /images/a \
            b/root.raw",
            500,
            [12_000, 900, 1_000, 0, 0],
            "mg dd",
        ),
        private_area(
            "01a00000-01b00000 rw-p 00000000 00:00 0       [heap]",
            300,
            [300, 300, 300, 0, 0],
            "mg",
        ),
    ]
    .concat()
}

#[test]
fn memory_in_no_file_is_the_guests_and_its_merged_part_is_counted_apart() {
    let all = classify(&parse(&scanned_shard()));
    let anonymous = all.anonymous;
    assert_eq!((anonymous.private, anonymous.merged), (30_000 * KIB, 2_000 * KIB));
    assert_eq!(
        (anonymous.merged_resident, anonymous.swapped),
        (10_000 * KIB, 5 * KIB)
    );
    assert_eq!(all.monitor, 300 * KIB);
    // Copies that are merged with others make the part smaller than the copies.
    let image = all.base[&IMAGE];
    assert_eq!((image.proportional, image.copied), (0, 900 * KIB));
    let helper = helper(&parse(&scanned_shard()));
    assert_eq!(helper.anonymous, Default::default());
    assert_eq!(helper.monitor, (300 + 32_000 + 900) * KIB);

    let reading = VmReading {
        shard: all,
        monitor_part: 0,
        page_tables: 0,
        ..vm("scanned", vec![memory_file(OWN, 0)])
    };
    let table = account(&[reading.clone(), reading], &[], HostMemory::default());
    let row = &table.vms[0];
    assert_eq!((row.private_bytes, row.merged_bytes), (30_000 * KIB, 2_000 * KIB));
    assert_eq!(row.merged_resident_bytes, 10_000 * KIB);
    assert_eq!(row.shared_bytes(), (10_000 + 11_000) * KIB);
    assert_eq!(row.host_bytes, (30_000 + 2_000 + 900 + 300) * KIB);
    assert_eq!(row.swapped_bytes, 5 * KIB);
    assert_eq!(table.total.merged_bytes, 2 * row.merged_bytes);
    assert_eq!(table.total.merged_resident_bytes, 2 * row.merged_resident_bytes);
}

#[test]
fn memory_mapped_by_two_shards_counts_once() {
    let memory = |[rss, pss]: [u64; 2]| {
        let header = "7f0000000000-7f0004000000 rw-s 00000000 00:01 1033    /memfd:guest-memory (deleted)";
        let heap = "01a00000-01b00000 rw-p 00000000 00:00 0    [heap]";
        [
            area(header, [rss, pss, 0, 0, 0]),
            area(heap, [300, 300, 300, 0, 0]),
        ]
        .concat()
    };
    // 30,000 by both, 10,000 by the first alone, 5,000 by the second.
    let mut all = classify(&parse(&memory([40_000, 25_000])));
    all.join(&classify(&parse(&memory([35_000, 20_000]))));
    let own = all.own[&OWN];
    assert_eq!((own.resident, own.proportional), (45_000 * KIB, 45_000 * KIB));
    assert_eq!(all.monitor, 600 * KIB);
}

#[test]
fn helper_process_has_no_guest_memory() {
    let all = helper(&parse(&shard()));
    assert_eq!((all.own.len(), all.frozen.len(), all.base.len()), (0, 0, 0));
    let sum = 100 + 500 + 64 + 300 + 40_000 + 4_000 + 20_000 + 4_000 + 12 + 80 + 4;
    assert_eq!(all.monitor, sum * KIB);
}

#[test]
fn huge_pages_of_a_pool_are_counted() {
    let header = "7f0000000000-7f0040000000 rw-s 00000000 00:0f 31      /memfd:guest-memory (deleted)";
    let text = format!("{header}\nRss: 0 kB\nPss: 0 kB\nShared_Hugetlb: 0 kB\nPrivate_Hugetlb: 204800 kB\n");
    let all = classify(&parse(&text));
    let own = all.own.values().next().unwrap();
    assert_eq!((own.resident, own.proportional), (200 << 20, 200 << 20));
}

fn memory_file(id: FileId, allocated: u64) -> OpenFile {
    OpenFile {
        id,
        name: "/memfd:guest-memory (deleted)".into(),
        guest_memory: true,
        allocated,
        ..OpenFile::default()
    }
}

fn vm(name: &str, files: Vec<OpenFile>) -> VmReading {
    VmReading {
        name: name.into(),
        memory: 128 << 20,
        shard: classify(&parse(&shard())),
        page_tables: 100 * KIB,
        files,
        monitor_part: 1_000 * KIB,
        monitor_part_swapped: 0,
    }
}

#[test]
fn columns_of_a_vm_sum_to_its_host_memory() {
    let table = account(
        &[vm(
            "a",
            vec![memory_file(OWN, 63_000 * KIB), memory_file(PARENT, 9_000 * KIB)],
        )],
        &[],
        HostMemory::default(),
    );
    let a = &table.vms[0];
    // 63,000 allocated, 60,000 mapped, 1,000 swapped out; of the parent's 9,000, 3,000 are this VM's part of
    // the mapped.
    assert_eq!(a.private_bytes, (60_000 + 2_000 + 6_000) * KIB);
    assert_eq!(a.base_bytes, 3_000 * KIB);
    assert_eq!(a.base_resident_bytes, 11_000 * KIB);
    assert_eq!(a.clone_bytes, 3_000 * KIB);
    assert_eq!(a.copied_bytes, 2_000 * KIB);
    assert_eq!(a.swapped_bytes, (1_000 + 8 + 20) * KIB);
    assert_eq!(a.monitor_bytes, (1_060 + 100 + 1_000) * KIB);
    let sum =
        a.base_bytes + a.clone_bytes + a.private_bytes + a.copied_bytes + a.disk_bytes + a.monitor_bytes;
    assert_eq!(a.host_bytes, sum);
}

#[test]
fn unmapped_frozen_memory_is_divided_among_clones() {
    let clone = |name: &str| {
        let mut vm = vm(name, vec![memory_file(PARENT, 12_000 * KIB)]);
        vm.shard.own.clear();
        vm
    };
    let table = account(&[clone("a"), clone("b")], &[], HostMemory::default());
    // Both map 3,000 in part, so 6,000 in all.
    assert_eq!(table.vms[0].private_bytes, 3_000 * KIB);
    assert_eq!(table.total.private_bytes, 6_000 * KIB);
}

#[test]
fn writable_file_pages_count_for_the_vm_and_read_only_ones_as_shared() {
    let overlay = FileId {
        device: (0xfe, 1),
        inode: 5,
    };
    let written = OpenFile {
        id: overlay,
        name: "/var/tmp/#5 (deleted)".into(),
        writable: true,
        ..OpenFile::default()
    };
    let files = [
        FileReading {
            id: overlay,
            resident: Some(700 * KIB),
            ..FileReading::default()
        },
        FileReading {
            id: IMAGE,
            name: "root.raw".into(),
            resident: Some(50_000 * KIB),
            mapped_elsewhere: 0,
        },
        FileReading {
            id: PROGRAM,
            name: "mirrorball".into(),
            resident: Some(3_000 * KIB),
            mapped_elsewhere: 900 * KIB,
        },
    ];
    let meminfo = "MemTotal:  1000000 kB\nMemFree:   500000 kB\nSecPageTables: 400 kB\nSlab: 10 kB\n\
        KernelStack: 5 kB\n";
    let zones = "    pagesets\n    cpu: 0\n              count: 25\n    cpu: 1\n              count:    0\n";
    let host = HostMemory::of(meminfo, zones);
    assert_eq!(host.used_bytes, (500_000 - 100) * KIB);
    assert_eq!(
        (host.kvm_page_tables_bytes, host.kernel_bytes),
        (400 * KIB, 15 * KIB)
    );
    let table = account(&[vm("a", vec![written])], &files, host);
    assert_eq!(table.vms[0].disk_bytes, 700 * KIB);
    let names: Vec<_> = table
        .files
        .iter()
        .map(|file| (file.path.as_str(), file.unmapped_bytes / KIB))
        .collect();
    assert_eq!(names, [("root.raw", 47_000), ("mirrorball", 1_500)]);
    let sum = table.host;
    assert_eq!(sum.files_unmapped_bytes, 48_500 * KIB);
    assert_eq!(
        sum.vms_bytes + sum.files_unmapped_bytes + sum.memory.kvm_page_tables_bytes + sum.rest_bytes,
        sum.memory.used_bytes
    );
}

#[test]
fn gateway_is_a_part_of_the_host_and_no_longer_of_the_rest() {
    let host = HostMemory {
        used_bytes: 10_000 * KIB,
        ..HostMemory::default()
    };
    let mut table = account(&[], &[], host);
    table.add_gateway(GatewayMemory {
        pid: 7,
        host_bytes: 4_000 * KIB,
    });
    assert_eq!(table.host.rest_bytes, 6_000 * KIB);
    // More than the host uses is possible, as the two are read one after the other.
    table.add_gateway(GatewayMemory {
        pid: 7,
        host_bytes: u64::MAX,
    });
    assert_eq!(table.host.rest_bytes, 0);
}

#[test]
fn this_process_can_be_read() {
    let me = std::process::id();
    // At least the stack of this thread.
    assert!(process::own_memory(me).unwrap() > 16 * KIB);
    let areas = process::areas(me).unwrap();
    assert!(
        areas
            .iter()
            .any(|area| area.name == "[heap]" || area.anonymous > 0)
    );
    let Classified {
        monitor, programs, ..
    } = helper(&areas);
    assert!(
        monitor > 100 * KIB && !programs.is_empty(),
        "{monitor} bytes, {programs:?}"
    );
    assert!(process::page_tables(me).unwrap() > 0);
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let found = process::open_files(me).unwrap();
    assert!(
        found
            .iter()
            .any(|file| file.name.contains("(deleted)") && file.writable)
    );
    let program = process::program(me).unwrap();
    assert!(
        programs.contains_key(&program.id),
        "{program:?} is not in {programs:?}"
    );
}

#[test]
fn total_is_the_sum_of_every_column() {
    let overlay = FileId {
        device: (0xfe, 1),
        inode: 5,
    };
    let written = OpenFile {
        id: overlay,
        writable: true,
        ..OpenFile::default()
    };
    let on_disk = FileReading {
        id: overlay,
        resident: Some(700 * KIB),
        ..FileReading::default()
    };
    let second = VmReading {
        memory: 64 << 20,
        page_tables: 7 * KIB,
        monitor_part: 5 * KIB,
        monitor_part_swapped: 3 * KIB,
        ..vm("b", vec![memory_file(OWN, 63_000 * KIB)])
    };
    let table = account(
        &[vm("a", vec![written]), second],
        &[on_disk],
        HostMemory::default(),
    );
    let columns = |row: &VmMemory| {
        [
            ("memory", row.memory_bytes),
            ("host", row.host_bytes),
            ("base resident", row.base_resident_bytes),
            ("base", row.base_bytes),
            ("clone resident", row.clone_resident_bytes),
            ("clone", row.clone_bytes),
            ("private", row.private_bytes),
            ("copied", row.copied_bytes),
            ("disk", row.disk_bytes),
            ("monitor", row.monitor_bytes),
            ("swapped", row.swapped_bytes),
        ]
    };
    let (a, b) = (columns(&table.vms[0]), columns(&table.vms[1]));
    for (((name, sum), (_, a)), (_, b)) in columns(&table.total).into_iter().zip(a).zip(b) {
        assert_eq!(sum, a + b, "{name}");
        assert!(sum > 0, "no bytes of {name} are tested");
    }
    assert_eq!(table.total.guest_used_bytes, None);
    // Only guests with a balloon report their use.
    let mut total = VmMemory::default();
    for used in [Some(5), None, Some(7)] {
        total.add(&VmMemory {
            guest_used_bytes: used,
            ..VmMemory::default()
        });
    }
    assert_eq!(total.guest_used_bytes, Some(12));
}

#[test]
fn swapped_frozen_memory_counts_once_for_all_clones() {
    let clone = |name: &str| {
        let mut vm = vm(name, vec![memory_file(PARENT, 12_000 * KIB)]);
        vm.shard.own.clear();
        vm.shard.base.clear();
        vm.shard.monitor_swapped = 0;
        // Each clone sees all of the file that is swapped out.
        vm.shard.frozen.get_mut(&PARENT).unwrap().swapped_of_file = 2_000 * KIB;
        vm
    };
    let table = account(&[clone("a"), clone("b")], &[], HostMemory::default());
    // Both map 3,000 in part and 2,000 are swapped out, so 4,000 of 12,000 are in memory unmapped.
    for vm in &table.vms {
        assert_eq!((vm.swapped_bytes, vm.private_bytes), (1_000 * KIB, 2_000 * KIB));
    }
    assert_eq!(table.total.swapped_bytes, 2_000 * KIB);
}

#[test]
fn largest_files_come_first_and_those_without_cached_pages_are_left_out() {
    let file = |inode, name: &str, resident| FileReading {
        id: FileId {
            device: (1, 1),
            inode,
        },
        name: name.into(),
        resident,
        ..FileReading::default()
    };
    let files = [
        file(1, "small", Some(KIB)),
        file(2, "none", Some(0)),
        file(3, "large", Some(9 * KIB)),
        file(4, "unknown", None),
    ];
    let table = account(&[], &files, HostMemory::default());
    let names: Vec<_> = table.files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(names, ["large", "small", "unknown"]);
}

#[test]
fn excepted_processes_are_no_descendants() {
    let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
    let me = std::process::id();
    let (all, without) = (
        process::descendants(me, &[]),
        process::descendants(me, &[child.id()]),
    );
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(all.contains(&child.id()), "{all:?}");
    assert!(!without.contains(&child.id()), "{without:?}");
}
