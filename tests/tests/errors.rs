//! Risk: bad input ends in an error without a cause, in a wrong status, or leaves something over.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_tests::command::Call;
use guest_tests::host::Traces;
use guest_tests::{Output, Scratch, VmFile, mirrorball};

/// Bad input must be refused at once, not after a boot.
const AT_ONCE: Duration = Duration::from_secs(20);

/// Runs a VM file that must be refused: exit status 1, one line with each of `words`, nothing left over.
#[track_caller]
fn refused(file: &VmFile, words: &[&str]) -> Output {
    let scratch = Scratch::new("refused");
    let before = Traces::now();
    let path = file.write(&scratch);
    let output = mirrorball(["run"]).args([&path]).limit(AT_ONCE).run().expect(1);
    says(&output, words);
    one_line(&output);
    before.expect_unchanged("bad input");
    output
}

#[track_caller]
fn says(output: &Output, words: &[&str]) {
    let message = output.errors().to_lowercase();
    for word in words {
        assert!(
            message.contains(&word.to_lowercase()),
            "does not say {word:?}:\n{output}"
        );
    }
}

/// A reason and its help fit one line; a fault in a file is shown in its place instead, with one line of
/// help.
#[track_caller]
fn one_line(output: &Output) {
    let errors = output.errors();
    let lines = errors.lines().filter(|line| !line.trim().is_empty()).count();
    let in_its_place = errors.matches("  × ").count() == 1 && errors.matches("help: ").count() == 1;
    assert!(
        in_its_place || (1..=2).contains(&lines),
        "not one line:\n{output}"
    );
    assert!(
        !errors.contains("panicked") && !errors.contains("RUST_BACKTRACE"),
        "a riddle:\n{output}"
    );
}

#[test]
fn missing_and_unreadable_files_are_refused_with_their_path() {
    refused(
        &VmFile::new("nodisk").disk("/no/such/disk".as_ref(), ""),
        &["/no/such/disk"],
    );
    refused(
        &VmFile::of("noimage", "no-such-image"),
        &["no-such-image", "image"],
    );
    let scratch = Scratch::new("files");
    let folder = scratch.path().to_path_buf();
    refused(
        &VmFile::new("folder").disk(&folder, ""),
        &[folder.to_str().expect("ASCII"), "directory"],
    );
    let empty = scratch.write("empty", b"");
    refused(
        &VmFile::new("empty").disk(&empty, ""),
        &[empty.to_str().expect("ASCII")],
    );
    let missing = mirrorball(["run", "/no/such/file.toml"])
        .limit(AT_ONCE)
        .run()
        .expect(1);
    says(&missing, &["/no/such/file.toml"]);
    one_line(&missing);
}

/// Runs the command as another user than root, who may do everything.
fn nobody(scratch: &Scratch, arguments: &[&OsStr]) -> Output {
    assert!(
        nix::unistd::geteuid().is_root(),
        "this test changes to another user, which needs root"
    );
    let binary = scratch.join("mirrorball");
    guest_tests::command::copy_binary(&binary).expect("room for the command");
    let home = scratch.join("home");
    std::fs::create_dir(&home).expect("a new directory");
    nix::unistd::chown(&home, Some(65534.into()), Some(65534.into())).expect("root may");
    let call = Call::new("setpriv").args([
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--inh-caps=-all",
    ]);
    let call = call.args([binary.as_os_str()]).args(arguments);
    call.env("HOME", &home)
        .env("XDG_RUNTIME_DIR", &home)
        .env("TMPDIR", &home)
        .limit(AT_ONCE)
        .run()
}

/// A copy of the command in a directory of its own, with the program of shards that `make_shard` puts at a
/// path.
fn command_with_shard(scratch: &Scratch, make_shard: impl FnOnce(&Path)) -> (PathBuf, PathBuf) {
    let command = scratch.join("mirrorball");
    guest_tests::command::copy_binary(&command).expect("room for the command");
    let shard = scratch.join("mirrorball-shard");
    std::fs::remove_file(&shard).expect("just copied");
    make_shard(&shard);
    (command, shard)
}

/// Runs a guest with that command, which must end before it starts: exit status 1, one line with each of
/// `words`.
#[track_caller]
fn refused_by_shard(name: &str, make_shard: impl FnOnce(&Path), words: &[&str]) {
    let scratch = Scratch::new(name);
    let before = Traces::now();
    let (command, shard) = command_with_shard(&scratch, make_shard);
    let path = VmFile::new(name).write(&scratch);
    let run = ["run", "--lab", "never"].map(OsStr::new);
    let call = Call::new(command).args(run).args([path.as_os_str()]);
    let output = call.limit(AT_ONCE).run().expect(1);
    let shard = shard.to_str().expect("ASCII");
    says(&output, &[&[shard, "help: "], words].concat());
    one_line(&output);
    before.expect_unchanged("a program of shards that is not used");
}

#[test]
fn missing_program_of_shards_is_named_with_help() {
    refused_by_shard("noshard", |_| (), &["no such file", "install"]);
    let not_executable = |shard: &Path| std::fs::write(shard, "").expect("room for a file");
    refused_by_shard("plainshard", not_executable, &["no executable file", "install"]);
}

#[test]
fn program_of_shards_of_an_unlike_version_is_refused_with_both_versions() {
    let other = |shard: &Path| {
        let tool = guest_tests::command::built("guest-tool");
        std::fs::copy(tool, shard).expect("room for the tool");
    };
    // The tool takes the place of a program that speaks these versions.
    refused_by_shard(
        "othershard",
        other,
        &[
            "speaks versions 65000 to 65001",
            "and this program version",
            "upgrade the older one",
        ],
    );
}

#[test]
fn vm_file_that_the_user_may_not_read_is_refused() {
    let scratch = Scratch::new("denied");
    let path = VmFile::new("denied").write(&scratch);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).expect("our own file");
    let output = nobody(&scratch, &["check".as_ref(), path.as_os_str()]).expect(1);
    says(&output, &[path.to_str().expect("ASCII"), "permission"]);
}

#[test]
fn missing_right_to_use_kvm_is_reported_with_its_group() {
    let scratch = Scratch::new("kvm");
    let before = std::fs::metadata("/dev/kvm")
        .expect("these tests need KVM")
        .permissions();
    std::fs::set_permissions("/dev/kvm", std::fs::Permissions::from_mode(0o600)).expect("root may");
    let path = VmFile::new("nokvm").write(&scratch);
    let run = ["run", "--lab", "never"].map(OsStr::new);
    let output = nobody(&scratch, &[&run[..], &[path.as_os_str()]].concat());
    std::fs::set_permissions("/dev/kvm", before).expect("root may");
    let output = output.expect(1);
    says(&output, &["/dev/kvm", "group"]);
    one_line(&output);
}

#[test]
fn missing_and_invalid_kernels_are_refused_with_their_path() {
    let scratch = Scratch::new("kernel");
    let text = scratch.write("kernel", "this is no kernel, whatever its name\n".repeat(100));
    let place = text.to_str().expect("ASCII").to_owned();
    let kernel = format!("{{ path = {place:?} }}");
    let output = refused(&VmFile::new("kernel").key("kernel", &kernel), &["kernel"]);
    says(&output, &[&place]);
    let absent = "{ path = \"/no/such/vmlinuz\" }";
    refused(
        &VmFile::new("nokernel").key("kernel", absent),
        &["/no/such/vmlinuz"],
    );
    // The start of a real header without the rest.
    let mut cut = vec![0u8; 4096];
    cut[0x1f1] = 255;
    cut[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    cut[0x202..0x206].copy_from_slice(b"HdrS");
    let cut = scratch.write("cut", cut);
    refused(
        &VmFile::new("cut").key("kernel", &format!("{{ path = {cut:?} }}")),
        &["kernel"],
    );
}

#[test]
fn more_memory_than_the_host_has_is_refused() {
    refused(&VmFile::new("huge").memory("3T"), &["memory"]);
}

#[test]
fn wrong_keys_sizes_and_names_are_shown_in_their_place() {
    let scratch = Scratch::new("toml");
    let cases: [(&str, &str, &str); 7] = [
        ("image = \"tiny\"\nmemroy = \"64M\"\n", "memroy", "memory"),
        ("image = \"tiny\"\nmemory = \"64X\"\n", "64X", "M"),
        ("image = \"tiny\"\ncpus = 0\n", "cpus", "254"),
        ("image = \"tiny\"\ncpus = 300\n", "300", "u8"),
        ("image = \"tiny\"\nmemory = \"1M\"\n", "1M", "64M"),
        ("image = \"tiny\"\nname = \"a/b\"\n", "a/b", "name"),
        ("image = \"tiny\n", "image", "line"),
    ];
    for (index, (text, wrong, help)) in cases.iter().enumerate() {
        let path = scratch.write(&format!("case{index}.toml"), text);
        for command in [vec!["check"], vec!["run"]] {
            let output = mirrorball(command).args([&path]).limit(AT_ONCE).run().expect(1);
            says(&output, &[&format!("case{index}.toml"), wrong]);
            if *help != "u8" && *help != "line" {
                says(&output, &[help]);
            }
            assert!(
                output
                    .errors()
                    .contains(&format!(":{}:", 1 + usize::from(index != 6))),
                "no line number:\n{output}"
            );
        }
    }
    let good = VmFile::new("good").write(&scratch);
    mirrorball(["check"]).args([&good]).ok();
}

#[test]
fn duplicate_name_is_refused_and_the_first_vm_stays() {
    let scratch = Scratch::new("names");
    let file = VmFile::new("twin");
    let first = file.start_only(&scratch);
    let path = file.write(&scratch);
    let second = mirrorball(["run"]).args([&path]).limit(AT_ONCE).run().expect(1);
    says(&second, &[first.name()]);
    one_line(&second);
    assert!(first.listed().is_some(), "the second took the first one's place");
    first.kill();
    let both = mirrorball(["run"])
        .args([&path, &path])
        .limit(AT_ONCE)
        .run()
        .expect(1);
    says(&both, &[first.name()]);
}

#[test]
fn frame_filter_that_no_monitor_started_is_refused_with_help() {
    let program = guest_tests::command::binary().with_file_name("mirrorball-shard");
    for words in [&[][..], &["--help"], &["sandbox=on"]] {
        let call = Call::new(&program).args(["--frame-filter"]).args(words);
        let output = call.limit(AT_ONCE).run().expect(2);
        says(
            &output,
            &["mirrorball-shard --frame-filter", "help: ", "mirrorball run"],
        );
        one_line(&output);
    }
}

#[test]
fn missing_taps_passt_and_taken_ports_are_refused() {
    let no_tap = VmFile::new("notap").net("kind = \"tap\"\ntap = \"nosuchtap0\"");
    refused(&no_tap, &["nosuchtap0", "ip tuntap"]);
    let scratch = Scratch::new("nopasst");
    let before = Traces::now();
    let path = VmFile::new("nopasst").net("kind = \"user\"").write(&scratch);
    let output = mirrorball(["run"])
        .args([&path])
        .env("PATH", "/nowhere")
        .limit(AT_ONCE)
        .run()
        .expect(1);
    says(&output, &["passt", "install"]);
    one_line(&output);
    before.expect_unchanged("a missing passt");
    let taken = std::net::TcpListener::bind(("0.0.0.0", 0)).expect("a free port");
    let port = taken.local_addr().expect("bound").port();
    let file = VmFile::new("taken").net(&format!("kind = \"user\"\nforward = [\"{port}:80\"]"));
    refused(&file, &[&port.to_string(), "in use"]);
    let taken = std::net::UdpSocket::bind(("0.0.0.0", 0)).expect("a free port");
    let port = taken.local_addr().expect("bound").port();
    let file = VmFile::new("udptaken").net(&format!("kind = \"user\"\nforward = [\"udp:{port}:80\"]"));
    refused(&file, &[&format!("{port}/udp"), "in use"]);
}

#[test]
fn commands_on_a_missing_vm_are_refused_with_its_name() {
    let commands: [&[&str]; 7] = [
        &["exec", "no-such-vm", "--", "true"],
        &["console", "no-such-vm"],
        &["stop", "no-such-vm"],
        &["kill", "no-such-vm"],
        &["logs", "no-such-vm"],
        &["inspect", "no-such-vm"],
        &["cp", "no-such-vm:/etc/passwd", "/tmp/never-made"],
    ];
    for command in commands {
        let output = mirrorball(command).limit(AT_ONCE).run().expect(1);
        says(&output, &["no-such-vm"]);
        one_line(&output);
    }
    assert!(!std::path::Path::new("/tmp/never-made").exists());
}

#[test]
fn wrong_command_line_is_a_usage_error() {
    for command in [
        &["no-such-command"][..],
        &["run", "--no-such-option"],
        &["exec"],
        &[],
    ] {
        let output = mirrorball(command).limit(AT_ONCE).run().expect(2);
        assert!(!output.stderr.is_empty(), "{output}");
    }
    mirrorball(["--version"]).ok();
    mirrorball(["--help"]).ok();
}

/// A snapshot's directory as its author may make it: `spec` is JSON.
fn snapshot(scratch: &Scratch, spec: &str) -> PathBuf {
    let directory = scratch.join("snap");
    std::fs::create_dir(&directory).expect("a new directory");
    std::fs::set_permissions(&directory, Permissions::from_mode(0o700)).expect("our own directory");
    let manifest = format!(
        r#"{{"version": 1, "name": "foreign", "spec": {spec}, "overlays": [],
            "files": [["memory", 4096], ["state.json", 2]]}}"#
    );
    for (name, text) in [
        ("snapshot.json", manifest.as_bytes()),
        ("memory", &[0; 4096]),
        ("state.json", b"{}"),
    ] {
        let path = directory.join(name);
        std::fs::write(&path, text).expect("a file");
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("our own file");
    }
    directory
}

/// Restores a snapshot that must be refused.
#[track_caller]
fn not_restored(directory: &Path, flags: &[&str], words: &[&str]) {
    let before = Traces::now();
    let call = mirrorball(["restore"]).args([directory]).args(flags);
    let output = call.limit(AT_ONCE).run().expect(1);
    says(&output, words);
    one_line(&output);
    before.expect_unchanged("a bad snapshot");
}

#[test]
fn a_snapshot_gets_no_file_of_the_host_that_is_not_named_again() {
    for (spec, words) in [
        (
            r#"{"image": "tiny", "disks": [{"path": "/etc/shadow"}]}"#,
            &["/etc/shadow", "--disk 0=/etc/shadow"][..],
        ),
        (
            r#"{"image": "tiny", "disks": [{"path": "/dev/sda", "mode": "exclusive", "persistent": true}]}"#,
            &["/dev/sda", "only it may write"],
        ),
        (
            r#"{"kernel": {"path": "/etc/shadow"}}"#,
            &["/etc/shadow", "--kernel"],
        ),
        (
            r#"{"image": "tiny", "nets": [{"kind": "tap", "tap": "tap0"}]}"#,
            &["tap0", "--as-is"],
        ),
        (
            r#"{"image": "tiny", "share_group": "lessons"}"#,
            &["share memory with it", "--share-group lessons"],
        ),
    ] {
        let scratch = Scratch::new("foreign");
        not_restored(&snapshot(&scratch, spec), &[], words);
    }
    let scratch = Scratch::new("foreign");
    let directory = snapshot(&scratch, r#"{"image": "tiny", "disks": [{"path": "link"}]}"#);
    std::os::unix::fs::symlink("/etc/shadow", directory.join("link")).expect("a link");
    not_restored(&directory, &[], &["link as disk 0"]);
    not_restored(&directory, &["--disk", "1=/etc/shadow"], &["one disk"]);
}

#[test]
fn snapshot_with_links_pipes_or_oversized_files_is_refused_at_once() {
    let refused = |change: &dyn Fn(&Path), words: &[&str]| {
        let scratch = Scratch::new("foreign");
        let directory = snapshot(&scratch, r#"{"image": "tiny"}"#);
        change(&directory);
        not_restored(&directory, &["--lab", "never"], words);
    };
    let replace = |path: &Path| {
        std::fs::remove_file(path).expect("a file");
        std::os::unix::fs::symlink("/etc/shadow", path).expect("a link");
    };
    refused(&|snap| replace(&snap.join("snapshot.json")), &["is a link"]);
    refused(&|snap| replace(&snap.join("memory")), &["memory", "is a link"]);
    let pipe = |path: &Path| {
        std::fs::remove_file(path).expect("a file");
        nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    };
    refused(
        &|snap| pipe(&snap.join("state.json")),
        &["state.json", "no regular file"],
    );
    let long = |path: &Path| {
        let file = std::fs::File::options().write(true).open(path).expect("a file");
        file.set_len(1 << 40).expect("a longer file");
    };
    refused(&|snap| long(&snap.join("snapshot.json")), &["longer than"]);
    refused(
        &|snap| {
            long(&snap.join("state.json"));
            let manifest = snap.join("snapshot.json");
            let text = std::fs::read_to_string(&manifest).expect("a manifest");
            let text = text.replace(r#"["state.json", 2]"#, r#"["state.json", 1099511627776]"#);
            std::fs::write(&manifest, text).expect("a manifest");
        },
        &["state.json", "longer than"],
    );
    let others = |path: &Path, mode| {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("our own file");
    };
    refused(&|snap| others(&snap.join("memory"), 0o666), &["memory", "chmod"]);
    refused(&|snap| others(snap, 0o777), &["snap", "chmod"]);
    refused(
        &|snap| nix::unistd::chown(snap, Some(65534.into()), None).expect("root may"),
        &["belongs to user 65534", "copy"],
    );
}

/// Writes a program `systemd-run` that prints its arguments, and executes the command in place of itself.
fn write_starter(scratch: &Scratch) {
    let starter = scratch.join("systemd-run");
    let script = "#!/bin/sh\necho \"$@\"\nwhile [ \"$1\" != -- ]; do shift; done\nshift\nexec \"$@\"\n";
    std::fs::write(&starter, script).expect("room for a script");
    std::fs::set_permissions(&starter, Permissions::from_mode(0o755)).expect("our own file");
}

/// Promise CELL-48.
#[test]
fn cluster_comes_up_in_a_delegated_scope_where_the_service_manager_makes_one() {
    let scratch = Scratch::new("cluster-scope");
    let up = |more: &[&str]| {
        let call = mirrorball(["cluster", "up", "--lab", "never", "absent.toml"]).args(more);
        let call = call
            .env("PATH", scratch.path())
            .env("MIRRORBALL_RUNTIME", scratch.join("run"));
        let output = call.limit(AT_ONCE).run().expect(1);
        // The command itself has run, in the scope or without one: there is no such file.
        says(&output, &["absent.toml"]);
        output
    };
    assert_eq!(up(&[]).text(), "", "no service manager");
    write_starter(&scratch);
    let asked = up(&[]).text();
    assert!(asked.starts_with("--scope --quiet --collect "), "{asked}");
    assert!(
        asked.contains("--property=Delegate=yes --property=TasksMax=infinity -- "),
        "{asked}"
    );
    assert!(
        asked.trim_end().ends_with(" cluster up --lab never absent.toml"),
        "{asked}"
    );
    assert_eq!(
        asked.lines().count(),
        1,
        "the command in the scope asks for no other one: {asked}"
    );
    assert_eq!(
        up(&["--foreground"]).text(),
        "",
        "a service manager's own process stays where it is"
    );
    // A manager that can't be reached.
    let refusing = "#!/bin/sh\nexit 1\n";
    std::fs::write(scratch.join("systemd-run"), refusing).expect("room for a script");
    assert_eq!(up(&[]).text(), "");
}

#[test]
fn scope_comes_from_the_service_manager_and_a_missing_one_is_reported_with_help() {
    let scratch = Scratch::new("scope");
    let run = ["run", "-d", "--scope", "--kernel", "vmlinux", "--name", "lasting"];
    let path = |call: Call| call.env("PATH", scratch.path()).limit(AT_ONCE);
    let output = path(mirrorball(run)).run().expect(1);
    says(&output, &["--scope: systemd-run:", "install systemd"]);
    one_line(&output);
    write_starter(&scratch);
    let output = path(mirrorball(run)).run().expect(1);
    // The command itself has run: there is no such kernel.
    says(&output, &["vmlinux", "no such file"]);
    let asked = output.text();
    assert!(asked.starts_with("--scope --quiet --collect "), "{output}");
    let own = " -d --kernel vmlinux --name lasting";
    assert!(asked.trim_end().ends_with(own), "{output}");
}
