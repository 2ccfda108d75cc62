//! Risk: a clone differs from its parent, sees the writes of its parent or of another clone, or has its
//! parent's identity.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use guest_tests::command::Call;
use guest_tests::pattern::Numbers;
use guest_tests::{Scratch, Vm, VmFile, mirrorball, net, wait};

const FILE_BYTES: usize = 8 << 20;
/// Time limit until clones run and answer, in a lab.
const CLONE_LIMIT: Duration = Duration::from_secs(120);

/// An ext4 image with one file of random bytes; the file's SHA-256 as `sha256sum` says it.
fn file_system(scratch: &Scratch) -> (PathBuf, String) {
    let mut bytes = vec![0; FILE_BYTES];
    Numbers::new(11).fill(&mut bytes);
    let tree = scratch.join("tree");
    fs::create_dir(&tree).expect("a directory");
    fs::write(tree.join("file"), &bytes).expect("a file");
    let image = scratch.sparse("base.ext4", 32 << 20);
    Call::new("mke2fs")
        .args(["-q", "-t", "ext4", "-b", "4096", "-d"])
        .args([&tree, &image])
        .ok();
    let sum = Call::new("sha256sum").args([tree.join("file")]).ok().text();
    (image, word(&sum).to_owned())
}

/// Clones a VM; the clones, which end with the test.
fn clones(parent: &Vm, count: u16) -> Vec<Vm> {
    let call = mirrorball(["clone", parent.name(), "--count", &count.to_string()]).limit(CLONE_LIMIT);
    let output = call.ok();
    let clones: Vec<Vm> = output.text().lines().map(Vm::named).collect();
    assert_eq!(clones.len(), usize::from(count), "{output}");
    clones
}

fn word(text: &str) -> &str {
    text.split_whitespace().next().unwrap_or_default()
}

/// Processes, files in memory, page cache and disk writes go on in each clone; its later writes are its own.
/// Promise SHARE-19.
#[test]
fn clones_go_on_where_their_parent_stood_and_apart() {
    let scratch = Scratch::new("apart");
    let (image, content) = file_system(&scratch);
    let parent = VmFile::new("parent").cpus(2).disk(&image, "").start(&scratch);
    parent.sh("mount -t ext4 /dev/vda /mnt; echo before >/mnt/own; echo memory >/tmp/own; sync");
    // A process that counts: it must go on in every clone, from where it was.
    parent.sh("(i=0; while :; do i=$((i+1)); echo $i >/tmp/count.new; \
         mv /tmp/count.new /tmp/count; sleep 0.1; done) >/dev/null 2>&1 </dev/null &");
    wait::until("the counter to start", Duration::from_secs(20), || {
        (parent.sh("cat /tmp/count 2>/dev/null || echo 0").trim() != "0").then_some(())
    });
    let before: u64 = parent.sh("cat /tmp/count").trim().parse().expect("a number");

    let clones = clones(&parent, 2);
    let all: Vec<&Vm> = clones.iter().chain([&parent]).collect();
    for vm in &all {
        let count: u64 = vm.sh("cat /tmp/count").trim().parse().expect("a number");
        assert!(count >= before, "{}: the counter went back", vm.name());
        wait::until("the counter to go on", Duration::from_secs(20), || {
            (vm.sh("cat /tmp/count").trim().parse::<u64>().expect("a number") > count).then_some(())
        });
        assert_eq!(vm.sh("cat /mnt/own /tmp/own"), "before\nmemory\n");
        assert_eq!(vm.sh("grep -c ^processor /proc/cpuinfo").trim(), "2");
        // Each writes, over shared pages and new ones.
        vm.sh(&format!(
            "echo {0} >/mnt/own; echo {0} >/tmp/own; \
             dd if=/dev/urandom of=/mnt/fill bs=64k count=32 2>/dev/null; \
             sha256sum /mnt/fill >/tmp/fill.sum; sync",
            vm.name()
        ));
    }
    for vm in &all {
        vm.sh("echo 3 >/proc/sys/vm/drop_caches");
        assert_eq!(vm.sh("cat /mnt/own /tmp/own"), format!("{0}\n{0}\n", vm.name()));
        assert_eq!(word(&vm.sh("sha256sum /mnt/file")), content, "{}", vm.name());
        vm.sh("sha256sum -c /tmp/fill.sum");
    }
}

/// Names, addresses and random numbers differ; a clone's clone goes on too, when its ancestors are gone.
/// Promise SHARE-20.
#[test]
fn clone_has_its_own_identity_and_can_be_cloned() {
    let scratch = Scratch::new("else");
    let parent = VmFile::new("someone").net("kind = \"user\"").start(&scratch);
    parent.sh("echo grandparent >/tmp/who");
    let mut family = clones(&parent, 2);
    let random = |vm: &Vm| vm.sh("head -c 32 /dev/urandom | sha256sum");
    let address = |vm: &Vm| vm.sh("cat /sys/class/net/e*/address").trim().to_owned();
    let cid = |vm: &Vm| vm.inspect()["cid"].as_u64().expect("a number");
    for vm in &family {
        assert_eq!(vm.sh("hostname").trim(), vm.name());
        assert_ne!(address(vm), address(&parent));
        assert_ne!(cid(vm), cid(&parent));
    }
    let mut seen: Vec<String> = family.iter().map(random).chain([random(&parent)]).collect();
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 3, "two VMs drew the same random numbers");

    let child = family.remove(0);
    child.sh("echo child >>/tmp/who");
    let grandchild = clones(&child, 1).remove(0);
    parent.kill();
    child.kill();
    assert_eq!(grandchild.sh("cat /tmp/who"), "grandparent\nchild\n");
    assert_eq!(family[0].sh("cat /tmp/who"), "grandparent\n");
}

/// Debian's general kernel has the driver of the generation id; it needs no agent for this.
#[test]
fn a_kernel_notices_by_itself_that_it_is_a_clone() {
    let scratch = Scratch::new("fork");
    let parent = VmFile::of("fork", VmFile::TINY_GENERIC).start(&scratch);
    let call = mirrorball(["clone", "--as-is", parent.name()]).limit(CLONE_LIMIT);
    let clone = Vm::named(call.ok().text().trim());
    let noticed = "dmesg | grep -c 'virtual machine fork' || true";
    wait::until("the kernel to notice", Duration::from_secs(20), || {
        (clone.sh(noticed).trim() == "1").then_some(())
    });
    assert_eq!(parent.sh(noticed).trim(), "0");
    assert_eq!(
        clone.sh("hostname"),
        parent.sh("hostname"),
        "--as-is changes nothing"
    );
}

/// Promise SHARE-21.
#[test]
fn clone_of_an_exclusive_disk_is_refused_with_its_name() {
    let scratch = Scratch::new("alone");
    let disk = scratch.sparse("own.raw", 16 << 20);
    let parent = VmFile::new("alone")
        .disk(&disk, "mode = \"exclusive\"\npersistent = true")
        .start(&scratch);
    let refused = mirrorball(["clone", parent.name()]).run();
    assert_eq!(refused.status, 1);
    assert!(refused.errors().contains("own.raw"), "{refused}");
    let unknown = mirrorball(["clone", "nobody"]).run();
    assert_eq!(unknown.status, 1);
    assert!(unknown.errors().contains("nobody"), "{unknown}");
}

/// The snapshot is written, the VM ended, and two VMs go on from it; bad snapshots are refused.
#[test]
fn a_snapshot_outlives_its_vm_and_bad_ones_are_refused() {
    let scratch = Scratch::new("snapshot");
    let (image, content) = file_system(&scratch);
    let vm = VmFile::new("still").cpus(2).disk(&image, "").start(&scratch);
    vm.sh(
        "mount -t ext4 /dev/vda /mnt; echo kept >/mnt/own; echo memory >/tmp/own; cat /mnt/file >/dev/null",
    );
    // A second layer of memory: cloned once before.
    drop(clones(&vm, 1));
    vm.sh("echo later >>/tmp/own");
    let directory = scratch.join("snap");
    mirrorball(["snapshot", vm.name()]).args([&directory]).ok();
    let again = mirrorball(["snapshot", vm.name()]).args([&directory]).run();
    assert_eq!(again.status, 1);
    assert!(again.errors().contains("exists"), "{again}");
    vm.sh("echo lost >>/tmp/own");
    vm.kill();

    // The disk is neither an image of the store nor in the snapshot: its owner has to name it again.
    let unnamed = mirrorball(["restore"]).args([&directory]).run();
    assert_eq!(unnamed.status, 1, "{unnamed}");
    let named = format!("0={}", image.display());
    assert!(unnamed.errors().contains(&format!("--disk {named}")), "{unnamed}");

    let call = mirrorball(["restore", "--count", "2", "--disk", &named])
        .args([&directory])
        .limit(CLONE_LIMIT);
    let output = call.ok();
    let restored: Vec<Vm> = output.text().lines().map(Vm::named).collect();
    assert_eq!(restored.len(), 2);
    let opens = format!("{} as disk 0", image.display());
    assert!(output.errors().contains(&opens), "{output}");
    // The pages that they touch in their first seconds are recorded for the next restore.
    let set = directory.join("working-set.json");
    wait::until("the working set", Duration::from_secs(30), || fs::read(&set).ok());
    let runs: Vec<(u64, u64)> = serde_json::from_slice(&fs::read(&set).expect("a set")).expect("runs");
    let touched: u64 = runs.iter().map(|(_, pages)| pages).sum();
    assert!(
        (100..32 << 10).contains(&touched),
        "{touched} pages touched of 128 MiB"
    );
    for one in &restored {
        assert_eq!(one.sh("cat /tmp/own /mnt/own"), "memory\nlater\nkept\n");
        one.sh("echo 3 >/proc/sys/vm/drop_caches");
        assert_eq!(word(&one.sh("sha256sum /mnt/file")), content);
        one.sh("echo mine >/tmp/own");
    }
    // A restored VM is kept like any.
    let second = scratch.join("second");
    mirrorball(["snapshot", restored[0].name()]).args([&second]).ok();
    drop(restored);
    let call = mirrorball(["restore", "--disk", &named]).args([&second]);
    let again = Vm::named(call.limit(CLONE_LIMIT).ok().text().trim());
    assert_eq!(again.sh("cat /tmp/own /mnt/own"), "mine\nkept\n");
    drop(again);

    let refused = |why: &str| {
        let output = mirrorball(["restore", "--disk", &named])
            .args([&directory])
            .limit(CLONE_LIMIT)
            .run();
        assert_eq!(output.status, 1, "{output}");
        assert!(output.errors().contains(why), "{output}");
    };
    let memory = directory.join("memory");
    let bytes = fs::metadata(&memory).expect("memory").len();
    let cut = fs::File::options().write(true).open(&memory).expect("memory");
    cut.set_len(bytes - 4096).expect("a shorter file");
    refused("was cut off or changed");
    cut.set_len(bytes).expect("a longer file");
    let manifest = directory.join("snapshot.json");
    let text = fs::read_to_string(&manifest).expect("a manifest");
    fs::write(&manifest, text.replacen("\"version\": 1", "\"version\": 99", 1)).expect("a manifest");
    refused("has version 99");
    fs::write(&manifest, "{").expect("a manifest");
    refused("is not a snapshot");
}

/// The IPv4 address of the guest's card.
fn address(vm: &Vm) -> String {
    let shown = vm.sh("ip -4 addr show dev eth0 | sed -n 's/.*inet \\([0-9.]*\\).*/\\1/p'");
    shown.trim().to_owned()
}

/// A clone finds its parent and the host by addresses of its own; the parent's connection stays the parent's.
#[test]
fn clone_on_a_subnet_has_its_own_addresses_and_none_of_its_parents_connections() {
    const SOON: Duration = Duration::from_secs(30);
    let scratch = Scratch::new("net");
    let network = format!("c-{}", std::process::id());
    let card = format!("kind = \"subnet\"\nnetwork = \"{network}\"\nhost = true");
    let parent = VmFile::new("host").net(&card).start(&scratch);
    let router = net::lease(&parent, &scratch);
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    // A pipe that this process has open for writing, too: its input does not end.
    parent.sh(&format!(
        "mkfifo /tmp/in; (exec 3<>/tmp/in; nc {router} {port} <&3 >/tmp/out 2>&1; echo ended >/tmp/end) \
         >/dev/null 2>&1 </dev/null &"
    ));
    let (mut connection, _) = listener.accept().expect("the parent's connection");

    let clone = clones(&parent, 1).remove(0);
    let (own, other) = (address(&clone), address(&parent));
    assert!(!own.is_empty() && own != other, "{own} and {other}");
    wait::until("the end of the clone's connection", SOON, || {
        (clone.sh("cat /tmp/end 2>/dev/null || true").trim() == "ended").then_some(())
    });
    connection.write_all(b"on\n").expect("the parent's connection");
    wait::until("bytes at the parent", SOON, || {
        (parent.sh("cat /tmp/out").trim() == "on").then_some(())
    });
    assert_eq!(parent.sh("cat /tmp/end 2>/dev/null || true"), "");

    // By name, by address, and to the host by the route that it had.
    let found = clone.sh(&format!("nslookup {} {router}", parent.name()));
    assert!(found.contains(&other), "{found} has no {other}");
    clone.sh(&format!("ping -c 3 -W 10 {other}"));
    parent.sh(&format!("ping -c 3 -W 10 {own}"));
    let receiver = thread::spawn(move || {
        let (mut from_clone, _) = listener.accept().expect("the clone's connection");
        let mut received = [0; 6];
        from_clone.read_exact(&mut received).expect("the clone's bytes");
        received
    });
    clone.sh(&format!("echo clone | nc -w 10 {router} {port}"));
    assert_eq!(receiver.join().expect("no panic"), *b"clone\n");

    // Restored under its name, it has its address.
    let snapshot = scratch.join("snap");
    mirrorball(["snapshot", parent.name()]).args([&snapshot]).ok();
    parent.kill();
    let call = mirrorball(["restore", "--network", &network]).args([&snapshot]);
    let restored = Vm::named(call.limit(CLONE_LIMIT).ok().text().trim());
    assert_eq!(restored.name(), parent.name());
    assert_eq!(address(&restored), other);
    restored.sh(&format!("ping -c 3 -W 10 {own}"));
}
