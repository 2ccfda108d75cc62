//! Risk: on a host with several users, one user reads, stops or redirects another's work.
//!
//! The tests need root: two users without accounts, each a number, are enough. Guests halt at once.

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use guest_tests::command::{Call, Output, Running, binary, built};
use guest_tests::halting::halting_guest;
use guest_tests::{Scratch, mirrorball, wait};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const ALICE: u32 = 1001;
const MALLORY: u32 = 1002;
/// Time limit of commands that need not wait, which end within seconds on a busy machine.
const SOON: Duration = Duration::from_secs(30);
/// A lock is waited for 10 s. The rest is room for a busy machine.
const HELD_MAX: Duration = Duration::from_secs(25);

/// A host's files: a runtime directory and a data directory of root, and files that a test adds.
struct Host(Scratch);

impl Host {
    fn new(test: &str) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "these tests need root");
        let host = Self(Scratch::new(test));
        fs::set_permissions(host.0.path(), Permissions::from_mode(0o755)).expect("our own directory");
        host
    }

    fn runtime(&self) -> PathBuf {
        self.0.join("runtime")
    }

    /// A call of root's, which no lab serves.
    fn root<I: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Call {
        self.set(mirrorball(arguments))
    }

    fn set(&self, call: Call) -> Call {
        call.limit(SOON)
            .env("MIRRORBALL_IN_LAB", "1")
            .env("MIRRORBALL_RUNTIME", self.runtime())
            .env("MIRRORBALL_DATA", self.0.join("data"))
    }

    /// A home that belongs to a user, and that others may look into.
    fn home(&self, user: u32) -> PathBuf {
        let home = self.0.join(&format!("home-{user}"));
        fs::create_dir(&home).expect("our own directory");
        chown(&home, Some(user), Some(user)).expect("root gives files away");
        home
    }
}

/// Whether a command of a user's succeeds.
fn can(user: u32, program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).uid(user).gid(user).current_dir("/");
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    output.status.success()
}

#[track_caller]
fn does(user: u32, program: &str, arguments: &[&str]) {
    assert!(
        can(user, program, arguments),
        "{program} {arguments:?} failed as user {user}"
    );
}

fn text(path: &Path) -> &str {
    path.to_str().expect("ASCII")
}

/// An error's words without the breaks of its lines.
fn words(output: &Output) -> String {
    let errors = output.errors().replace('│', " ");
    errors.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).expect("it is there").mode() & 0o7777
}

/// A file of root's, and its properties that must not change.
fn secret(host: &Host) -> (PathBuf, impl Fn() -> (String, u32, u32, u64)) {
    let path = host.0.write("secret", "root:secret\n".repeat(100));
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("our own file");
    let same = path.clone();
    let look = move || {
        let about = fs::symlink_metadata(&same).expect("it is there");
        let mut bytes = fs::read(&same).expect("root reads it");
        // Its replacement may be large.
        bytes.truncate(64);
        let bytes = String::from_utf8_lossy(&bytes).into_owned();
        (bytes, about.uid(), about.mode(), about.ino())
    };
    (path, look)
}

/// Plants links to `target` at names beside a disk that are easy to guess, as `user`.
fn plant(user: u32, disk: &Path, target: &Path) {
    let name = disk.file_name().and_then(|name| name.to_str()).expect("ASCII");
    for planted in [
        ".NAME.mirrorball-unfinished",
        ".NAME.mirrorball-unfinished-0",
        ".NAME.part",
        "NAME.new",
    ] {
        let planted = disk.with_file_name(planted.replace("NAME", name));
        does(user, "ln", &["-s", text(target), text(&planted)]);
    }
}

#[test]
fn upkeep_by_root_follows_no_link_that_a_user_planted_and_keeps_the_owner() {
    let host = Host::new("upkeep");
    let home = host.home(ALICE);
    let (target, look) = secret(&host);
    let before = look();
    // All its clusters are taken, with zeroes: compacting makes another file.
    let (zeroes, disk) = (home.join("zeroes"), home.join("d.qcow2"));
    does(ALICE, "truncate", &["-s", "4M", text(&zeroes)]);
    let full = [
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "-S",
        "0",
        text(&zeroes),
        text(&disk),
    ];
    does(ALICE, "qemu-img", &full);
    does(ALICE, "chmod", &["640", text(&disk)]);
    let base = home.join("base.raw");
    does(ALICE, "cp", &[text(&zeroes), text(&base)]);
    let overlay = home.join("o.qcow2");
    let over = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        text(&base),
        text(&overlay),
    ];
    does(ALICE, "qemu-img", &over);
    for path in [&disk, &overlay] {
        plant(ALICE, path, &target);
    }
    let inode = fs::metadata(&disk).expect("it is there").ino();
    host.root(["disk", "compact", text(&disk)]).ok();
    host.root(["disk", "commit", "--format", "qcow2", text(&overlay)])
        .ok();
    assert_eq!(look(), before, "a file of root's was changed");
    for (path, wanted) in [(&disk, 0o640), (&overlay, 0o644)] {
        let about = fs::symlink_metadata(path).expect("it is there");
        assert!(about.is_file(), "{path:?} is a link");
        assert_eq!(
            (about.uid(), about.gid(), mode(path)),
            (ALICE, ALICE, wanted),
            "{path:?}"
        );
    }
    assert_ne!(
        fs::metadata(&disk).expect("it is there").ino(),
        inode,
        "it was not written anew"
    );
    assert_eq!(fs::read(&base).expect("root reads it"), vec![0; 4 << 20]);
}

/// An overlay names its base itself.
#[test]
fn a_users_overlay_is_not_committed_into_a_file_of_roots() {
    let host = Host::new("base");
    let home = host.home(ALICE);
    let (target, look) = secret(&host);
    let before = look();
    let (content, overlay) = (home.join("content"), home.join("o.qcow2"));
    // No larger than the file of root's.
    let to = format!("of={}", text(&content));
    does(ALICE, "dd", &["if=/proc/self/status", &to, "bs=512", "count=1"]);
    let convert = [
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        text(&content),
        text(&overlay),
    ];
    does(ALICE, "qemu-img", &convert);
    let link = home.join("link");
    does(ALICE, "ln", &["-s", text(&target), text(&link)]);
    for base in [&target, &link] {
        let rebase = ["rebase", "-u", "-F", "raw", "-b", text(base), text(&overlay)];
        does(ALICE, "qemu-img", &rebase);
        let call = host.root(["disk", "commit", "--format", "qcow2", text(&overlay)]);
        let output = call.run();
        assert_eq!(look(), before, "a file of root's was changed:\n{output}");
        let output = output.expect(1);
        let errors = words(&output);
        assert!(
            errors.contains("belongs to user 1001") && errors.contains("help: "),
            "{output}"
        );
    }
}

/// A disk of alice's in a directory of mallory's, who decides about the names there.
#[test]
fn new_file_in_a_third_users_directory_stays_roots() {
    let host = Host::new("third");
    let home = host.home(MALLORY);
    let (zeroes, disk) = (host.0.sparse("zeroes", 4 << 20), home.join("d.qcow2"));
    let full = [
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "-S",
        "0",
        text(&zeroes),
        text(&disk),
    ];
    does(0, "qemu-img", &full);
    chown(&disk, Some(ALICE), Some(ALICE)).expect("root gives files away");
    host.root(["disk", "compact", text(&disk)]).ok();
    let about = fs::symlink_metadata(&disk).expect("it is there");
    assert_eq!((about.uid(), about.gid()), (0, 0));
}

/// Makes the registry of running VMs, and an entry whose lock this process holds.
fn living(host: &Host) -> (PathBuf, Flock<File>) {
    host.root(["ps"]).ok();
    let folder = host.runtime().join("vms/living");
    fs::create_dir(&folder).expect("root's directory");
    fs::set_permissions(&folder, Permissions::from_mode(0o711)).expect("our own directory");
    let lock = File::create(folder.join("lock")).expect("root's directory");
    lock.set_permissions(Permissions::from_mode(0o600))
        .expect("our own file");
    fs::write(folder.join("console.sock"), "").expect("root's directory");
    let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).expect("our own file");
    (folder, lock)
}

#[test]
fn a_stranger_neither_holds_a_lock_of_roots_nor_reads_a_file_of_the_registry() {
    let host = Host::new("stranger");
    let (folder, _lock) = living(&host);
    let vms = host.runtime().join("vms");
    let mut files = 0;
    for place in [host.runtime(), vms.clone(), folder] {
        assert!(!can(MALLORY, "ls", &[text(&place)]), "{place:?} can be listed");
        for entry in fs::read_dir(&place).expect("root reads it") {
            let path = entry.expect("an entry").path();
            if path.is_file() && !path.ends_with("console.sock") {
                files += 1;
                assert!(!can(MALLORY, "cat", &[text(&path)]), "{path:?} can be read");
                let lock = ["--shared", "--nonblock", text(&path), "true"];
                assert!(!can(MALLORY, "flock", &lock), "{path:?} can be locked");
            }
        }
    }
    assert!(files >= 3, "the registry's lock and mark, and the VM's lock");
    let lock = ["--shared", "--nonblock", text(&vms), "true"];
    assert!(!can(MALLORY, "flock", &lock), "the directory can be locked");
    assert!(!can(MALLORY, "touch", &[text(&vms.join("new"))]));
    host.root(["ps"]).ok();
}

#[test]
fn a_lock_that_is_held_is_an_error_that_names_the_holder() {
    let host = Host::new("held");
    host.root(["ps"]).ok();
    let lock = File::open(host.runtime().join("vms/.lock")).expect("root's file");
    let lock = Flock::lock(lock, FlockArg::LockSharedNonblock).expect("no other holds it");
    let output = host.root(["ps"]).limit(HELD_MAX).run().expect(1);
    let (errors, holder) = (words(&output), format!("process {} (", std::process::id()));
    assert!(errors.contains(&holder) && errors.contains("help: "), "{output}");
    drop(lock);
    host.root(["ps"]).ok();
}

/// From too few files to start at all up to enough for all. The registry's own tests cover the command's
/// reaction to a lock that it can't open.
#[test]
fn a_command_at_its_limit_of_open_files_removes_no_running_vm() {
    let host = Host::new("limit");
    let (folder, _lock) = living(&host);
    let (mut failed, mut worked) = (0, 0);
    for limit in 3..24 {
        let script = format!(
            "ulimit -n {limit}; exec {} ps",
            text(&guest_tests::command::binary())
        );
        let call = Call::new("sh").args(["-c", &script]);
        match host.set(call).run().status {
            0 => worked += 1,
            _ => failed += 1,
        }
        assert!(
            folder.join("console.sock").exists(),
            "removed at {limit} open files"
        );
    }
    assert!(failed > 0 && worked > 0, "{failed} failed, {worked} worked");
}

#[test]
fn a_wrong_runtime_directory_loses_nothing() {
    let host = Host::new("wrong");
    let home = host.0.join("home");
    let precious = home.join("vms/web/disk.raw");
    fs::create_dir_all(precious.parent().expect("a folder")).expect("our own directory");
    fs::write(&precious, "all").expect("our own directory");
    for command in [
        ["ps"].as_slice(),
        &["stop", "web"],
        &["run", "--image", "none", "--name", "web"],
    ] {
        let call = host.root(command).env("MIRRORBALL_RUNTIME", &home);
        let output = call.run();
        assert_ne!(output.status, 0, "{output}");
        assert_eq!(fs::read(&precious).expect("still there"), b"all", "{output}");
    }
    let output = host.root(["ps"]).env("MIRRORBALL_RUNTIME", &home).run().expect(1);
    let errors = words(&output);
    assert!(
        errors.contains("not made by mirrorball") && errors.contains("help: "),
        "{output}"
    );
    // One that another user can lead elsewhere, or write to.
    let link = host.0.join("link");
    symlink(&home, &link).expect("our own directory");
    let open = host.0.join("open");
    fs::create_dir(&open).expect("our own directory");
    fs::set_permissions(&open, Permissions::from_mode(0o777)).expect("our own directory");
    for (wrong, why) in [
        (link, "symbolic link"),
        (open, "written by other users"),
        (host.home(ALICE), "belongs to another user"),
    ] {
        let output = host
            .root(["ps"])
            .env("MIRRORBALL_RUNTIME", &wrong)
            .run()
            .expect(1);
        assert!(words(&output).contains(why), "{output}");
        assert!(!wrong.join("vms/.mirrorball").exists(), "{wrong:?} was used");
    }
}

#[test]
fn an_import_is_readable_by_its_user_alone() {
    let host = Host::new("import");
    // In a data directory that all may look into.
    fs::create_dir_all(host.0.join("data")).expect("our own directory");
    let disk = host.0.sparse("private.raw", 1 << 20);
    fs::set_permissions(&disk, Permissions::from_mode(0o600)).expect("our own file");
    host.root(["image", "import", text(&disk), "--name", "private"])
        .ok();
    let image = host.0.join("data/images/private");
    assert_eq!(mode(&image), 0o700);
    let mut files = 0;
    for file in fs::read_dir(&image).expect("root reads it") {
        let path = file.expect("an entry").path();
        files += 1;
        assert_eq!(mode(&path), 0o400, "{path:?}");
        assert!(!can(MALLORY, "cat", &[text(&path)]), "{path:?} can be read");
        let lock = ["--shared", "--nonblock", text(&path), "true"];
        assert!(!can(MALLORY, "flock", &lock), "{path:?} can be locked");
    }
    assert_eq!(files, 3, "the disk, the record and the lock");
    host.root(["image", "rm", "private"]).ok();
}

/// A group of which alice is a member.
const PROJECT: u32 = 4400;
/// A group whose members may connect to the API.
const API_GROUP: &str = "users";

/// Root's API on a host, with limits for members.
struct Api<'a> {
    host: &'a Host,
    process: Running,
}

impl Drop for Api<'_> {
    fn drop(&mut self) {
        self.process.signal(Signal::SIGTERM);
    }
}

impl<'a> Api<'a> {
    /// Members may name files below the host's directory.
    fn start(host: &'a Host) -> Self {
        let place = host.0.path().display();
        let limits =
            format!("[members]\npaths = [\"{place}\"]\nsandbox = \"auto\"\nmemory = \"1G\"\ncpus = 4\n");
        let limits = host.0.write("host.toml", limits);
        let program = binary();
        let words = ["--group", API_GROUP, "--program", text(&program), "--socket"];
        let call = host.set(Call::new(built("mirrorball-api"))).args(words);
        let call = call
            .args([host.0.join("api.sock")])
            .limit(Duration::from_secs(300));
        let process = call.env("MIRRORBALL_HOST_FILE", limits).spawn();
        wait::until("the API serves", SOON, || {
            let about = fs::metadata(host.0.join("api.sock")).ok()?;
            (about.mode() & 0o777 == 0o660).then_some(())
        });
        Self { host, process }
    }

    /// Sends a request of alice's; returns the status and the body.
    fn alice(&self, method: &str, path: &str, body: &Value) -> (u16, String) {
        let socket = self.host.0.join("api.sock");
        let connect = move || {
            let groups = [PROJECT, 100];
            // SAFETY: the bare system calls change this thread alone, which ends with the connection made,
            // and read the list.
            let changed = unsafe {
                [
                    libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()),
                    libc::syscall(libc::SYS_setresgid, ALICE, ALICE, ALICE),
                    libc::syscall(libc::SYS_setresuid, ALICE, ALICE, ALICE),
                ]
            };
            assert_eq!(changed, [0; 3], "root may");
            UnixStream::connect(socket).expect("the group may connect")
        };
        let mut stream = std::thread::spawn(connect).join().expect("no panic");
        let body = body.to_string();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.expect("a status"), body.to_owned())
    }

    /// Starts a VM of alice's with one disk.
    fn start_vm(&self, kernel: &Path, disk: &Value) -> (u16, String) {
        let spec = json!({
            "name": "own", "memory": "64M", "nets": [], "sandbox": "auto",
            "kernel": { "path": kernel }, "disks": [disk],
        });
        self.alice("POST", "/v1/vms", &spec)
    }
}

/// Promise SHARD-35.
#[test]
fn roots_api_opens_the_files_of_a_members_vm_by_the_members_rights() {
    let host = Host::new("openers");
    let home = host.home(ALICE);
    fs::set_permissions(&home, Permissions::from_mode(0o700)).expect("root may");
    let guest = host.0.write("guest", halting_guest());
    fs::set_permissions(&guest, Permissions::from_mode(0o644)).expect("our own file");
    let file = |path: PathBuf, user, group, mode| {
        fs::write(&path, [7; 8192]).expect("room");
        chown(&path, Some(user), Some(group)).expect("root gives files away");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("root may");
        path
    };
    let own = file(home.join("own.raw"), ALICE, ALICE, 0o600);
    let roots = file(host.0.join("roots.raw"), 0, 0, 0o600);
    let project = file(host.0.join("project.raw"), 0, PROJECT, 0o640);
    let swapped = home.join("swapped.raw");
    symlink("../roots.raw", &swapped).expect("root may");
    let outside = home.join("outside.raw");
    symlink("/etc/shadow", &outside).expect("root may");
    let pipe = home.join("pipe.raw");
    does(ALICE, "mkfifo", &[text(&pipe)]);
    let api = Api::start(&host);
    let written = |path: &Path| json!({"path": path, "mode": "exclusive", "persistent": true});
    for (disk, why) in [
        (json!({"path": roots}), "not allowed to read it"),
        (written(&roots), "not allowed to read and write it"),
        // The group may read it, and not write it.
        (written(&project), "not allowed to read and write it"),
        // Alice may put a link in the file's place at any time.
        (json!({"path": swapped}), "not allowed to read it"),
        (json!({"path": outside}), "leads out of"),
        (json!({"path": pipe}), "not a regular file or a block device"),
    ] {
        let (status, body) = api.start_vm(&guest, &disk);
        assert!(status == 422 && body.contains(why), "{disk}: {status}: {body}");
        assert!(body.contains(&format!("opened as user {ALICE}")), "{body}");
    }
    let (status, body) = api.start_vm(&roots, &json!({"path": own}));
    assert!(status == 422 && body.contains("kernel"), "{status}: {body}");

    for disk in [json!({"path": project}), written(&own)] {
        let (status, body) = api.start_vm(&guest, &disk);
        assert_eq!(status, 201, "{disk}: {body}");
        let record = host.root(["inspect", "own"]).ok().json();
        assert_eq!(record["names"]["owner"]["uid"], ALICE, "{record}");
        // The lock is the VM's, though the process that took it has ended.
        let other = File::open(disk["path"].as_str().expect("a path")).expect("root may");
        let locked = Flock::lock(other, FlockArg::LockExclusiveNonblock);
        assert!(locked.is_err(), "{disk} is not locked");
        assert_eq!(api.alice("POST", "/v1/vms/own/kill", &json!({})).0, 200);
    }
    // A clone of root's opens the names by alice's rights, too.
    assert_eq!(api.start_vm(&guest, &json!({"path": own})).0, 201);
    fs::remove_file(&own).expect("root may");
    symlink("../roots.raw", &own).expect("root may");
    let said = host.root(["clone", "--as-is", "own"]).run();
    assert!(
        said.status != 0 && said.errors().contains("not allowed to read it"),
        "{}",
        said.errors()
    );
    assert_eq!(api.alice("POST", "/v1/vms/own/kill", &json!({})).0, 200);
}
