//! Risk: persistent memory shows something else than its file, loses writes, or lets them reach other files.

use std::fs;
use std::path::{Path, PathBuf};

use guest_tests::command::Call;
use guest_tests::pattern::{DiskWrites, Numbers, digest};
use guest_tests::{Scratch, Vm, VmFile};

const MIB: usize = 1 << 20;

fn random_bytes(seed: u64, bytes: usize) -> Vec<u8> {
    let mut all = vec![0; bytes];
    Numbers::new(seed).fill(&mut all);
    all
}

#[track_caller]
fn expect_digest(vm: &Vm, device: &str, wanted: &[u8], what: &str) {
    let found = vm.tool(&["disk-digest", device]).ok().text();
    assert_eq!(found.trim(), digest(wanted), "{what} ({device})");
}

#[test]
fn writes_reach_the_file_only_where_they_may() {
    let scratch = Scratch::new("pmem");
    // Not a multiple of 2 MiB: the last pages of the region are not the file's.
    let base = random_bytes(1, 5 * MIB);
    let paths = ["private", "kept", "forgotten", "read-only"].map(|name| scratch.write(name, &base));
    let [private, kept, forgotten, read_only] = &paths;
    let vm = VmFile::new("pmem")
        .disk(private, "as = \"pmem\"")
        .disk(kept, "as = \"pmem\"\nmode = \"exclusive\"\npersistent = true")
        .disk(forgotten, "as = \"pmem\"\nmode = \"exclusive\"")
        .disk(read_only, "as = \"pmem\"\nread_only = true")
        .start(&scratch);
    vm.add_tool();
    let mut region = base.clone();
    region.resize(6 * MIB, 0);
    for disk in 0..4 {
        expect_digest(&vm, &format!("/dev/pmem{disk}"), &region, "before writing");
    }
    let mut written = region.clone();
    // Into the file's part alone, so that all of it is compared afterwards.
    let writes: Vec<_> = DiskWrites::new(2, 60, base.len() as u64).collect();
    for write in &writes {
        written[write.offset as usize..][..write.bytes.len()].copy_from_slice(&write.bytes);
    }
    let patch = scratch.write("patch", &written[..base.len()]);
    vm.put(&patch, "/tmp/patch");
    for disk in 0..4 {
        // Each refused word costs an exit: a minute for all 5 MiB in a lab host.
        let blocks = if disk == 3 { 1 } else { 80 };
        vm.sh(&format!(
            "dd if=/tmp/patch of=/dev/pmem{disk} bs=64k count={blocks} conv=fsync"
        ));
        vm.sh("echo 3 >/proc/sys/vm/drop_caches");
        let wanted = if disk == 3 { &region } else { &written };
        expect_digest(&vm, &format!("/dev/pmem{disk}"), wanted, "after writing");
        let counted = vm.counters(&format!("disk{disk}"));
        assert!(counted["flushes"].as_u64() >= Some(1), "disk {disk}: {counted}");
        assert_eq!(counted["failures"], 0);
    }
    vm.kill();
    let file = |path: &Path| fs::read(path).expect("a file of this test");
    assert!(
        file(kept) == written[..base.len()],
        "the exclusive persistent disk lost writes"
    );
    for path in [private, forgotten, read_only] {
        assert!(file(path) == base, "{} was changed", path.display());
    }
}

/// A file system of 24 MiB with `blob` in it.
fn file_system(scratch: &Scratch, name: &str, blob: &[u8]) -> PathBuf {
    let tree = scratch.join(&format!("{name}.tree"));
    fs::create_dir(&tree).expect("a new directory of this test");
    fs::write(tree.join("blob"), blob).expect("a new file of this test");
    let path = scratch.sparse(name, 24 * MIB as u64);
    // Direct access needs blocks of a page.
    Call::new("mke2fs")
        .args(["-q", "-t", "ext4", "-b", "4096", "-d"])
        .args([&tree, &path])
        .ok();
    path
}

#[test]
fn a_file_system_is_mapped_directly_and_other_devices_reach_it() {
    let scratch = Scratch::new("dax");
    let blob = random_bytes(3, 4 * MIB);
    let on_disk = random_bytes(4, 4 * MIB);
    let pmem = file_system(&scratch, "pmem.img", &blob);
    let before = fs::read(&pmem).expect("a file of this test");
    let disk = scratch.write("disk", &on_disk);
    let vm = VmFile::new("dax")
        .disk(&pmem, "as = \"pmem\"")
        .disk(&disk, "mode = \"exclusive\"\npersistent = true")
        .start(&scratch);
    vm.add_tool();
    vm.sh("mount -t ext4 -o dax /dev/pmem0 /mnt");
    let mounts = vm.sh("cat /proc/mounts");
    assert!(mounts.contains("dax=always"), "{mounts}");
    vm.get("/mnt/blob", &scratch.join("blob"));
    assert!(
        fs::read(scratch.join("blob")).expect("just copied") == blob,
        "the blob is another"
    );
    // Into the mapped file by the block device, and from there to the block device again.
    let met = vm.tool(&["dax-dma", "/mnt/blob", "/dev/vda", "4"]).ok().text();
    assert_eq!(met.trim(), digest(&on_disk));
    let changed: Vec<u8> = on_disk.iter().map(|byte| !byte).collect();
    vm.get("/mnt/blob", &scratch.join("blob"));
    assert!(
        fs::read(scratch.join("blob")).expect("just copied") == changed,
        "the mapped file is another"
    );
    vm.stop();
    assert!(
        fs::read(&disk).expect("a file of this test") == changed,
        "the block disk is another"
    );
    assert!(
        fs::read(&pmem).expect("a file of this test") == before,
        "the private base was changed"
    );
}
