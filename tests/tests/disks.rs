//! Risk: a disk loses writes, keeps writes that it should drop, reaches the wrong file, or is used by two
//! VMs.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest_tests::command::{BOOT_LIMIT, Call, Running};
use guest_tests::pattern::{DiskWrites, Numbers, digest};
use guest_tests::{Scratch, Vm, VmFile, host, mirrorball, wait};

const DISK_BYTES: usize = 16 << 20;
const WRITES: u32 = 150;

fn random_bytes(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; DISK_BYTES];
    Numbers::new(seed).fill(&mut bytes);
    bytes
}

/// A disk of the test: the contents of its file, and those that the guest should see.
struct Disk {
    label: &'static str,
    path: PathBuf,
    keeps: bool,
    base: Vec<u8>,
    written: Vec<u8>,
}

impl Disk {
    fn new(label: &'static str, path: PathBuf, keeps: bool, base: Vec<u8>) -> Self {
        let written = base.clone();
        Self {
            label,
            path,
            keeps,
            base,
            written,
        }
    }
}

fn device(index: usize) -> String {
    format!("/dev/vd{}", char::from(b'a' + index as u8))
}

#[track_caller]
fn expect_digest(vm: &Vm, index: usize, wanted: &[u8], what: &str) {
    let found = vm.tool(&["disk-digest", &device(index)]).ok().text();
    assert_eq!(found.trim(), digest(wanted), "{what} ({})", device(index));
}

fn qemu_img(arguments: &[&str], path: &Path) {
    Call::new("qemu-img").args(arguments).args([path]).ok();
}

/// The overlays that Mirrorball keeps for this VM in the user's data directory, removed with the test.
struct KeptOverlays(PathBuf);

impl KeptOverlays {
    fn of(vm: &str) -> Self {
        Self(host::data_directory().join("overlays").join(vm))
    }
}

impl Drop for KeptOverlays {
    fn drop(&mut self) {
        // There are none when the VM never started.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A disk of each mode and format, of which one has `backing` as its backing file, and a VM file with them.
fn disks_of_every_mode(scratch: &Scratch, backing: &Path) -> ([Disk; 6], VmFile) {
    let raw = |name: &str, seed: u64| scratch.write(name, random_bytes(seed));
    let chain = scratch.join("chain.qcow2");
    let backing_name = backing.to_str().expect("a path in ASCII");
    Call::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", backing_name])
        .args([&chain])
        .ok();
    let alone = scratch.join("alone.qcow2");
    Call::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .args([alone.as_os_str(), "16M".as_ref()])
        .ok();
    let disks = [
        Disk::new("private", raw("private", 1), false, random_bytes(1)),
        Disk::new("private, persistent", raw("kept", 2), true, random_bytes(2)),
        Disk::new("exclusive", raw("exclusive", 3), false, random_bytes(3)),
        Disk::new("exclusive, persistent", raw("own", 4), true, random_bytes(4)),
        Disk::new(
            "qcow2 with a backing file, exclusive, persistent",
            chain,
            true,
            random_bytes(5),
        ),
        Disk::new("qcow2, exclusive, persistent", alone, true, vec![0; DISK_BYTES]),
    ];
    let mut file = VmFile::new("modes");
    for disk in &disks {
        let mode = if disk.label.contains("private") {
            "private"
        } else {
            "exclusive"
        };
        let format = if disk.label.starts_with("qcow2") {
            "qcow2"
        } else {
            "raw"
        };
        let persistent = disk.label.contains("persistent");
        file = file.disk(
            &disk.path,
            &format!("mode = \"{mode}\"\npersistent = {persistent}\nformat = \"{format}\""),
        );
    }
    (disks, file)
}

#[test]
fn every_disk_mode_keeps_or_forgets_its_writes() {
    let scratch = Scratch::new("modes");
    let backing = scratch.write("backing", random_bytes(5));
    let (mut disks, file) = disks_of_every_mode(&scratch, &backing);
    let _kept = KeptOverlays::of(file.name());

    let vm = file.start(&scratch);
    vm.add_tool();
    for (index, disk) in disks.iter_mut().enumerate() {
        expect_digest(&vm, index, &disk.base, &format!("{}: first sight", disk.label));
        let seed = 100 + index as u64;
        vm.tool(&[
            "disk-write",
            &device(index),
            &seed.to_string(),
            &WRITES.to_string(),
        ])
        .ok();
        DiskWrites::new(seed, WRITES, DISK_BYTES as u64).apply(&mut disk.written);
        expect_digest(
            &vm,
            index,
            &disk.written,
            &format!("{}: after the writes", disk.label),
        );
    }
    vm.reboot();
    vm.add_tool();
    for (index, disk) in disks.iter().enumerate() {
        expect_digest(
            &vm,
            index,
            &disk.written,
            &format!("{}: after a reboot", disk.label),
        );
    }
    vm.stop();
    vm.wait_ended(Duration::from_secs(10));

    for disk in &disks[..4] {
        let in_file = if disk.label == "exclusive, persistent" {
            &disk.written
        } else {
            &disk.base
        };
        let found = fs::read(&disk.path).expect("the disk's file is still there");
        assert_eq!(
            digest(&found),
            digest(in_file),
            "{}: the file after the VM",
            disk.label
        );
    }
    let found = fs::read(&backing).expect("the backing file is still there");
    assert_eq!(
        digest(&found),
        digest(&disks[4].base),
        "the backing file was written"
    );
    for disk in &disks[4..] {
        qemu_img(&["check", "-q", "-f", "qcow2"], &disk.path);
    }

    let vm = file.start(&scratch);
    vm.add_tool();
    for (index, disk) in disks.iter().enumerate() {
        let wanted = if disk.keeps { &disk.written } else { &disk.base };
        expect_digest(&vm, index, wanted, &format!("{}: in the next VM", disk.label));
    }
    vm.kill();
}

#[test]
fn an_exclusive_disk_refuses_a_second_vm_and_names_the_first() {
    let scratch = Scratch::new("exclusive");
    let path = scratch.sparse("disk", 1 << 20);
    let exclusive = "mode = \"exclusive\"\npersistent = true";
    let first = VmFile::new("holder").disk(&path, exclusive).start_only(&scratch);
    for (name, more) in [("second", exclusive), ("reader", "mode = \"private\"")] {
        let file = VmFile::new(name).disk(&path, more).write(&scratch);
        let refused = mirrorball(["run", "-d"]).args([&file]).run().expect(1);
        let message = refused.errors();
        assert!(
            message.contains(first.name()),
            "does not name the holder {}:\n{refused}",
            first.name()
        );
        assert!(
            message.contains(path.to_str().expect("ASCII")),
            "does not name the disk:\n{refused}"
        );
    }
    first.kill();
    first.wait_ended(Duration::from_secs(10));
    VmFile::new("second").disk(&path, exclusive).start_only(&scratch);
}

#[test]
fn disk_with_limits_takes_its_time_until_they_are_taken_away() {
    let scratch = Scratch::new("limits");
    let path = scratch.sparse("disk", 16 << 20);
    let limited = "bandwidth = \"1M\"\noperations = 1000";
    let vm = VmFile::new("limited").disk(&path, limited).start_only(&scratch);
    let waits = || vm.counters("disk0")["limit_waits"].as_u64().expect("a count");
    let read = |from: usize| {
        vm.sh(&format!(
            "dd if=/dev/vda of=/dev/null bs=65536 count=64 skip={from}"
        ))
    };
    let start = Instant::now();
    read(0);
    // 4 MiB, of which 0.1 come at once.
    assert!(start.elapsed() >= Duration::from_secs(3), "{:?}", start.elapsed());
    assert!(waits() > 0);
    let refused = mirrorball(["update", vm.name(), "--disk", "1,operations=5"]).run();
    assert!(refused.expect(1).errors().contains("no disk 1"));
    let refused = mirrorball(["update", vm.name(), "--disk", "root,operations=5"]).run();
    assert!(refused.expect(1).errors().contains("no root disk"));
    mirrorball(["update", vm.name(), "--disk", "0,bandwidth=none,operations=none"]).ok();
    let before = waits();
    read(64);
    assert_eq!(waits(), before);
    // The change holds after a reboot.
    mirrorball(["update", vm.name(), "--disk", "0,bandwidth=1M"]).ok();
    mirrorball(["reset", vm.name()]).ok();
    vm.wait_up();
    let before = waits();
    read(128);
    assert!(waits() > before);
}

#[test]
fn vms_with_one_private_disk_do_not_see_each_others_writes() {
    let scratch = Scratch::new("private");
    let base = random_bytes(9);
    let path = scratch.write("disk", &base);
    let files = ["left", "right"].map(|name| VmFile::new(name).disk(&path, ""));
    let vms = files.map(|file| file.start_only(&scratch));
    let mut seen = Vec::new();
    for (index, vm) in vms.iter().enumerate() {
        vm.wait_up();
        vm.add_tool();
        let seed = 50 + index as u64;
        vm.tool(&["disk-write", "/dev/vda", &seed.to_string(), &WRITES.to_string()])
            .ok();
        let mut written = base.clone();
        DiskWrites::new(seed, WRITES, DISK_BYTES as u64).apply(&mut written);
        seen.push(written);
    }
    for (vm, written) in vms.iter().zip(&seen) {
        expect_digest(vm, 0, written, vm.name());
    }
}

/// Cuts the power while the guest writes and flushes; every flush that the guest saw done must have lasted.
fn flushes_last(name: &str, pull: impl FnOnce(&Vm) -> Vec<u32>) {
    let scratch = Scratch::new(name);
    let raw = scratch.sparse("raw", DISK_BYTES as u64);
    let qcow2 = scratch.join("qcow2");
    Call::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .args([qcow2.as_os_str(), "16M".as_ref()])
        .ok();
    let file = VmFile::new(name)
        .cpus(2)
        .disk(&raw, "mode = \"exclusive\"\npersistent = true\nformat = \"raw\"")
        .disk(
            &qcow2,
            "mode = \"exclusive\"\npersistent = true\nformat = \"qcow2\"",
        );
    let vm = file.start(&scratch);
    vm.add_tool();
    let mut writers = [0, 1].map(|disk| vm.tool(&["disk-mark", &device(disk), "4000"]).spawn());
    for writer in &mut writers {
        writer.wait_for("flushed 30\n", Duration::from_secs(30));
    }
    let gone = pull(&vm);
    host::wait_gone(&gone, Duration::from_secs(10));
    let last_flushed = writers.map(|writer| {
        let said = writer.wait().text();
        let numbers = said
            .lines()
            .filter_map(|line| line.strip_prefix("flushed ")?.parse::<u64>().ok());
        numbers.max().expect("at least 30")
    });
    vm.wait_ended(Duration::from_secs(10));

    let vm = file.start(&scratch);
    vm.add_tool();
    for (disk, last) in last_flushed.iter().enumerate() {
        let lasted: u64 = vm
            .tool(&["disk-marks", &device(disk)])
            .ok()
            .text()
            .trim()
            .parse()
            .expect("a number");
        assert!(
            lasted > *last,
            "{}: block {last} was flushed, but only {lasted} blocks lasted",
            device(disk)
        );
    }
    vm.kill();
    vm.wait_ended(Duration::from_secs(10));
    qemu_img(&["check", "-q", "-f", "qcow2", "-r", "leaks"], &qcow2);
}

#[test]
fn flushed_writes_outlive_a_killed_shard() {
    flushes_last("flush-shard", |vm| {
        let shard = vm.shard();
        host::kill9(shard);
        vec![shard]
    });
}

#[test]
fn flushed_writes_outlive_a_killed_keeper_whose_shard_dies_too() {
    flushes_last("flush-keeper", |vm| {
        let both = vec![vm.keeper(), vm.shard()];
        host::kill9(both[0]);
        both
    });
}

#[test]
fn a_discard_gives_room_back_a_full_overlay_is_an_error_and_a_read_only_disk_takes_no_write() {
    let scratch = Scratch::new("discard");
    let full = scratch.write("full", random_bytes(11));
    let fixed = scratch.write("fixed", random_bytes(12));
    let limited = scratch.write("limited", random_bytes(13));
    let vm = VmFile::new("discard")
        .key("scratch_limit", "\"4M\"")
        .disk(&full, "mode = \"exclusive\"\npersistent = true")
        .disk(&fixed, "read_only = true")
        .disk(&limited, "")
        .start(&scratch);
    vm.add_tool();
    let blocks = |path: &Path| fs::metadata(path).expect("the disk's file").blocks() * 512;
    let before = blocks(&full);
    vm.sh("blkdiscard -o 0 -l 8388608 /dev/vda");
    let after = blocks(&full);
    assert!(
        after + (7 << 20) <= before,
        "{before} bytes before, {after} after discarding 8 MiB"
    );
    let mut wanted = random_bytes(11);
    wanted[..8 << 20].fill(0);
    expect_digest(&vm, 0, &wanted, "a discarded range reads as zeroes");
    expect_digest(&vm, 1, &random_bytes(12), "the read-only disk");
    let refused = vm.tool(&["disk-write", "/dev/vdb", "1", "1"]).run();
    assert_eq!(refused.status, 1, "a read-only disk took a write:\n{refused}");
    let write = |from: u64| {
        let of = format!("of=/dev/vdc bs=64k seek={from} count=48 conv=fsync");
        format!("dd if=/dev/urandom {of} 2>/dev/null")
    };
    // 3 MiB of 4, 3 more, and the first again: the guest goes on.
    vm.sh(&write(0));
    vm.sh(&format!("! {}", write(64)));
    vm.sh(&write(0));
    vm.kill();
}

/// A file system in memory, in a mount namespace of its own, which an ordinary user may make. Its files are
/// reached through the process that holds the namespace. Dropping this ends the process.
struct SmallFileSystem {
    holder: Running,
    path: PathBuf,
}

impl SmallFileSystem {
    fn new(scratch: &Scratch, bytes: usize) -> Self {
        let place = scratch.join("small");
        fs::create_dir(&place).expect("our own directory");
        let script = "mount -t tmpfs -o size=$1 none \"$0\" && echo mounted && exec sleep 1000";
        // `unshare` and the shell become `sleep`: one process all along.
        let mut holder = Call::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
            .args([place.as_os_str(), bytes.to_string().as_ref()])
            .spawn();
        holder.wait_for("mounted", Duration::from_secs(30));
        let root = PathBuf::from(format!("/proc/{}/root", holder.pid()));
        let below = place.strip_prefix("/").expect("a whole path");
        let path = root.join(below);
        Self { holder, path }
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        self.holder.signal(nix::sys::signal::Signal::SIGKILL);
    }
}

#[test]
fn writes_that_find_no_room_wait_for_it_with_on_full_pause_and_none_is_lost() {
    const HALF: usize = DISK_BYTES / 2;
    let scratch = Scratch::new("pause");
    // The ballast leaves room for half of the disk.
    let small = SmallFileSystem::new(&scratch, 3 * HALF);
    let ballast = small.path.join("ballast");
    fs::write(&ballast, vec![1; 2 * HALF]).expect("room for the ballast");
    let path = small.path.join("disk");
    let sparse = fs::File::create(&path).and_then(|file| file.set_len(DISK_BYTES as u64));
    sparse.expect("a sparse file takes no room");
    let vm = VmFile::new("pause")
        .disk(
            &path,
            "mode = \"exclusive\"\npersistent = true\nformat = \"raw\"\non_full = \"pause\"",
        )
        .start(&scratch);
    vm.add_tool();
    let written = random_bytes(14);
    vm.put(&scratch.write("bytes", &written), "/tmp/bytes");
    let state = || {
        let list = mirrorball(["ps"]).ok().text();
        let line = list.lines().find(|line| line.starts_with(vm.name()));
        line.expect("the VM is listed").to_owned()
    };
    assert!(!state().contains("disk full"), "{}", state());

    let mut writer = vm
        .exec(["dd", "if=/tmp/bytes", "of=/dev/vda", "bs=64k", "conv=fsync"])
        .spawn();
    wait::until("the VM to report its full disk", Duration::from_secs(60), || {
        state().contains("disk full").then_some(())
    });
    let known = vm.inspect();
    assert_eq!(known["full_disks"], serde_json::json!(["disk0"]), "{known:#}");
    let waiting = vm.counters("disk0")["waiting"].as_u64();
    assert!(waiting.is_some_and(|count| count > 0), "waiting: {waiting:?}");
    // Only the writes wait: the guest's CPU goes on, and no error reaches it.
    vm.sh("true");
    assert!(!writer.has_ended(), "a write ended without room");

    fs::remove_file(&ballast).expect("our own file");
    writer.wait().expect(0);
    wait::until("the VM to report room", Duration::from_secs(60), || {
        (!state().contains("disk full")).then_some(())
    });
    let known = vm.inspect();
    assert!(known["full_disks"].is_null(), "{known:#}");
    assert_eq!(vm.counters("disk0")["waiting"], 0);
    expect_digest(&vm, 0, &written, "after there was room");
    vm.stop();
    vm.wait_ended(Duration::from_secs(10));
    let found = fs::read(&path).expect("the disk's file is still there");
    assert_eq!(digest(&found), digest(&written), "the file after the VM");
}

/// An ext4 disk whose init prints a file of the root to the console, and writes another file to the root.
fn bootable_disk(scratch: &Scratch, contents: &Path) -> PathBuf {
    let root = scratch.join("root");
    for folder in ["bin", "sbin", "dev", "proc", "sys"] {
        fs::create_dir_all(root.join(folder)).expect("our own directory");
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static is installed");
    fs::copy(contents, root.join("contents")).expect("our own file");
    let script = "#!/bin/busybox sh\n\
                  b=/bin/busybox\n\
                  exec >/dev/ttyS0 2>&1\n\
                  $b grep ' / ' /proc/mounts\n\
                  $b sha256sum /contents\n\
                  $b dd if=/contents of=/written && $b sync && echo written-$((20 + 3))\n\
                  while :; do $b sleep 1000; done\n";
    let init = root.join("sbin/init");
    fs::write(&init, script).expect("our own directory");
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).expect("our own file");
    let disk = scratch.join("disk");
    Call::new("mke2fs")
        .args(["-q", "-t", "ext4", "-d"])
        .args([root.as_os_str(), disk.as_os_str(), "32M".as_ref()])
        .ok();
    disk
}

#[test]
fn a_guest_boots_from_an_imported_disk_raw_or_qcow2_and_leaves_the_image_unchanged() {
    let scratch = Scratch::new("import");
    let contents = scratch.write("contents", &random_bytes(13)[..4 << 20]);
    let sum = Call::new("sha256sum").args([&contents]).ok().text();
    let sum = sum.split(' ').next().expect("a checksum");
    let raw = bootable_disk(&scratch, &contents);
    let qcow2 = scratch.join("disk.qcow2");
    Call::new("qemu-img")
        .args(["convert", "-q", "-f", "raw", "-O", "qcow2"])
        .args([&raw, &qcow2])
        .ok();
    let tiny = host::data_directory().join("images").join(VmFile::TINY);
    let data = scratch.join("data");
    let ours = |call: Call| call.env("MIRRORBALL_DATA", &data);
    let kernel = |call: Call| {
        call.args(["--kernel".as_ref(), tiny.join("vmlinux").as_os_str()])
            .args(["--initrd".as_ref(), tiny.join("initrd").as_os_str()])
    };
    // One image has its own kernel; the other one is a disk, and gets a kernel by flags of `run`.
    let images = [("raw", &raw), ("qcow2", &qcow2)];
    let vms = images.map(|(format, disk)| {
        let import = mirrorball(["image", "import", "--name", format]).args([disk]);
        let vm = Vm::named(&format!("t-imported-{format}-{}", std::process::id()));
        let run = mirrorball(["run", "-d", "--memory", "128M", "--net", "none"]).args([
            "--image",
            format,
            "--name",
            vm.name(),
        ]);
        let (import, run) = match format {
            "raw" => (kernel(import), run),
            _ => (import, kernel(run)),
        };
        ours(import).ok();
        ours(run).ok();
        vm
    });
    let list = ours(mirrorball(["image", "ls", "--json"])).ok().json();
    for ((format, _), vm) in images.iter().zip(&vms) {
        let known = list.as_array().expect("a list").iter();
        let formats: Vec<_> = known.filter(|image| image["name"] == *format).collect();
        assert!(formats.len() == 1 && formats[0]["format"] == *format, "{list:#}");
        wait::until(&format!("the init of the {format} disk"), BOOT_LIMIT, || {
            vm.logs().contains("written-23").then_some(())
        });
        let console = vm.logs();
        assert!(console.contains("/dev/vda / ext4 rw"), "{console}");
        assert!(console.contains(&format!("{sum}  /contents")), "{console}");
        vm.kill();
        ours(mirrorball(["image", "verify", format])).ok();
    }
}
