//! Risk: a shard keeps rights that it should have lost, or needs rights that its user does not have.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_tests::command::{Call, copy_binary};
use guest_tests::{Scratch, VmFile, host, mirrorball, wait};

const NAMESPACES: [&str; 6] = ["user", "mnt", "net", "pid", "ipc", "uts"];

#[test]
fn with_require_a_shard_has_lost_everything_before_its_guest_runs() {
    let scratch = Scratch::new("require");
    let vm = VmFile::new("require")
        .key("sandbox", "\"require\"")
        .start(&scratch);
    let missing = vm.inspect()["sandbox_missing"].clone();
    // As far as this kernel has it.
    let lines = missing.as_array().expect("a list");
    let of_landlock =
        |line: &serde_json::Value| line.as_str().is_some_and(|line| line.starts_with("Landlock"));
    assert!(lines.iter().all(of_landlock), "missing: {missing}");
    let (shard, monitor) = (vm.shard(), vm.monitor());
    let namespace = |pid: u32, name: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).expect("running");
    for name in NAMESPACES {
        assert_ne!(
            namespace(shard, name),
            namespace(monitor, name),
            "the {name} namespace"
        );
    }
    let in_root: Vec<_> = fs::read_dir(format!("/proc/{shard}/root"))
        .expect("root may look")
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert!(in_root.is_empty(), "{in_root:?}");
    let uid = uid(shard);
    assert!(OWN_USERS.contains(&uid), "{uid}");
    let threads = fs::read_dir(format!("/proc/{shard}/task"))
        .expect("running")
        .flatten();
    for thread in threads {
        let status = fs::read_to_string(thread.path().join("status")).expect("threads stay");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_else(|| panic!("no {name} in {status}"))
                .trim()
                .to_owned()
        };
        assert_eq!(field("NoNewPrivs:"), "1", "{status}");
        assert_eq!(field("Seccomp:"), "2", "{status}");
        for set in ["CapEff:", "CapPrm:", "CapInh:", "CapBnd:", "CapAmb:"] {
            assert_eq!(u64::from_str_radix(&field(set), 16), Ok(0), "{set} {status}");
        }
        assert!(
            field("Uid:").split_whitespace().all(|one| one == uid.to_string()),
            "{status}"
        );
    }
    let limits = fs::read_to_string(format!("/proc/{shard}/limits")).expect("running");
    let core = limits.lines().find(|line| line.starts_with("Max core file size"));
    let core: Vec<_> = core.expect("a limit").split_whitespace().collect();
    assert_eq!(core[4..6], ["0", "0"], "{limits}");
    let other = VmFile::new("other").start(&scratch);
    let others = self::uid(other.shard());
    assert!(OWN_USERS.contains(&others) && others != uid, "{others}");
    other.kill();
    vm.kill();
}

/// The numbers of root's shards on a host whose `/etc/subuid` names none.
const OWN_USERS: std::ops::Range<u32> = 0x7000_0000..0x8000_0000;

/// The user of a process, outside.
fn uid(pid: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("running");
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let first = uids.and_then(|uids| uids.split_whitespace().next());
    first.and_then(|uid| uid.parse().ok()).expect("a number")
}

/// A host that allows no further user namespaces, until the test is over.
struct NoUserNamespaces(String);

const USER_NAMESPACES: &str = "/proc/sys/user/max_user_namespaces";

impl NoUserNamespaces {
    fn set() -> Self {
        let before = fs::read_to_string(USER_NAMESPACES).expect("the host has user namespaces");
        fs::write(USER_NAMESPACES, "0").expect("root may change it");
        Self(before)
    }
}

impl Drop for NoUserNamespaces {
    fn drop(&mut self) {
        // A second error would hide the first.
        let _ = fs::write(USER_NAMESPACES, &self.0);
    }
}

#[test]
fn without_user_namespaces_require_refuses_and_auto_reports_it() {
    let scratch = Scratch::new("nouser");
    let _host = NoUserNamespaces::set();
    let strict = VmFile::new("strict")
        .key("sandbox", "\"require\"")
        .write(&scratch);
    let refused = mirrorball(["run", "-d"]).args([&strict]).run().expect(1);
    let why = refused.errors();
    assert_eq!(why.lines().count(), 1, "{refused}");
    assert!(
        why.contains("user namespace") && why.contains("--sandbox=auto"),
        "{refused}"
    );
    let vm = VmFile::new("lax").start(&scratch);
    let missing = vm.inspect()["sandbox_missing"].to_string();
    assert!(missing.contains("user namespace"), "{missing}");
    // The other layers hold.
    let status = fs::read_to_string(format!("/proc/{}/status", vm.shard())).expect("running");
    assert!(status.contains("Seccomp:\t2"), "{status}");
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    let uid = uid(vm.shard());
    assert!(OWN_USERS.contains(&uid), "{uid}");
    vm.stop();
}

const USER: u32 = 1000;

/// A user with a home of its own, in which is the image `tiny`.
struct User {
    home: PathBuf,
}

impl User {
    fn new(scratch: &Scratch) -> Self {
        let home = scratch.join("home");
        let image = home.join("images").join(VmFile::TINY);
        fs::create_dir_all(&image).expect("a new directory of this test");
        let files = fs::read_dir(host::data_directory().join("images").join(VmFile::TINY))
            .expect("the image is built");
        for file in files.flatten() {
            fs::copy(file.path(), image.join(file.file_name())).expect("room for the image");
        }
        // The build directory may be closed to others.
        copy_binary(&home.join("command")).expect("room for the command");
        let user = Self { home };
        user.own(&user.home);
        user
    }

    fn own(&self, path: &Path) {
        chown(path, Some(USER), Some(USER)).expect("root may");
        if path.is_dir() {
            for entry in fs::read_dir(path).expect("just made").flatten() {
                self.own(&entry.path());
            }
        }
    }

    fn call<I: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Call {
        let ids = [format!("--reuid={USER}"), format!("--regid={USER}")];
        Call::new("setpriv")
            .args(ids)
            .args(["--clear-groups", "--"])
            .args([self.home.join("command")])
            .args(arguments)
            .env("HOME", &self.home)
            .env("TMPDIR", &self.home)
            .env("MIRRORBALL_DATA", &self.home)
            .env("XDG_RUNTIME_DIR", &self.home)
    }
}

#[test]
fn user_who_may_use_kvm_needs_no_other_right() {
    let scratch = Scratch::new("user");
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).expect("our own directory");
    let user = User::new(&scratch);
    let disk = user.home.join("disk");
    fs::write(&disk, [7; 1 << 20]).expect("room for a small disk");
    user.own(&disk);
    let before = fs::metadata("/dev/kvm")
        .expect("these tests need KVM")
        .permissions();
    fs::set_permissions("/dev/kvm", fs::Permissions::from_mode(0o666)).expect("root may");
    let run = [
        "run",
        "--lab",
        "never",
        "-d",
        "--image",
        VmFile::TINY,
        "--name",
        "users",
    ];
    user.call(run)
        .args(["--memory", "128M", "--sandbox", "require", "--disk"])
        .args([format!("{}:exclusive:persistent", disk.display())])
        .ok();
    wait::until("the agent", Duration::from_secs(60), || {
        let tried = user.call(["exec", "users", "--", "true"]).run();
        (tried.status == 0).then_some(())
    });
    let said = user
        .call(["exec", "users", "--", "sh", "-c"])
        .args(["head -c 3 /dev/vda; ls /sys/class/net; echo new >/dev/vda; sync"])
        .ok()
        .text();
    assert!(
        said.starts_with("\x07\x07\x07") && said.contains("eth0"),
        "{said}"
    );
    let known = user.call(["inspect", "users"]).ok().json();
    let shard = known["shard_pid"].as_u64().expect("a process number");
    let status = fs::read_to_string(format!("/proc/{shard}/status")).expect("running");
    assert!(
        status.contains(&format!("Uid:\t{USER}\t{USER}\t{USER}\t{USER}")),
        "{status}"
    );
    user.call(["stop", "users"]).ok();
    fs::set_permissions("/dev/kvm", before).expect("root may");
    assert!(fs::read(&disk).expect("still there").starts_with(b"new\n"));
    assert_eq!(user.call(["ps", "--json"]).ok().json(), serde_json::json!([]));
}
