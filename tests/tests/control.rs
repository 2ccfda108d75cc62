//! Risk: a person's operation on a running VM is lost, changed or misreported.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use guest_tests::command::{BOOT_LIMIT, Call};
use guest_tests::pattern::Numbers;
use guest_tests::terminal::Terminal;
use guest_tests::{Scratch, Vm, VmFile, host, mirrorball, wait};
use nix::sys::signal::Signal;

const SOON: Duration = Duration::from_secs(15);
/// Byte of Ctrl-], which leaves the console.
const DETACH: &[u8] = b"\x1d";

#[test]
fn exec_and_cp_carry_binary_data_and_exit_statuses() {
    let scratch = Scratch::new("exec");
    let vm = VmFile::new("exec").start(&scratch);

    let mut bytes = vec![0; 3 << 20];
    Numbers::new(31).fill(&mut bytes);
    bytes.extend(0..=255u8);
    let echoed = vm.exec(["cat"]).input(&bytes).ok();
    assert!(
        echoed.stdout == bytes,
        "3 MB through cat came back different, {} bytes",
        echoed.stdout.len()
    );

    for status in [0, 1, 2, 70, 125, 255] {
        vm.exec(["sh", "-c", &format!("exit {status}")])
            .run()
            .expect(status);
    }
    vm.exec(["sh", "-c", "kill -9 $$"]).run().expect(128 + 9);
    let both = vm.exec(["sh", "-c", "echo out; echo err >&2"]).ok();
    assert_eq!((both.text().as_str(), both.errors().as_str()), ("out\n", "err\n"));
    let words = vm.exec(["printf", "%s|", "two words", "", "$HOME", "*"]).ok();
    assert_eq!(words.text(), "two words||$HOME|*|");
    let missing = vm.exec(["no-such-program"]).run();
    assert_ne!(missing.status, 0);
    assert!(missing.errors().contains("no-such-program"), "{missing}");

    let there = scratch.write("there", &bytes);
    fs::set_permissions(&there, fs::Permissions::from_mode(0o741)).expect("our own file");
    vm.put(&there, "/tmp/there");
    assert_eq!(
        vm.sh("stat -c '%a %s' /tmp/there").trim(),
        format!("741 {}", bytes.len())
    );
    let back = scratch.join("back");
    vm.get("/tmp/there", &back);
    assert!(
        fs::read(&back).expect("copied") == bytes,
        "a file came back different"
    );
    let bits = fs::metadata(&back).expect("copied").permissions().mode();
    assert_eq!(bits & 0o7777, 0o741, "the guest's permission bits");
    vm.sh("mkdir /tmp/folder");
    vm.put(&there, "/tmp/folder");
    assert_eq!(vm.sh("ls /tmp/folder").trim(), "there");
    let from = format!("{}:/tmp/absent", vm.name());
    let absent = mirrorball(["cp"])
        .args([from.as_ref(), scratch.join("absent").as_os_str()])
        .run()
        .expect(1);
    assert!(absent.errors().contains("/tmp/absent"), "{absent}");
    assert!(!scratch.join("absent").exists(), "a failed copy left a file");
    lost_client_is_replaced_by_another(&vm);
    vm.kill();
}

/// Kills a client of a kept program, and goes on with the program by another client.
#[track_caller]
fn lost_client_is_replaced_by_another(vm: &Vm) {
    let script = "echo one; until [ -e /tmp/go ]; do sleep 0.1; done; echo two; exit 5";
    let mut first = mirrorball(["exec", vm.name(), "-T", "--keep", "work", "--"])
        .args(["sh", "-c", script])
        .spawn();
    first.wait_for("one", SOON);
    first.signal(Signal::SIGKILL);
    assert_ne!(first.wait().status, 5);
    vm.sh("touch /tmp/go");
    let attach = || mirrorball(["exec", vm.name(), "--attach", "work"]).run();
    assert_eq!(attach().expect(5).text(), "two\n");
    let late = attach().expect(1);
    assert!(late.errors().contains("no kept program has the id"), "{late}");
}

#[test]
fn ps_inspect_and_logs_show_a_running_vm() {
    let scratch = Scratch::new("lists");
    let vm = VmFile::new("lists").cpus(2).start(&scratch);
    let entry = vm.listed().expect("a running VM is listed");
    let table = mirrorball(["ps"]).ok().text();
    assert!(
        table.contains(vm.name()),
        "ps does not show {}:\n{table}",
        vm.name()
    );
    assert_eq!(entry["spec"]["cpus"], 2, "{entry:#}");
    let whole = vm.inspect();
    assert_eq!(whole["name"], vm.name(), "{whole:#}");
    assert!(
        whole.get("sandbox_missing").is_some(),
        "inspect lacks the sandbox: {whole:#}"
    );
    for pid in [vm.monitor(), vm.shard()] {
        assert!(
            guest_tests::host::is_running(pid),
            "inspect names process {pid}, which is not there"
        );
    }
    let word = format!("logged-{}", std::process::id());
    vm.sh(&format!("echo {word} > /dev/ttyS0"));
    wait::until("the console's line in the logs", SOON, || {
        vm.logs().contains(&word).then_some(())
    });
    let stopped = vm.stop();
    assert!(
        stopped.took < Duration::from_secs(15),
        "the power button was not obeyed:\n{stopped}"
    );
    vm.wait_ended(SOON);
}

#[test]
fn a_console_attaches_detaches_and_gives_the_terminal_back() {
    let scratch = Scratch::new("console");
    let vm = VmFile::new("console").start(&scratch);
    for round in 1..=2 {
        let mut console = Terminal::mirrorball(&["console", vm.name()]);
        wait::until("a raw terminal", SOON, || console.is_raw().then_some(()));
        console.send(format!("\necho round-$(({round} + 40))\n").as_bytes());
        console.expect(&format!("round-{}", round + 40), SOON);
        // Ctrl-C goes to the guest.
        console.send(b"sleep 1000\n");
        std::thread::sleep(Duration::from_millis(500));
        console.send(b"\x03");
        console.send(b"echo after-$((1 + 1))\n");
        console.expect("after-2", SOON);
        console.send(DETACH);
        assert_eq!(console.wait(SOON), 0);
        assert!(!console.is_raw(), "the terminal stayed raw after round {round}");
    }
    // A signal that ends the program gives the terminal back too.
    let mut console = Terminal::mirrorball(&["console", vm.name()]);
    wait::until("a raw terminal", SOON, || console.is_raw().then_some(()));
    console.signal(Signal::SIGTERM);
    assert_eq!(console.wait(SOON), 128 + Signal::SIGTERM as i32);
    assert!(!console.is_raw(), "the terminal stayed raw after SIGTERM");
    assert!(vm.listed().is_some(), "detaching ended the VM");
    vm.kill();
}

#[test]
fn run_on_a_terminal_is_a_shell_in_the_vm() {
    let scratch = Scratch::new("shell");
    let file = VmFile::new("shell");
    let path = file.write(&scratch);
    let mut shell = Terminal::mirrorball(&["run", "--lab", "never", path.to_str().expect("ASCII")]);
    wait::until("a raw terminal", BOOT_LIMIT, || shell.is_raw().then_some(()));
    wait::until("a prompt", BOOT_LIMIT, || {
        shell.seen().contains("# ").then_some(())
    });
    shell.send(b"echo sum-$((20 + 3))\n");
    shell.expect("sum-23", SOON);
    shell.send(b"poweroff -f\n");
    assert_eq!(shell.wait(SOON), 0);
    assert!(!shell.is_raw(), "the terminal stayed raw");
}

#[test]
fn a_paused_vm_stands_still_is_cloned_and_goes_on_where_it_was() {
    let scratch = Scratch::new("pause");
    let vm = VmFile::new("pause").cpus(2).start(&scratch);
    // A reader of the count finds a whole number.
    vm.background("while :; do i=$((i + 1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; done");
    let count = |vm: &Vm| {
        vm.sh("cat /tmp/count || echo 0")
            .trim()
            .parse::<u64>()
            .expect("a number")
    };
    wait::until("the guest counts", SOON, || (count(&vm) > 0).then_some(()));

    for _ in 0..2 {
        mirrorball(["pause", vm.name()]).ok();
    }
    assert_eq!(vm.listed().expect("it is there")["paused"], true);
    let table = mirrorball(["ps"]).ok().text();
    let line = table.lines().find(|line| line.starts_with(vm.name()));
    assert!(line.is_some_and(|line| line.contains(" paused ")), "{table}");
    let before = host::cpu_ticks(vm.shard());
    std::thread::sleep(Duration::from_secs(2));
    let used = host::cpu_ticks(vm.shard()) - before;
    assert!(used <= 4, "{used} ticks of CPU time within 2 s of a pause");
    let refused = vm.exec(["true"]).run().expect(1);
    for word in ["is paused", "`mirrorball resume`"] {
        assert!(refused.errors().contains(word), "{refused}");
    }

    let copy = Vm::named(&format!("{}-copy", vm.name()));
    mirrorball(["clone", vm.name(), "--name", copy.name()]).ok();
    let copied = count(&copy);
    copy.kill();
    assert_eq!(
        vm.listed().expect("it is there")["paused"],
        true,
        "a clone lets it go on"
    );

    mirrorball(["resume", vm.name()]).ok();
    assert_eq!(vm.listed().expect("it is there")["paused"], false);
    let went_on = count(&vm);
    assert!(copied > 0 && went_on > 0, "{copied}, {went_on}");
    wait::until("the guest counts on", SOON, || {
        (count(&vm) > went_on).then_some(())
    });
    mirrorball(["resume", vm.name()]).ok();

    mirrorball(["pause", vm.name()]).ok();
    vm.stop();
    vm.wait_ended(SOON);
}

#[test]
fn wait_nmi_pin_and_reset_act_on_a_running_vm() {
    let scratch = Scratch::new("reset");
    let vm = VmFile::new("reset").cpus(2).start_only(&scratch);
    let wait_for = |what: &str, limit: &str| {
        mirrorball(["wait", vm.name(), "--for", what, "--limit", limit]).limit(BOOT_LIMIT)
    };
    wait_for("running", "60").ok();
    wait_for("agent", "100").ok();
    vm.exec(["true"]).ok();
    let late = wait_for("end", "1").run().expect(124);
    assert!(late.errors().contains("did not end within 1 s"), "{late}");

    let interrupts = || {
        let line = vm.sh("grep NMI: /proc/interrupts");
        let counts = line
            .split_whitespace()
            .skip(1)
            .map_while(|word| word.parse().ok());
        counts.collect::<Vec<u64>>()
    };
    let before = interrupts();
    assert_eq!(before.len(), 2, "a count for each vCPU");
    mirrorball(["nmi", vm.name()]).ok();
    let after = interrupts();
    assert!(
        before.iter().zip(&after).all(|(before, after)| after > before),
        "{before:?}, {after:?}"
    );

    let update = |words: &[&str]| mirrorball(["update", vm.name()]).args(words);
    // The last CPU of the host that the VM may use; lab hosts may have one only.
    let status = |pid: u32, thread: &str| {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("a running process");
        let texts = threads
            .flatten()
            .filter_map(|entry| fs::read_to_string(entry.path().join("status")).ok());
        let name = format!("Name:\t{thread}\n");
        let text = texts
            .into_iter()
            .find(|text| text.starts_with(&name))
            .expect("such a thread");
        let cpus = text
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        cpus.expect("its CPUs").trim().to_owned()
    };
    let own = status(vm.shard(), "vcpu0");
    let last = own.rsplit([',', '-']).next().expect("one CPU").to_owned();
    update(&["--pin", &format!("0={last}")]).ok();
    assert_eq!(
        [status(vm.shard(), "vcpu0"), status(vm.shard(), "vcpu1")],
        [last.clone(), own.clone()]
    );
    let absent = format!("2={last}");
    for (pin, why) in [(absent.as_str(), "no vCPU 2"), ("1=1023", "may not use CPU 1023")] {
        let refused = update(&["--pin", pin]).run().expect(1);
        assert!(refused.errors().contains(why), "{refused}");
    }
    update(&[]).run().expect(1);

    let boot_id = vm.boot_id();
    mirrorball(["pause", vm.name()]).ok();
    // A paused VM is reset all the same, and runs.
    mirrorball(["reset", vm.name()]).limit(BOOT_LIMIT).ok();
    wait_for("agent", "100").ok();
    assert_ne!(vm.boot_id(), boot_id);
    let record = vm.listed().expect("it is there");
    assert_eq!(
        (&record["boots"], &record["paused"]),
        (&2.into(), &false.into()),
        "{record:#}"
    );
    assert_eq!(status(vm.shard(), "vcpu0"), last, "after a reset");
    update(&["--pin", "0=all"]).ok();
    assert_eq!(status(vm.shard(), "vcpu0"), own);

    let waiting = mirrorball(["wait", vm.name()]).limit(BOOT_LIMIT).spawn();
    std::thread::sleep(Duration::from_millis(300));
    vm.kill();
    waiting.wait().expect(0);
    let gone = mirrorball(["wait", vm.name()]).run().expect(1);
    assert!(gone.errors().contains(vm.name()), "{gone}");
}

/// An initramfs with only a shell.
fn without_agent(scratch: &Scratch) -> PathBuf {
    let root = scratch.join("root");
    fs::create_dir_all(root.join("bin")).expect("our own directory");
    fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static is installed");
    let init = root.join("init");
    let script = "#!/bin/busybox sh\n/bin/busybox mkdir /dev\n/bin/busybox mount -t devtmpfs dev /dev\n\
                  echo alone-$((20 + 3)) > /dev/ttyS0\nwhile :; do /bin/busybox sleep 1000; done\n";
    fs::write(&init, script).expect("our own directory");
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).expect("our own file");
    let archive = scratch.join("initrd");
    let pack = "cd \"$1\" && find . | cpio --quiet -o -H newc > \"$2\"";
    Call::new("sh")
        .args(["-c", pack, "sh"])
        .args([&root, &archive])
        .ok();
    archive
}

/// The kernel of the image [`VmFile::TINY`].
fn tiny_kernel() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let data = set("MIRRORBALL_DATA")
        .or_else(|| Some(set("XDG_DATA_HOME")?.join("mirrorball")))
        .or_else(|| Some(set("HOME")?.join(".local/share/mirrorball")));
    data.expect("a user has a home").join("images/tiny/vmlinux")
}

#[test]
fn guest_without_the_agent_runs_and_exec_reports_the_missing_agent() {
    let scratch = Scratch::new("alone");
    let data = scratch.join("data");
    let ours = |call: Call| call.env("MIRRORBALL_DATA", &data);
    let (kernel, initrd) = (tiny_kernel(), without_agent(&scratch));
    let import = mirrorball(["image", "import", "--name", "alone", "--kernel"]);
    ours(import.args([kernel.as_os_str(), "--initrd".as_ref(), initrd.as_os_str()])).ok();
    let images = ours(mirrorball(["image", "ls", "--json"])).ok().json();
    assert_eq!(images[0]["name"], "alone", "{images:#}");

    let vm = Vm::named(&format!("t-alone-{}", std::process::id()));
    let run = mirrorball([
        "run", "-d", "--image", "alone", "--memory", "128M", "--net", "none",
    ]);
    ours(run.args(["--name", vm.name()])).ok();
    wait::until("the guest's own word", BOOT_LIMIT, || {
        vm.logs().contains("alone-23").then_some(())
    });
    let exec = mirrorball(["exec", "--wait", "5", vm.name(), "--", "true"])
        .run()
        .expect(1);
    assert!(
        exec.errors()
            .contains("no agent answers in the guest; images built by"),
        "{exec}"
    );
    assert!(exec.errors().contains("mirrorball-agent"), "{exec}");
    assert!(vm.listed().is_some(), "exec ended the VM");
    vm.kill();
    vm.wait_ended(SOON);
    ours(mirrorball(["image", "rm", "alone"])).ok();
}

#[test]
fn a_flooded_console_does_not_stop_the_guest_or_grow_the_monitor() {
    let scratch = Scratch::new("flood");
    let vm = VmFile::new("flood").cpus(2).start(&scratch);
    let before = guest_tests::host::proportional_bytes(vm.monitor());
    vm.exec(["sh", "-c", "timeout 8 yes flood-flood-flood > /dev/ttyS0"])
        .limit(BOOT_LIMIT)
        .run();
    assert_eq!(vm.sh("echo alive").trim(), "alive");
    let after = guest_tests::host::proportional_bytes(vm.monitor());
    assert!(
        after < before + (8 << 20),
        "the monitor grew from {before} to {after} bytes"
    );
    vm.kill();
}

/// A disk of this many MiB without a zero block.
fn full_disk(scratch: &Scratch, mib: usize) -> PathBuf {
    let mut bytes = vec![0; 1 << 20];
    Numbers::new(37).fill(&mut bytes);
    scratch.write("disk", bytes.repeat(mib))
}

/// The `part` in each "PART/`whole`" that was shown, without those that repeat the one before.
fn parts_shown(seen: &str, whole: &str) -> Vec<String> {
    let end = format!("/{whole}");
    let mut parts: Vec<String> = seen
        .split(&end)
        .filter_map(|text| text.rsplit(']').next())
        .map(|part| part.trim().to_owned())
        .collect();
    // The rest after the last one is dropped.
    parts.pop();
    parts.dedup();
    parts
}

#[test]
fn an_operation_over_two_seconds_shows_a_bar_on_a_terminal_and_none_on_a_pipe() {
    let scratch = Scratch::new("bar");
    // On a pipe, with disks that grow until one takes two seconds on this host.
    let mut mib = 96;
    let disk = loop {
        let disk = full_disk(&scratch, mib);
        let data = scratch.join("data-piped");
        let import = mirrorball(["image", "import", "--name", "piped"]).args([&disk]);
        let piped = import.env("MIRRORBALL_DATA", &data).ok();
        assert_eq!(
            (piped.text().as_str(), piped.errors().as_str()),
            ("piped: imported\n", "")
        );
        fs::remove_dir_all(&data).expect("our own directory");
        if piped.took > Duration::from_secs(2) || mib >= 384 {
            break disk;
        }
        mib *= 2;
    };
    let data = scratch.join("data");
    let variables = [("MIRRORBALL_DATA", data.as_os_str())];
    let path = disk.to_str().expect("ASCII");
    let words = ["image", "import", "--name", "shown", path];
    let mut import = Terminal::mirrorball_with(&words, &variables);
    // The bar is cleared at the end; the result stays.
    import.expect("\u{1b}[2Kshown: imported\r\n", BOOT_LIMIT);
    assert_eq!(import.wait(SOON), 0);
    let seen = import.seen();
    let parts = parts_shown(&seen, &format!("{mib}.00 MiB"));
    assert!(parts.len() >= 4, "{} bars of {mib} MiB: {seen:?}", parts.len());
    assert!(seen.contains('\u{2588}'), "a bar without a block: {seen:?}");
    let mut verify = Terminal::mirrorball_with(&["image", "verify", "shown"], &variables);
    verify.expect("\u{1b}[2Kshown: as it was made\r\n", BOOT_LIMIT);
    assert_eq!(verify.wait(SOON), 0);
    let seen = verify.seen();
    assert!(seen.matches(" reading").count() >= 4, "{seen:?}");
}
