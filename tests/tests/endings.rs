//! Risk: an end of a VM is misreported, or leaves something running.

use std::collections::BTreeSet;
use std::time::Duration;

use guest_tests::command::BOOT_LIMIT;
use guest_tests::host::Traces;
use guest_tests::terminal::Terminal;
use guest_tests::{Scratch, Vm, VmFile, host, mirrorball, wait};

const SOON: Duration = Duration::from_secs(15);

/// `mirrorball run` in the foreground of a terminal, with a prompt of the guest on it.
struct Foreground {
    terminal: Terminal,
    vm: Vm,
}

impl Foreground {
    #[track_caller]
    fn start(file: &VmFile, scratch: &Scratch) -> Self {
        let path = file.write(scratch);
        let terminal = Terminal::mirrorball(&["run", "--lab", "never", path.to_str().expect("ASCII")]);
        let vm = Vm::named(file.name());
        let prompt = || terminal.seen().contains("# ").then_some(());
        if wait::within(BOOT_LIMIT, prompt).is_none() {
            panic!(
                "no prompt of the guest within {BOOT_LIMIT:?}:\n{}",
                terminal.seen()
            );
        }
        Self { terminal, vm }
    }

    /// Has the guest run `script`; expects the command to end with `status`; returns its output after that.
    #[track_caller]
    fn ends_by(mut self, script: &str, status: i32) -> String {
        self.terminal.send(format!("{script}\n").as_bytes());
        self.ends(status)
    }

    #[track_caller]
    fn ends(mut self, status: i32) -> String {
        let ended = self.terminal.wait(SOON);
        let seen = self.terminal.seen();
        assert_eq!(ended, status, "exit status; the terminal:\n{seen}");
        seen
    }
}

#[test]
fn poweroff_is_a_success_without_a_message() {
    let scratch = Scratch::new("poweroff");
    let before = Traces::now();
    let seen = Foreground::start(&VmFile::new("poweroff"), &scratch).ends_by("poweroff -f", 0);
    assert!(!seen.contains("panicked") && !seen.contains("triple"), "{seen}");
    before.expect_unchanged("a poweroff");
}

#[test]
fn panic_is_reported_with_the_last_lines_of_the_console() {
    let scratch = Scratch::new("panic");
    let before = Traces::now();
    let seen = Foreground::start(&VmFile::new("panic"), &scratch).ends_by("echo c > /proc/sysrq-trigger", 70);
    let (_, told) = seen
        .split_once("kernel panicked")
        .unwrap_or_else(|| panic!("the reason is not reported:\n{seen}"));
    assert!(
        told.contains("sysrq") || told.contains("panic"),
        "the console's last lines are not shown:\n{seen}"
    );
    before.expect_unchanged("a panic");
}

#[test]
fn failed_vm_starts_again_by_its_restart_key_and_not_after_a_kill() {
    let scratch = Scratch::new("again");
    let before = Traces::now();
    let vm = VmFile::new("again")
        .key("restart", "\"on-failure\"")
        .start(&scratch);
    let boot_id = vm.boot_id();
    vm.last_words("echo c > /proc/sysrq-trigger");
    let reads = || {
        vm.exec(["cat", "/proc/sys/kernel/random/boot_id"])
            .limit(BOOT_LIMIT)
            .run()
    };
    wait::until("the boot after a panic", BOOT_LIMIT, || {
        let read = reads();
        (read.status == 0 && read.text() != boot_id).then_some(())
    });
    assert_eq!(vm.listed().expect("it is there")["boots"], 2);
    assert!(
        vm.logs().contains("Kernel panic"),
        "the console of the boot before"
    );
    vm.kill();
    vm.wait_ended(BOOT_LIMIT);
    before.expect_unchanged("a restart");
}

#[test]
fn triple_fault_is_reported_with_its_status() {
    let scratch = Scratch::new("triple");
    let before = Traces::now();
    let vm = Foreground::start(&VmFile::new("triple"), &scratch);
    let seen = vm.ends_by("echo triple > /sys/kernel/reboot/type && reboot -f", 71);
    assert!(
        seen.contains("triple fault"),
        "the reason is not reported:\n{seen}"
    );
    before.expect_unchanged("a triple fault");
}

/// A 64-bit ELF kernel at 1 MiB that consists of this code.
fn kernel_of(code: &[u8]) -> Vec<u8> {
    const HEADERS_BYTES: u64 = 64 + 56;
    const START: u64 = 1 << 20;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    let half =
        |file: &mut Vec<u8>, values: &[u16]| values.iter().for_each(|value| file.extend(value.to_le_bytes()));
    let word =
        |file: &mut Vec<u8>, values: &[u32]| values.iter().for_each(|value| file.extend(value.to_le_bytes()));
    let wide =
        |file: &mut Vec<u8>, values: &[u64]| values.iter().for_each(|value| file.extend(value.to_le_bytes()));
    // An executable for x86-64; its entry, program headers at 64, no sections; one program header of 56
    // bytes.
    half(&mut file, &[2, 62]);
    word(&mut file, &[1]);
    wide(&mut file, &[START, 64, 0]);
    word(&mut file, &[0]);
    half(&mut file, &[64, 56, 1, 0, 0, 0]);
    // To be loaded, readable and executable.
    word(&mut file, &[1, 5]);
    let bytes = code.len() as u64;
    wide(&mut file, &[HEADERS_BYTES, START, START, bytes, bytes, 1]);
    file.extend(code);
    file
}

#[test]
fn instruction_that_kvm_can_not_emulate_is_reported() {
    let scratch = Scratch::new("emulation");
    // mov rdi, 0xc0000000; lock cmpxchg16b [rdi]; hlt: 16 bytes at once at an address without a device.
    let code = b"\x48\xbf\0\0\0\xc0\0\0\0\0\xf0\x48\x0f\xc7\x0f\xf4";
    let kernel = scratch.write("kernel", kernel_of(code));
    let before = Traces::now();
    let run = mirrorball(["run", "--net", "none", "--name", "t-emulation", "--kernel"]);
    let told = run.args([&kernel]).limit(SOON).run().expect(72);
    assert!(
        told.errors().contains("KVM"),
        "the reason is not reported:\n{told}"
    );
    before.expect_unchanged("a failure of KVM");
}

#[test]
fn kill_is_reported_with_its_status() {
    let scratch = Scratch::new("kill");
    let before = Traces::now();
    let running = Foreground::start(&VmFile::new("kill"), &scratch);
    running.vm.kill();
    let seen = running.ends(74);
    assert!(seen.contains("killed"), "the reason is not reported:\n{seen}");
    before.expect_unchanged("a kill");
}

#[test]
fn a_guest_deaf_to_the_power_button_is_killed_after_the_limit() {
    let scratch = Scratch::new("deaf");
    let before = Traces::now();
    let vm = VmFile::new("deaf").start(&scratch);
    // Processes that obey the button hang from here on.
    let deafen = "for process in /proc/[0-9]*; do ls -l $process/fd 2>/dev/null | grep -q /dev/input && \
                  kill -STOP ${process#/proc/} && echo deaf; done; true";
    assert_eq!(vm.sh(deafen).trim(), "deaf");
    let ended = mirrorball(["stop", vm.name(), "--limit", "3"]).run().expect(124);
    assert!(
        ended.errors().contains("did not power off within 3 s"),
        "the reason is not reported:\n{ended}"
    );
    vm.wait_ended(SOON);
    before.expect_unchanged("a stop by force");
}

#[test]
fn five_reboots_in_place_leak_nothing() {
    let scratch = Scratch::new("reboot");
    let vm = VmFile::new("reboot").start(&scratch);
    let monitor = vm.monitor();
    let mut boots = BTreeSet::from([vm.boot_id()]);
    let mut after_first = None;
    for round in 1..=5 {
        vm.reboot();
        assert!(boots.insert(vm.boot_id()), "reboot {round} is not a new boot");
        assert_eq!(vm.monitor(), monitor, "the monitor changed in reboot {round}");
        let now = (
            host::descriptors(monitor),
            host::threads(monitor),
            host::processes().len(),
        );
        match after_first {
            None => after_first = Some(now),
            // A connection that is just being closed may still be there.
            Some(then) => wait::until(
                &format!(
                    "as many descriptors, threads and processes after reboot {round} as before: {then:?}"
                ),
                SOON,
                || {
                    let now = (
                        host::descriptors(monitor),
                        host::threads(monitor),
                        host::processes().len(),
                    );
                    (now.0 <= then.0 && now.1 <= then.1 && now.2 <= then.2).then_some(())
                },
            ),
        }
    }
    vm.stop();
}

#[test]
fn a_killed_shard_takes_down_its_own_vm_only() {
    let scratch = Scratch::new("pair");
    let doomed = VmFile::new("doomed");
    let file = doomed.write(&scratch);
    let call = mirrorball(["run"]).args([file]).limit(BOOT_LIMIT * 2).spawn();
    let other = VmFile::new("other").start_only(&scratch);
    let doomed = Vm::named(doomed.name());
    doomed.wait_up();
    other.wait_up();
    let boot = other.boot_id();
    host::kill9(doomed.shard());
    let ended = call.wait().expect(73);
    assert!(
        !ended.errors().trim().is_empty(),
        "the reason is not reported:\n{ended}"
    );
    assert_eq!(other.boot_id(), boot);
    assert_eq!(other.sh("echo $((6 * 7))").trim(), "42");
    other.stop();
}

#[test]
fn no_shard_outlives_a_killed_foreground_command() {
    let scratch = Scratch::new("orphan");
    let before = Traces::now();
    let others = host::processes();
    let running = Foreground::start(&VmFile::new("orphan"), &scratch);
    let processes: Vec<u32> = host::processes().difference(&others).copied().collect();
    assert!(
        processes.len() >= 2,
        "a command and its shard are at least two processes: {processes:?}"
    );
    host::kill9(running.terminal.pid());
    host::wait_gone(&processes, SOON);
    drop(running);
    before.expect_unchanged("kill -9 of a foreground command");
}

#[test]
fn no_shard_outlives_a_killed_keeper() {
    let scratch = Scratch::new("detached");
    let before = Traces::now();
    let vm = VmFile::new("detached").start_only(&scratch);
    let processes = [vm.keeper(), vm.shard(), vm.monitor()];
    host::kill9(processes[0]);
    host::wait_gone(&processes, SOON);
    vm.wait_ended(SOON);
    before.expect_unchanged("kill -9 of a keeper");
}

#[test]
fn a_command_of_run_gives_its_output_and_exit_status() {
    let scratch = Scratch::new("command");
    let before = Traces::now();
    let file = VmFile::new("command").write(&scratch);
    let call = mirrorball(["run"]).args([file.as_os_str(), "--".as_ref()]);
    let ended = call
        .args(["sh", "-c", "cat; echo from the guest >&2; exit 7"])
        .input(b"\0binary\xff\n")
        .run();
    let ended = ended.expect(7);
    assert_eq!(ended.stdout, b"\0binary\xff\n", "{ended}");
    assert!(ended.errors().contains("from the guest"), "{ended}");
    before.expect_unchanged("run with a command");
}
