//! Risk: a guest that shares a folder with the host reads or writes other bytes than the host and other
//! guests do, reaches a file outside the folder, or waits without end for a server that is gone.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest_tests::command::Call;
use guest_tests::pattern::Numbers;
use guest_tests::{Scratch, Vm, VmFile, host, mirrorball, wait};

/// Time limit for errors after the end of a server, with what the emulation adds.
const EIO_LIMIT: Duration = Duration::from_secs(20);

fn folder(scratch: &Scratch, name: &str) -> PathBuf {
    let path = scratch.join(name);
    fs::create_dir(&path).expect("a new directory of this test");
    path
}

fn file(name: &str, path: &Path, more: &str) -> VmFile {
    VmFile::new(name).table(&format!("[[folders]]\npath = {path:?}\ntag = \"data\"\n{more}"))
}

fn mount(vm: &Vm) {
    vm.sh("mount -t virtiofs data /mnt");
}

/// The process that serves the folder of a VM.
fn server(vm: &Vm) -> u32 {
    let processes = vm.card_processes();
    let all: Vec<u32> = processes
        .into_iter()
        .filter(|pid| host::is_folder_server(*pid))
        .collect();
    assert_eq!(all.len(), 1, "one folder has one process");
    all[0]
}

fn random_bytes(seed: u64, bytes: usize) -> Vec<u8> {
    let mut all = vec![0; bytes];
    Numbers::new(seed).fill(&mut all);
    all
}

/// Promise FS-01.
#[test]
fn files_names_and_attributes_pass_both_ways_and_links_lead_nowhere_on_the_host() {
    let scratch = Scratch::new("folder");
    let shared = folder(&scratch, "shared");
    let big = random_bytes(1, (5 << 20) + 123);
    fs::write(shared.join("big"), &big).expect("room for a file");
    scratch.write("secret", "of the host");
    symlink(scratch.join("secret"), shared.join("out")).expect("a new link");
    symlink("..", shared.join("up")).expect("a new link");
    fs::write(shared.join(OsStr::from_bytes(b"host\xff")), "name").expect("room for a file");
    let vm = file("folder", &shared, "").start(&scratch);
    mount(&vm);
    vm.sh("cp /mnt/big /tmp/big && cp /tmp/big /mnt/copy && sync && cmp /mnt/big /mnt/copy");
    assert!(
        fs::read(shared.join("copy")).expect("just copied") == big,
        "the copy is another"
    );
    vm.sh("mkdir /mnt/sub && echo one >/mnt/sub/a && mv /mnt/sub/a /mnt/sub/b && echo two >>/mnt/sub/b");
    assert_eq!(fs::read(shared.join("sub/b")).expect("just moved"), b"one\ntwo\n");
    vm.sh("ln /mnt/sub/b /mnt/hard && rm /mnt/sub/b && rmdir /mnt/sub && truncate -s 3 /mnt/hard");
    assert!(!shared.join("sub").exists());
    assert_eq!(fs::read(shared.join("hard")).expect("just cut"), b"one");
    // Names of any bytes, both ways.
    vm.sh("cat /mnt/host$(printf '\\377') && echo x >/mnt/guest$(printf '\\376')");
    assert!(shared.join(OsStr::from_bytes(b"guest\xfe")).is_file());
    // The guest follows links within itself.
    let out = vm.exec(["cat", "/mnt/out"]).run();
    assert_ne!(out.status, 0, "a link led out of the folder");
    let up = vm.sh("ls /mnt/up/");
    assert!(up.contains("modules") || up.contains("dev"), "{up}");
    // Neither users of the host nor bits that run programs as others.
    vm.sh("echo program >/mnt/program && chmod 6755 /mnt/program");
    let mode = fs::metadata(shared.join("program"))
        .expect("just made")
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o755);
    assert_ne!(vm.exec(["chown", "1234", "/mnt/program"]).run().status, 0);
    assert_ne!(vm.exec(["mknod", "/mnt/device", "c", "1", "3"]).run().status, 0);
    // The host's changes are seen after a second at most.
    fs::write(shared.join("hard"), "by the host").expect("a file of this test");
    wait::until("the host's change", Duration::from_secs(20), || {
        (vm.sh("cat /mnt/hard") == "by the host").then_some(())
    });
    let counted = vm.counters("folder-data");
    assert_eq!(
        (&counted["server"], &counted["strays"]),
        (&"running".into(), &0.into()),
        "{counted}"
    );
    assert!(counted["reply_bytes"].as_u64() > Some(5 << 20), "{counted}");
    vm.reboot();
    mount(&vm);
    assert_eq!(vm.sh("cat /mnt/hard"), "by the host");
    let last = server(&vm);
    vm.stop();
    host::wait_gone(&[last], Duration::from_secs(10));
}

/// Promise FS-02.
#[test]
fn two_vms_write_and_check_trees_in_one_folder_at_once() {
    let scratch = Scratch::new("folders");
    let shared = folder(&scratch, "shared");
    let vms = ["first", "second"].map(|name| file(name, &shared, "cache = \"none\"").start(&scratch));
    for (vm, name) in vms.iter().zip(["first", "second"]) {
        mount(vm);
        vm.background(&format!(
            "sh -c 'mkdir /mnt/{name} && cd /mnt/{name} && for n in $(seq 40); do head -c ${{n}}0123 \
             /dev/urandom >f$n; done && sha256sum f* >sums.new && mv sums.new sums'"
        ));
    }
    for name in ["first", "second"] {
        let sums = shared.join(name).join("sums");
        wait::until("the tree of a VM", Duration::from_secs(120), || {
            sums.exists().then_some(())
        });
    }
    for (vm, other) in vms.iter().zip(["second", "first"]) {
        let checked = vm.sh(&format!("cd /mnt/{other} && sha256sum -c sums | grep -c OK"));
        assert_eq!(checked.trim(), "40");
    }
    // Lines that both append to one file are all there.
    for (vm, name) in vms.iter().zip(["first", "second"]) {
        vm.background(&format!(
            "sh -c 'for n in $(seq 100); do echo {name} $n >>/mnt/lines; done; touch /mnt/{name}.done'"
        ));
    }
    wait::until("the lines", Duration::from_secs(120), || {
        let done = ["first.done", "second.done"].map(|name| shared.join(name).exists());
        (done == [true, true]).then_some(())
    });
    let lines = fs::read_to_string(shared.join("lines")).expect("lines of the guests");
    for name in ["first", "second"] {
        let own: Vec<_> = lines.lines().filter(|line| line.starts_with(name)).collect();
        assert_eq!(own.len(), 100, "{name}: {lines}");
    }
}

/// Promise FS-03.
#[test]
fn read_only_folder_is_not_changed() {
    let scratch = Scratch::new("read-only");
    let shared = folder(&scratch, "shared");
    fs::write(shared.join("file"), "old").expect("room for a file");
    let vm = file("read-only", &shared, "read_only = true").start(&scratch);
    mount(&vm);
    assert_eq!(vm.sh("cat /mnt/file"), "old");
    for change in [
        "echo new >/mnt/file",
        "echo new >>/mnt/file",
        "touch /mnt/new",
        "rm /mnt/file",
        "mv /mnt/file /mnt/moved",
        "mkdir /mnt/sub",
        "chmod 777 /mnt/file",
        "ln -s x /mnt/link",
        "truncate -s 0 /mnt/file",
    ] {
        let tried = vm.exec(["sh", "-c", change]).run();
        assert_ne!(tried.status, 0, "{change}");
        assert!(
            tried.errors().contains("Read-only file system"),
            "{change}: {}",
            tried.errors()
        );
    }
    assert_eq!(fs::read(shared.join("file")).expect("kept"), b"old");
    assert_eq!(fs::read_dir(&shared).expect("kept").count(), 1);
}

/// Promise FS-04.
#[test]
fn end_of_the_server_gives_eio_and_a_reboot_starts_another() {
    let scratch = Scratch::new("server");
    let shared = folder(&scratch, "shared");
    let vm = file("server", &shared, "cache = \"none\"").start(&scratch);
    mount(&vm);
    vm.sh("echo before >/mnt/file");
    // The next process that serves the VM keeps the server.
    let first = server(&vm);
    vm.kill_monitor(Duration::from_secs(30));
    vm.sh("echo after >>/mnt/file");
    assert_eq!(server(&vm), first);
    // Requests are on their way when it ends.
    vm.background("sh -c 'while dd if=/mnt/file of=/dev/null 2>/tmp/error; do :; done; touch /tmp/failed'");
    host::kill9(first);
    let killed = Instant::now();
    wait::until("the end of requests", EIO_LIMIT, || {
        (vm.exec(["test", "-e", "/tmp/failed"]).run().status == 0).then_some(())
    });
    let tried = vm.exec(["cat", "/mnt/file"]).limit(EIO_LIMIT).run();
    assert!(killed.elapsed() < EIO_LIMIT);
    assert!(
        tried.errors().contains("Input/output error"),
        "{}",
        tried.errors()
    );
    assert!(vm.sh("cat /tmp/error").contains("Input/output error"));
    assert_eq!(vm.counters("folder-data")["server"], "ended");
    // The shard's own line, and the monitor's with the reason.
    for line in [
        "folder data: its server has ended; its files give EIO",
        "folder data: the folder's server ",
    ] {
        wait::until("a line of the log", Duration::from_secs(10), || {
            // The first line makes the file.
            let log = fs::read_to_string(vm.folder().join("shard.log")).unwrap_or_default();
            log.contains(line).then_some(())
        });
    }
    vm.reboot();
    mount(&vm);
    assert_eq!(vm.sh("cat /mnt/file"), "before\nafter\n");
    assert_ne!(server(&vm), first);
}

/// Promise FS-05.
#[test]
fn folder_that_vanishes_gives_errors_and_bad_folders_are_refused() {
    let scratch = Scratch::new("vanished");
    let shared = folder(&scratch, "shared");
    fs::write(shared.join("file"), "old").expect("room for a file");
    let vm = file("vanished", &shared, "cache = \"none\"").start(&scratch);
    mount(&vm);
    fs::remove_dir_all(&shared).expect("a directory of this test");
    for try_it in ["cat /mnt/file", "touch /mnt/new"] {
        let tried = vm.exec(["sh", "-c", try_it]).limit(EIO_LIMIT).run();
        assert_ne!(tried.status, 0, "{try_it}");
    }
    vm.sh("true");
    let clone = mirrorball(["clone", vm.name()]).run();
    assert_ne!(clone.status, 0);
    assert!(
        clone.errors().contains("it has the shared folder data"),
        "{}",
        clone.errors()
    );
    let plain = scratch.write("plain", "");
    for (named, why) in [
        (shared.join("none"), "no such directory"),
        (plain, "is not a directory"),
    ] {
        let named = format!("{}:data", named.display());
        let refused = mirrorball(["run", "--image", VmFile::TINY, "--folder", &named]).run();
        assert_ne!(refused.status, 0);
        assert!(refused.errors().contains(why), "{}", refused.errors());
    }
}

/// Bytes of the file that both guests read, of which all but the last page are whole.
const SHARED_BYTES: usize = (16 << 20) + 123;

fn sharing_counter(vm: &Vm, name: &str) -> u64 {
    let seen = vm.inspect();
    let found = seen.pointer(&format!("/status/sharing/pages/{name}"));
    let number = found.and_then(serde_json::Value::as_u64);
    number.unwrap_or_else(|| panic!("no counter {name} in {seen:#}"))
}

/// Promise FS-07.
#[test]
fn file_that_two_vms_read_is_in_memory_once_until_the_host_changes_it() {
    let scratch = Scratch::new("once");
    let shared = folder(&scratch, "shared");
    let old = random_bytes(3, SHARED_BYTES);
    fs::write(shared.join("file"), &old).expect("room for a file");
    let sum = |bytes: &[u8]| {
        let path = scratch.join("sum");
        fs::write(&path, bytes).expect("room for a file");
        let output = Call::new("sha256sum").args([&path]).ok().text();
        output.split_whitespace().next().unwrap_or_default().to_owned()
    };
    let keys = "read_only = true\nshare = true";
    let vms = ["one", "two"].map(|name| file(name, &shared, keys).start(&scratch));
    let before: Vec<u64> = vms.iter().map(|vm| sharing_counter(vm, "mapped_pages")).collect();
    for vm in &vms {
        mount(vm);
        assert!(vm.sh("sha256sum /mnt/file").starts_with(&sum(&old)));
    }
    // Short runs of the guest's pages and the last one stay copies: a fifth, in a guest of this size.
    let most = SHARED_BYTES as u64 / 4096 * 2 / 3;
    for (vm, before) in vms.iter().zip(&before) {
        wait::until("the file's pages to be shared", Duration::from_secs(60), || {
            (sharing_counter(vm, "mapped_pages") >= before + most).then_some(())
        });
        assert_eq!(sharing_counter(vm, "leased_files"), 1);
        assert!(vm.sh("sha256sum /mnt/file").starts_with(&sum(&old)));
    }
    // The host cuts the file in place: each VM has given its pages back before.
    let new = b"by the host";
    let begun = Instant::now();
    fs::write(shared.join("file"), new).expect("a file of this test");
    let waited = begun.elapsed();
    assert!(waited < Duration::from_secs(20), "a writer waited for {waited:?}");
    for vm in &vms {
        assert!(sharing_counter(vm, "leases_broken") >= 1);
        wait::until("the host's change", Duration::from_secs(20), || {
            (vm.sh("cat /mnt/file") == "by the host").then_some(())
        });
    }
}

/// Promise FS-08.
#[test]
fn operations_have_the_outcomes_that_they_have_in_a_file_system_of_the_guest() {
    let scratch = Scratch::new("posix");
    let shared = folder(&scratch, "shared");
    let vm = file("posix", &shared, "").start(&scratch);
    mount(&vm);
    vm.add_tool();
    let [shared, own] = ["/mnt", "/tmp"].map(|place| vm.tool(&["posix", place]).ok().text());
    assert!(own.lines().count() > 100, "{own}");
    let lines = shared.lines().zip(own.lines());
    // The folder is on tmpfs, which before Linux 6.6 numbers the entries of a directory anew as some are
    // removed.
    let of_tmpfs = ["files removed while they are listed", "files left"];
    let unlike: Vec<_> = lines
        .filter(|(shared, own)| shared != own && !of_tmpfs.iter().any(|what| own.starts_with(what)))
        .collect();
    assert_eq!(unlike, [], "of the folder, and of the guest's own");
    assert_eq!(shared.lines().count(), own.lines().count());
}
