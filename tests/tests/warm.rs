//! Risk: a VM that starts warm has something of the template, or of another VM of it, that a boot would have
//! drawn; or starts from a template of something else than it asks for.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_tests::command::{BOOT_LIMIT, Call};
use guest_tests::host::data_directory;
use guest_tests::{Output, Scratch, Vm, mirrorball, net, wait};

/// Time limit for a refusal, before any guest starts.
const AT_ONCE: Duration = Duration::from_secs(20);
/// Time limit of a command that makes a template.
const MAKE_LIMIT: Duration = Duration::from_secs(400);

/// A data directory of the test's own, so that its templates are, too.
struct Data {
    directory: PathBuf,
}

impl Data {
    /// With the images of all tests.
    fn with_images(scratch: &Scratch) -> Self {
        let directory = scratch.join("data");
        fs::create_dir(&directory).expect("a directory");
        symlink(data_directory().join("images"), directory.join("images")).expect("a link");
        Self { directory }
    }

    /// With an image `own`, which has the files of `tiny` and one more word on the command line.
    fn with_own_image(scratch: &Scratch) -> Self {
        let directory = scratch.join("data");
        fs::create_dir(&directory).expect("a directory");
        let data = Self { directory };
        data.import("quiet");
        data
    }

    fn import(&self, word: &str) {
        let tiny = data_directory().join("images/tiny");
        let text = fs::read(tiny.join("image.json")).expect("the record of tiny");
        let record: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        let file = |part: &str| tiny.join(record[part]["file"].as_str().expect("a name"));
        let cmdline = format!("{} {word}", record["cmdline"].as_str().expect("words"));
        self.call([
            "image",
            "import",
            "--name",
            "own",
            "--cmdline",
            &cmdline,
            "--kernel",
        ])
        .args([file("kernel")])
        .args(["--initrd"])
        .args([file("initrd")])
        .limit(BOOT_LIMIT)
        .ok();
    }

    fn call<const N: usize>(&self, arguments: [&str; N]) -> Call {
        mirrorball(arguments)
            .env("MIRRORBALL_DATA", &self.directory)
            .limit(MAKE_LIMIT)
    }

    /// Starts VMs warm, without a card; the VMs, and whether the command made a template.
    fn start(&self, image: &str, name: &str, more: &[&str]) -> (Vec<Vm>, bool) {
        let name = format!("t-{name}-{}", std::process::id());
        let output = self
            .call(["run", "--image", image, "--warm", "--detach", "--name", &name])
            .args(more)
            .ok();
        let vms: Vec<Vm> = output.text().lines().map(Vm::named).collect();
        assert!(!vms.is_empty(), "{output}");
        (vms, output.errors().contains("making a template"))
    }

    fn templates(&self) -> Vec<serde_json::Value> {
        let list = self.call(["image", "warm", "--list", "--json"]).ok().json();
        list.as_array().expect("a list").clone()
    }
}

/// Checks that `script` prints another text in each VM.
#[track_caller]
fn all_differ(vms: &[&Vm], script: &str) {
    let texts: Vec<String> = vms.iter().map(|vm| vm.sh(script)).collect();
    let different: BTreeSet<&String> = texts.iter().collect();
    assert_eq!(different.len(), vms.len(), "{script}: {texts:?}");
    assert!(
        texts.iter().all(|text| text.trim().len() > 8),
        "{script}: {texts:?}"
    );
}

const TINY: [&str; 4] = ["--memory", "128M", "--net", "none"];

/// Two commands start VMs from one template: each has its own name, random numbers and boot id, and none has
/// booted. A command runs in such a VM; one that reboots boots.
/// Promise SHARE-30.
#[test]
fn warm_starts_share_a_template_and_no_identity() {
    let scratch = Scratch::new("warm");
    let data = Data::with_images(&scratch);
    let (mut vms, made) = data.start("tiny", "warm", &[&TINY[..], &["--count", "2"]].concat());
    assert!(made, "the first start makes the template");
    let (more, made) = data.start("tiny", "again", &TINY);
    assert!(!made, "the second start finds it");
    vms.extend(more);
    let all: Vec<&Vm> = vms.iter().collect();
    for vm in &all {
        assert_eq!(vm.sh("hostname").trim(), vm.name());
    }
    all_differ(&all, "cat /proc/sys/kernel/random/boot_id");
    all_differ(&all, "head -c 32 /dev/urandom | sha256sum");
    all_differ(&all, "cat /proc/sys/kernel/random/uuid");
    let templates = data.templates();
    assert_eq!(templates.len(), 1, "{templates:?}");
    assert_eq!(templates[0]["image"], "tiny");
    let listed = mirrorball(["ps", "--json"]).ok().text();
    assert!(
        !listed.contains("template-"),
        "the template's VM still runs: {listed}"
    );

    let ran = data
        .call([
            "run", "--image", "tiny", "--warm", "--memory", "128M", "--net", "none",
        ])
        .args(["--", "sh", "-c", "echo in the guest; exit 7"])
        .run()
        .expect(7);
    assert_eq!(ran.text(), "in the guest\n");

    let first = &vms[0];
    let before = first.sh("cat /proc/sys/kernel/random/boot_id");
    mirrorball(["reset", first.name()]).ok();
    wait::until("the guest to boot", BOOT_LIMIT, || {
        let id = first.exec(["cat", "/proc/sys/kernel/random/boot_id"]).run();
        (id.status == 0 && id.text() != before).then_some(())
    });
}

/// Promise SHARE-31.
#[test]
fn template_of_a_changed_damaged_or_removed_image_is_not_used() {
    let scratch = Scratch::new("stale");
    let data = Data::with_own_image(&scratch);
    let (vms, made) = data.start("own", "first", &TINY);
    assert!(made);
    let old = data.templates();
    drop(vms);

    // Cut off, as by a host that lost its power.
    let key = old[0]["key"].as_str().expect("a key");
    let memory = data.directory.join("templates").join(key).join("snapshot/memory");
    fs::File::options()
        .write(true)
        .open(memory)
        .and_then(|memory| memory.set_len(4096))
        .expect("a shorter file");
    let (vms, made) = data.start("own", "second", &TINY);
    assert!(made, "a damaged template is made again");
    assert_eq!(vms[0].sh("echo alive").trim(), "alive");
    drop(vms);

    data.call(["image", "rm", "own"]).ok();
    assert!(data.templates().is_empty(), "the image's templates go with it");
    data.import("quiet debug");
    let (vms, made) = data.start("own", "third", &TINY);
    assert!(made);
    assert!(vms[0].sh("cat /proc/cmdline").contains("quiet debug"));
    let new = data.templates();
    assert_eq!(new.len(), 1);
    assert_ne!(new[0]["key"], old[0]["key"]);
    let new = new[0]["key"].as_str().expect("a key");
    data.call(["image", "warm", "--remove", new]).ok();
    assert!(data.templates().is_empty());
    // The VM has the removed files open.
    assert_eq!(vms[0].sh("echo alive").trim(), "alive");
}

/// A template that is beyond the limit of space makes the least recently used ones go.
#[test]
fn least_recently_used_template_makes_room() {
    let scratch = Scratch::new("room");
    let data = Data::with_images(&scratch);
    let limit = scratch.write("host.toml", "template_limit = \"1M\"\n");
    let warm = |memory: &str| -> Output {
        data.call(["image", "warm", "tiny", "--net", "none", "--memory", memory])
            .env("MIRRORBALL_HOST_FILE", &limit)
            .ok()
    };
    let first = warm("128M").text();
    let second = warm("130M");
    assert!(second.errors().contains(first.trim()), "{second}");
    let left = data.templates();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(left[0]["key"], second.text().trim());
}

/// A host without space for a template: an error of one line, and neither a part of it nor its VM is left.
/// Promise SHARE-34.
#[test]
fn full_disk_while_a_template_is_written_leaves_nothing() {
    let scratch = Scratch::new("full");
    let directory = scratch.join("data");
    fs::create_dir(&directory).expect("a directory");
    let disk = SmallDisk::mounted_at(&directory);
    symlink(data_directory().join("images"), directory.join("images")).expect("a link");
    let data = Data {
        directory: directory.clone(),
    };
    let output = data
        .call([
            "run", "--image", "tiny", "--warm", "--memory", "128M", "--net", "none",
        ])
        .args(["--", "true"])
        .run()
        .expect(1);
    let errors = output.errors();
    assert!(errors.contains("No space left on device"), "{output}");
    assert!(
        errors.contains("the template of tiny was not written"),
        "{output}"
    );
    assert!(data.templates().is_empty());
    let left = fs::read_dir(directory.join("templates")).expect("the folder of templates");
    let left: Vec<String> = left
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("a name")
        })
        .filter(|name| !name.ends_with(".lock"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    wait::until("the template's VM to end", BOOT_LIMIT, || {
        let running = mirrorball(["ps", "--json"]).ok().text();
        (!running.contains("template-")).then_some(())
    });
    drop(disk);
}

/// A file system in memory with room for less than a template; unmounted when dropped.
struct SmallDisk {
    place: PathBuf,
}

impl SmallDisk {
    fn mounted_at(place: &Path) -> Self {
        Call::new("mount")
            .args(["-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs"])
            .args([place])
            .ok();
        Self {
            place: place.to_owned(),
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        Call::new("umount").args(["--lazy"]).args([&self.place]).ok();
    }
}

/// Five Debian VMs of one template have nothing in common that a boot draws.
/// Promise SHARE-32.
#[test]
fn five_warm_debians_share_no_random_numbers_and_no_ids() {
    let scratch = Scratch::new("warm-debian");
    let data = Data::with_images(&scratch);
    let (vms, made) = data.start("debian-12", "five", &["--memory", "256M", "--count", "5"]);
    assert!(made);
    let all: Vec<&Vm> = vms.iter().collect();
    for vm in &all {
        assert_eq!(vm.sh("hostname").trim(), vm.name());
        let state = vm.exec(["systemctl", "is-system-running"]).run().text();
        assert!(["running", "degraded"].contains(&state.trim()), "{state}");
    }
    for script in [
        "cat /etc/machine-id",
        "cat /proc/sys/kernel/random/boot_id",
        "head -c 32 /dev/urandom | sha256sum",
        "cat /sys/class/net/e*/address",
    ] {
        all_differ(&all, script);
    }
    let host = Call::new("date").args(["+%s"]).ok().text();
    let host: i64 = host.trim().parse().expect("seconds");
    for vm in &all {
        let guest: i64 = vm.sh("date +%s").trim().parse().expect("seconds");
        assert!((guest - host).abs() < 120, "{guest} and {host}");
    }
}

/// Bytes of a disk with a partition table.
const DISK_BYTES: usize = 4 << 20;
/// First sector of the partition, and its number of sectors.
const PARTITION: (u32, u32) = (2048, 1024);

/// Creates a disk with one partition, which begins with `text`.
fn partitioned(scratch: &Scratch, name: &str, text: &str) -> PathBuf {
    let mut disk = vec![0; DISK_BYTES];
    let (first, count) = PARTITION;
    // The first entry of a master boot record: its kind, first sector and number of sectors.
    disk[446 + 4] = 0x83;
    disk[446 + 8..446 + 12].copy_from_slice(&first.to_le_bytes());
    disk[446 + 12..446 + 16].copy_from_slice(&count.to_le_bytes());
    disk[510..512].copy_from_slice(&[0x55, 0xAA]);
    let at = first as usize * 512;
    disk[at..at + text.len()].copy_from_slice(text.as_bytes());
    scratch.write(name, disk)
}

/// Two commands start VMs from one template, each with disks of its own.
/// Promise SHARE-35.
#[test]
fn warm_vm_has_its_own_disks_and_their_partitions() {
    let scratch = Scratch::new("warm-disks");
    let data = Data::with_images(&scratch);
    let text = |path: &Path| path.to_str().expect("a path").to_owned();
    for (round, is_first) in [("one", true), ("two", false)] {
        let private = partitioned(&scratch, &format!("{round}.raw"), &format!("partition {round}"));
        let before = fs::read(&private).expect("the disk");
        let kept = scratch.write(&format!("{round}-kept.raw"), format!("{:<8192}", round));
        let (private_flag, kept_flag) = (text(&private), format!("{}:exclusive:persistent", text(&kept)));
        let disks = ["--disk", &private_flag, "--disk", &kept_flag];
        let (vms, made) = data.start("tiny", round, &[&TINY[..], &disks].concat());
        assert_eq!(made, is_first, "{round}: other files are no other template");
        let vm = &vms[0];
        assert_eq!(
            vm.sh("cat /sys/block/vda/size /sys/block/vdb/size /sys/block/vdb/serial"),
            "8192\n16\ndisk1"
        );
        assert_eq!(vm.sh("head -c 13 /dev/vda1"), format!("partition {round}"));
        let size = vm.sh("cat /sys/block/vda/vda1/size");
        assert_eq!(size.trim(), "1024");
        // Nothing of the template's first sector is left.
        assert_eq!(
            vm.sh("tail -c +511 /dev/vda | head -c 2 | od -An -tx1").trim(),
            "55 aa"
        );
        assert_eq!(vm.sh("head -c 3 /dev/vdb"), round);

        vm.sh("for disk in vda vdb; do \
             printf written | dd of=/dev/$disk bs=512 seek=1 conv=notrunc,fsync; done 2>&1");
        assert_eq!(vm.sh("tail -c +513 /dev/vda | head -c 7"), "written");
        vm.kill();
        assert!(
            fs::read(&private).expect("the disk") == before,
            "{round}: it is private"
        );
        let written = fs::read(&kept).expect("the disk");
        assert_eq!(&written[512..519], b"written", "{round}");
    }
    assert_eq!(data.templates()[0]["disks"].as_array().map(Vec::len), Some(2));
    // One made ahead serves a VM with one disk.
    data.call([
        "image", "warm", "tiny", "--memory", "128M", "--net", "none", "--disks", "1",
    ])
    .ok();
    let disk = text(&partitioned(&scratch, "ahead.raw", "partition"));
    let (vms, made) = data.start("tiny", "ahead", &[&TINY[..], &["--disk", &disk]].concat());
    assert!(!made);
    assert_eq!(vms[0].sh("head -c 9 /dev/vda1"), "partition");
}

/// Promise SHARE-36.
#[test]
fn warm_vms_on_a_subnet_have_addresses_of_their_own() {
    let scratch = Scratch::new("warm-net");
    let data = Data::with_images(&scratch);
    let options = ["--memory", "128M", "--net", "subnet", "--count", "2"];
    let (vms, made) = data.start("tiny", "warm-net", &options);
    assert!(made);
    assert_eq!(data.templates()[0]["cards"][0], "subnet");
    let all: Vec<&Vm> = vms.iter().collect();
    all_differ(&all, "cat /sys/class/net/eth0/address");
    for vm in &all {
        net::lease(vm, &scratch);
    }
    all_differ(&all, "ip -4 addr show dev eth0 | grep inet");
    let router = net::lease(all[0], &scratch);
    let found = all[0].sh(&format!("nslookup {} {router}", all[1].name()));
    let address = all[1].sh("ip -4 addr show dev eth0 | sed -n 's/.*inet \\([0-9.]*\\).*/\\1/p'");
    assert!(found.contains(address.trim()), "{found} has no {address}");
    all[0].sh(&format!("ping -c 3 -W 10 {}", address.trim()));
    let networks = mirrorball(["net", "ls", "--json"]).ok().text();
    assert!(
        !networks.contains("template-"),
        "the template's network is left: {networks}"
    );
}

/// Promise SHARE-33.
#[test]
fn option_that_a_template_cannot_serve_is_refused_by_name_before_anything_starts() {
    let scratch = Scratch::new("refused");
    let data = Data::with_own_image(&scratch);
    let disk = scratch.sparse("a.raw", 1 << 20);
    let disk = disk.to_str().expect("a path");
    for (words, named) in [
        (&["--image", "own", "--cmdline", "debug"][..], "--cmdline"),
        (&["--image", "own", "--pages", "thp"], "--pages"),
        (&["--image", "own", "--net", "tap=tap0"], "--net"),
        (&["--image", "own", "--share", "never"], "--share"),
        (&["--kernel", disk], "--warm"),
        (&["--image", "nothing"], "no image nothing"),
    ] {
        let output = data
            .call(["run", "--warm"])
            .args(words)
            .limit(AT_ONCE)
            .run()
            .expect(1);
        assert!(output.errors().contains(named), "{named}: {output}");
    }
    let file = |name: &str, text: &str| {
        let text = format!("name = \"{name}\"\nimage = \"own\"\nnets = []\n{text}");
        scratch.write(&format!("{name}.toml"), text)
    };
    let (warm, cold) = (file("warm", "warm = true"), file("cold", ""));
    let pmem = format!("warm = true\ndisks = [{{ path = {disk:?}, as = \"pmem\" }}]");
    let pmem = data
        .call(["run"])
        .args([file("pmem", &pmem)])
        .limit(AT_ONCE)
        .run()
        .expect(1);
    assert!(pmem.errors().contains("disks"), "{pmem}");
    let mixed = |files: [&Path; 2]| data.call(["run"]).args(files).limit(AT_ONCE).run().expect(1);
    assert!(
        mixed([&warm, &cold])
            .errors()
            .contains("cold: it can't start from the template of warm")
    );
    let defined = data
        .call(["vm", "define"])
        .args([&warm])
        .limit(AT_ONCE)
        .run()
        .expect(1);
    assert!(defined.errors().contains("a defined VM boots"), "{defined}");
    assert!(data.templates().is_empty());
}
