//! Risk: a VM ends with its monitor, or its programs notice that the monitor has died.

use std::time::Duration;

use guest_tests::host::Traces;
use guest_tests::load::Load;
use guest_tests::terminal::Terminal;
use guest_tests::{Scratch, Vm, VmFile, host, mirrorball, net, repetitions, wait};

/// Time that the next monitor of a VM has, on a host in software.
const NEXT_LIMIT: Duration = Duration::from_secs(20);
const SOON: Duration = Duration::from_secs(20);
/// Kills of monitors in a campaign, a part of them in a landing.
const KILLS: usize = 100;
/// A keeper gives up a VM that has used up ten monitors within ten seconds.
const KILL_INTERVAL: Duration = Duration::from_millis(1100);

/// Promise HOSTILE-13.
#[test]
fn vm_runs_on_while_its_monitors_are_killed_and_each_next_one_serves_it() {
    let scratch = Scratch::new("heir");
    let before = Traces::now();
    let disk = scratch.sparse("heir.raw", 16 << 20);
    let vm = VmFile::new("heir")
        .cpus(2)
        .memory("256M")
        .net("kind = \"user\"")
        .disk(&disk, "mode = \"exclusive\"\npersistent = true")
        .start(&scratch);
    vm.add_tool();
    net::lease(&vm, &scratch);
    let (boot, shard, keeper) = (vm.boot_id(), vm.shard(), vm.keeper());
    let load = Load::start(&vm, true, Duration::from_secs(3600));

    let mut took = Vec::new();
    for _ in 0..repetitions(KILLS) {
        std::thread::sleep(KILL_INTERVAL);
        took.push(vm.kill_monitor(NEXT_LIMIT));
        assert_eq!((vm.shard(), vm.keeper()), (shard, keeper), "the VM is the same");
    }
    took.sort();
    println!(
        "the next monitor came within {:?} (median), {:?} (longest)",
        took[took.len() / 2],
        took[took.len() - 1]
    );

    // Its programs ran on.
    let seen = load.end();
    println!("{seen:?}");
    assert_eq!(
        vm.sh("cat /sys/class/net/eth0/carrier").trim(),
        "1",
        "the card's link"
    );
    // A monitor that is killed loses at most what it has just read from the guest.
    assert!(
        seen.console_gaps <= repetitions(KILLS) / 10,
        "lines of the console were lost: {seen:?}"
    );

    // Operations of a monitor alone.
    mirrorball(["pause", vm.name()]).ok();
    vm.kill_monitor(NEXT_LIMIT);
    assert_eq!(vm.listed().expect("listed")["paused"], true);
    mirrorball(["resume", vm.name()]).ok();
    assert_eq!(vm.boot_id(), boot);
    vm.reboot();
    assert_ne!(vm.boot_id(), boot);
    net::lease(&vm, &scratch);
    let second = vm.boot_id();
    vm.kill_monitor(NEXT_LIMIT);
    assert_eq!(vm.boot_id(), second);
    vm.stop();
    before.expect_unchanged("the end of a VM whose monitors were killed");
}

#[test]
fn clone_of_a_vm_whose_monitor_was_killed_goes_on_from_it() {
    let scratch = Scratch::new("cloned-heir");
    let before = Traces::now();
    let parent = VmFile::new("cloned-heir").start(&scratch);
    parent.sh("echo parent > /tmp/who");
    parent.kill_monitor(NEXT_LIMIT);
    let child = Vm::named(mirrorball(["clone", parent.name()]).ok().text().trim());
    child.kill_monitor(NEXT_LIMIT);
    assert_eq!(child.sh("cat /tmp/who"), "parent\n");
    // The monitor of each VM is its own now, and the keeper always was.
    assert_ne!(parent.monitor(), child.monitor());
    parent.kill();
    assert_eq!(child.sh("cat /tmp/who"), "parent\n");
    child.kill();
    before.expect_unchanged("a clone and its parent");
}

/// A VM that `mirrorball run` follows on a terminal.
fn foreground(name: &str, scratch: &Scratch) -> (Vm, Terminal) {
    let file = VmFile::new(name);
    let path = file.write(scratch);
    let terminal = Terminal::mirrorball(&["run", "--lab", "never", path.to_str().expect("ASCII")]);
    (Vm::named(file.name()), terminal)
}

#[test]
fn foreground_command_follows_its_vm_from_monitor_to_monitor() {
    let scratch = Scratch::new("followed");
    let before = Traces::now();
    let (vm, mut terminal) = foreground("followed", &scratch);
    vm.wait_up();
    for round in 1..=2 {
        vm.kill_monitor(NEXT_LIMIT);
        wait::until("the console at the terminal", SOON, || {
            terminal.send(format!("echo round-$(({round} * 111))\n").as_bytes());
            let answer = format!("round-{}", round * 111);
            terminal.seen().contains(&answer).then_some(())
        });
    }
    terminal.send(b"poweroff -f\n");
    let status = terminal.wait(SOON);
    assert_eq!(status, 0, "the terminal:\n{}", terminal.seen());
    vm.wait_ended(SOON);
    before.expect_unchanged("a VM that its command followed");
}

/// Promise HOSTILE-31.
#[test]
fn vm_ends_with_its_command_whichever_monitor_it_has() {
    let scratch = Scratch::new("leased");
    let before = Traces::now();
    let (vm, terminal) = foreground("leased", &scratch);
    vm.wait_up();
    vm.kill_monitor(NEXT_LIMIT);
    let processes = [vm.monitor(), vm.keeper(), vm.shard()];
    // The next one finds that the command is gone.
    host::kill9(processes[0]);
    host::kill9(terminal.pid());
    host::wait_gone(&processes, SOON);
    vm.wait_ended(SOON);
    before.expect_unchanged("kill -9 of a monitor and of the command");
}

/// Promise HOSTILE-26.
#[test]
fn vm_whose_monitor_is_killed_while_it_starts_again_runs_on() {
    let scratch = Scratch::new("again");
    let before = Traces::now();
    let vm = VmFile::new("again").net("kind = \"user\"").start(&scratch);
    for pause_ms in [0, 100, 300, 600, 1500] {
        let (boot, monitor) = (vm.boot_id(), vm.monitor());
        let reset = mirrorball(["reset", vm.name()]).spawn();
        std::thread::sleep(Duration::from_millis(pause_ms));
        host::kill9(monitor);
        // A request that the monitor had not carried out fails with it.
        drop(reset.wait());
        let id = wait::until("an answer of the guest", Duration::from_secs(90), || {
            assert!(
                vm.listed().is_some(),
                "the VM ended, {pause_ms} ms after the reset"
            );
            let id = vm
                .exec(["cat", "/proc/sys/kernel/random/boot_id"])
                .limit(SOON)
                .run();
            (id.status == 0).then(|| id.text())
        });
        let is_same = if id == boot { "the same" } else { "another" };
        println!("killed {pause_ms} ms after the reset: {is_same} boot");
        assert_ne!(vm.monitor(), monitor);
    }
    vm.stop();
    before.expect_unchanged("a VM whose monitors were killed while it started again");
}

/// Promise HOSTILE-27.
#[test]
fn terminated_monitor_ends_its_vm() {
    let scratch = Scratch::new("asked");
    let before = Traces::now();
    let (vm, mut terminal) = foreground("asked", &scratch);
    vm.wait_up();
    vm.kill_monitor(NEXT_LIMIT);
    let monitor = nix::unistd::Pid::from_raw(vm.monitor().cast_signed());
    nix::sys::signal::kill(monitor, nix::sys::signal::Signal::SIGTERM).expect("a process of this user");
    let status = terminal.wait(SOON);
    assert_eq!(status, 74, "the terminal:\n{}", terminal.seen());
    vm.wait_ended(SOON);
    before.expect_unchanged("SIGTERM to a monitor");
}

/// Promise HOSTILE-32.
#[test]
fn killed_keeper_ends_its_vm_alone() {
    let scratch = Scratch::new("keepers");
    let before = Traces::now();
    let (doomed, other) = (VmFile::new("kept-a"), VmFile::new("kept-b"));
    let files = [doomed.write(&scratch), other.write(&scratch)];
    let call = mirrorball(["run"])
        .args(files)
        .limit(Duration::from_secs(300))
        .spawn();
    let (doomed, other) = (Vm::named(doomed.name()), Vm::named(other.name()));
    doomed.wait_up();
    other.wait_up();
    assert_ne!(doomed.keeper(), other.keeper());
    let processes = [doomed.keeper(), doomed.shard()];
    host::kill9(processes[0]);
    host::wait_gone(&processes, Duration::from_secs(5));
    doomed.wait_ended(SOON);
    assert_eq!(other.sh("echo $((6 * 7))").trim(), "42");
    other.stop();
    let ended = call.wait().expect(73);
    assert!(
        ended.errors().contains("ended with its keeper, which was killed"),
        "{ended}"
    );
    before.expect_unchanged("kill -9 of a keeper");
}
