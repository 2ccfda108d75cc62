//! Risk: VMs that share memory see each other's bytes, or share none of the pages that they read.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_tests::command::Call;
use guest_tests::pattern::Numbers;
use guest_tests::vm::{SHARE_BETWEEN_ALL, SHARE_BETWEEN_GROUP};
use guest_tests::{Scratch, Vm, VmFile, mirrorball, wait};
use serde_json::Value;

const FILE_BYTES: usize = 24 << 20;
const PAGE_BYTES: u64 = 4096;
/// Time limit until the background has shared the pages that were read.
const SETTLE_LIMIT: Duration = Duration::from_secs(270);

/// An ext4 image with one file of random bytes.
fn file_system(scratch: &Scratch) -> PathBuf {
    let mut bytes = vec![0; FILE_BYTES];
    Numbers::new(7).fill(&mut bytes);
    let tree = scratch.join("tree");
    fs::create_dir(&tree).expect("a directory");
    fs::write(tree.join("file"), &bytes).expect("a file");
    let image = scratch.sparse("base.ext4", 64 << 20);
    Call::new("mke2fs")
        .args(["-q", "-t", "ext4", "-b", "4096", "-d"])
        .args([&tree, &image])
        .ok();
    image
}

fn start(scratch: &Scratch, name: &str, image: &Path, share: &str) -> Vm {
    let file = VmFile::new(name)
        .memory("256M")
        .disk(image, &format!("share = \"{share}\""))
        .host_file(SHARE_BETWEEN_ALL);
    let vm = with_program(file, share).start(scratch);
    vm.sh("mount -t ext4 /dev/vda /mnt");
    vm
}

/// The guest's own SHA-256 of the file, which brings it into the guest's page cache.
fn read(vm: &Vm) -> String {
    vm.sh("sha256sum /mnt/file")
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn sha256(path: &Path) -> String {
    let output = Call::new("sha256sum").args([path]).ok().text();
    output.split_whitespace().next().unwrap_or_default().to_owned()
}

fn counter(vm: &Vm, name: &str) -> u64 {
    let seen = vm.inspect();
    let find = |value: &Value| {
        value
            .pointer(&format!("/status/sharing/pages/{name}"))
            .and_then(Value::as_u64)
    };
    find(&seen).unwrap_or_else(|| panic!("no counter {name} in {seen:#}"))
}

/// Pages that were mapped, at once or later.
fn mapped(vm: &Vm) -> u64 {
    counter(vm, "mapped_later") + counter(vm, "mapped_at_read")
}

/// Waits until the VM's counters show `pages` mapped pages beyond those of the start.
fn wait_shared(vm: &Vm, pages: u64) {
    wait::until("the file's pages to be shared", SETTLE_LIMIT, || {
        (mapped(vm) >= pages).then_some(())
    });
}

/// Bytes that both guests read at once of this test's program, as a read-only disk.
const PROGRAM_BYTES: u64 = 768 << 10;

/// Adds this program as the second disk. In a lab host it lies on the root, which is 9p: there `flock` is a
/// POSIX lock of the whole file, which the look for other share groups must distinguish from a claim.
fn with_program(file: VmFile, share: &str) -> VmFile {
    let program = std::env::current_exe().expect("a program");
    file.disk(
        &program,
        &format!("format = \"raw\"\nread_only = true\nshare = \"{share}\""),
    )
}

/// Parts of the program that are tried, of [`PROGRAM_BYTES`] each.
const PARTS: u64 = 3;

/// Both guests read the second disk, and have its pages in common. A lone page is not shared while the host
/// has memory: a guest with fragmented memory reads another part once it has compacted that.
fn share_program(scratch: &Scratch, vms: [&Vm; 2]) {
    let program = fs::File::open(std::env::current_exe().expect("a program")).expect("it can be read");
    let sums: Vec<String> = (0..PARTS)
        .map(|part| {
            let mut bytes = vec![0; PROGRAM_BYTES as usize];
            program
                .read_exact_at(&mut bytes, part * PROGRAM_BYTES)
                .expect("it is longer");
            sha256(&scratch.write("part", &bytes))
        })
        .collect();
    for vm in vms {
        let is_shared = (0..PARTS).zip(&sums).any(|(part, wanted)| {
            if part > 0 {
                vm.sh("echo 1 >/proc/sys/vm/compact_memory");
            }
            let before = mapped(vm);
            let read =
                format!("dd if=/dev/vdb bs={PROGRAM_BYTES} count=1 skip={part} 2>/dev/null | sha256sum");
            let read = vm.sh(&read);
            assert!(read.starts_with(wanted), "{read}");
            let pages = before + PROGRAM_BYTES / PAGE_BYTES * 8 / 10;
            wait::within(SETTLE_LIMIT / PARTS as u32, || {
                (mapped(vm) >= pages).then_some(())
            })
            .is_some()
        });
        assert!(is_shared, "no part of the program is shared by {}", vm.name());
    }
}

/// Both VMs read the file, share most of it, and write over it; neither sees the other's writes.
fn share_and_write(share: &str) {
    let scratch = Scratch::new(share);
    let image = file_system(&scratch);
    let whole = sha256(&image);
    let (one, other) = (
        start(&scratch, "one", &image, share),
        start(&scratch, "other", &image, share),
    );
    let wanted = read(&one);
    assert_eq!(read(&other), wanted, "two VMs read different bytes");
    let most = FILE_BYTES as u64 / PAGE_BYTES * 8 / 10;
    wait_shared(&one, most);
    wait_shared(&other, most);
    assert_eq!(read(&one), wanted, "sharing changed what a guest sees");
    share_program(&scratch, [&one, &other]);
    // Through the page cache, in the middle of a page and over whole ones.
    let write = |word: &str| {
        format!(
            "for at in 5 4099 81920 1000000 20000000; do \
             printf {word} | dd of=/mnt/file bs=1 seek=$at conv=notrunc 2>/dev/null; done; \
             yes {word} | dd of=/mnt/file bs=64k count=4 seek=16 conv=notrunc iflag=fullblock 2>/dev/null; \
             sync"
        )
    };
    one.sh(&write("canary"));
    assert_eq!(read(&other), wanted, "one VM's writes show in another");
    let changed = read(&one);
    assert_ne!(changed, wanted);
    other.sh(&write("canary"));
    assert_eq!(read(&other), changed, "the same writes give the same file");
    // Direct I/O reads the disk, not the guest's page cache.
    let direct = "echo 3 >/proc/sys/vm/drop_caches; sha256sum /mnt/file";
    assert!(
        one.sh(direct).starts_with(&changed),
        "a write got lost on its way to the disk"
    );
    assert_eq!(sha256(&image), whole, "the base was written");
    one.kill();
    other.kill();
}

#[test]
fn copies_are_shared_later_and_writes_stay_private() {
    share_and_write("deferred");
}

#[test]
fn reads_are_shared_at_once_and_writes_stay_private() {
    share_and_write("at-read");
}

#[test]
fn vm_whose_base_is_changed_ends_with_the_reason() {
    let scratch = Scratch::new("changed");
    let image = file_system(&scratch);
    let vm = start(&scratch, "changed", &image, "adaptive");
    let base = fs::OpenOptions::new().write(true).open(&image).expect("the base");
    base.write_at(b"x", 40 << 20).expect("a write to the base");
    vm.wait_ended(Duration::from_secs(20));
}

/// Shared pages are those of a file's page cache, so the VMs of two groups, and those of none, must have no
/// image file in common.
#[test]
fn share_groups_have_no_file_in_common() {
    let scratch = Scratch::new("groups");
    let image = file_system(&scratch);
    let sha256_of_file = sha256(&scratch.join("tree").join("file"));
    let start = |name: &str, group: Option<&str>| {
        let mut file = VmFile::new(name).disk(&image, "").host_file(SHARE_BETWEEN_ALL);
        if let Some(group) = group {
            file = file.key("share_group", &format!("{group:?}"));
        }
        let vm = file.start(&scratch);
        vm.sh("mount -t ext4 /dev/vda /mnt");
        assert_eq!(read(&vm), sha256_of_file);
        vm
    };
    let (red, blue) = (Group::new("red"), Group::new("blue"));
    let vms = [
        start("red-1", Some(&red.0)),
        start("red-2", Some(&red.0)),
        start("blue", Some(&blue.0)),
        start("none", None),
    ];
    let images: Vec<Vec<(u64, u64)>> = vms.iter().map(open_images).collect();
    assert_eq!(images[0], images[1], "VMs of one group use the same files");
    for (one, other) in [(0, 2), (0, 3), (2, 3)] {
        let common: Vec<_> = images[one]
            .iter()
            .filter(|file| images[other].contains(file))
            .collect();
        assert!(
            common.is_empty(),
            "{} and {} share {common:?}",
            vms[one].name(),
            vms[other].name()
        );
        assert_eq!(images[one].len(), images[other].len());
    }
    expect_kept_apart(&scratch, &image, &vms[3]);
}

/// By the host's file VMs of two commands are of two groups: the second one may not map the files of the
/// first. Guests need not boot for that.
fn expect_kept_apart(scratch: &Scratch, image: &Path, first: &Vm) {
    let disk = |more: &str| {
        VmFile::new("apart")
            .disk(image, more)
            .host_file(SHARE_BETWEEN_GROUP)
    };
    let vm = disk("share = \"at-read\"").start_only(scratch);
    let (one, other) = (first.inspect(), vm.inspect());
    assert_ne!(one["share_group"], other["share_group"]);
    let apart = other["kept_apart"].as_array().expect("files of another group's");
    let path = Value::String(image.to_string_lossy().into_owned());
    assert!(apart.contains(&path), "{path} is mapped by two groups: {other:#}");
    assert_eq!(other["spec"]["disks"][0]["share"], "never", "{other:#}");
    vm.kill();
    let mapped = disk("as = \"pmem\"").write(scratch);
    let host = scratch.write("host.toml", SHARE_BETWEEN_GROUP);
    let refused = mirrorball(["run", "-d"])
        .args([&mapped])
        .env("MIRRORBALL_HOST_FILE", host)
        .run()
        .expect(1);
    assert!(
        refused.errors().contains("VMs of another share group map it"),
        "{refused}"
    );
}

/// A group whose copies of images go with the test.
struct Group(String);

impl Group {
    fn new(name: &str) -> Self {
        Self(format!("t-{name}-{}", std::process::id()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let directory = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let data = directory("MIRRORBALL_DATA")
            .or_else(|| Some(directory("XDG_DATA_HOME")?.join("mirrorball")))
            .or_else(|| Some(directory("HOME")?.join(".local/share/mirrorball")));
        if let Some(data) = data {
            let _ = fs::remove_dir_all(data.join("groups").join(&self.0));
        }
    }
}

/// Device and inode of the files with a name on a disk that the VM's shard has open or mapped for its guest.
fn open_images(vm: &Vm) -> Vec<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let shard = vm.listed().expect("it runs")["shard_pid"]
        .as_i64()
        .expect("a process");
    let mut images = Vec::new();
    for entry in fs::read_dir(format!("/proc/{shard}/fd"))
        .expect("its files")
        .flatten()
    {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let is_image = ["vmlinux", "initrd", ".ext4"]
            .iter()
            .any(|end| target.to_string_lossy().ends_with(end))
            || target.to_string_lossy().contains("/groups/");
        if let (true, Ok(about)) = (is_image, fs::metadata(entry.path())) {
            images.push((about.dev(), about.ino()));
        }
    }
    images.sort_unstable();
    images.dedup();
    images
}
