//! Risk: VMs of one `run` depend on each other, or files that the client had open stay open in their
//! monitors.
//!
//! The guests halt at once; monitors, keepers and shards are real. Each test has directories of its own.

use std::fs;
use std::path::Path;
use std::time::Duration;

use guest_tests::cluster::allowed_cpus;
use guest_tests::command::{Call, binary};
use guest_tests::halting::halting_guest;
use guest_tests::terminal::Terminal;
use guest_tests::{Scratch, host, mirrorball, wait};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getsid};
use serde_json::Value;

/// Time limit of a short step on an emulated host.
const SOON: Duration = Duration::from_secs(60);

/// Two VMs that one `run` left running: `a-0` and `a-1`. They end when this is dropped.
struct Pair {
    scratch: Scratch,
}

impl Pair {
    /// Starts them by a client that has the file `open` in the scratch directory open.
    #[track_caller]
    fn start(test: &str) -> Self {
        let pair = Self {
            scratch: Scratch::new(test),
        };
        let guest = pair.scratch.write("guest", halting_guest());
        let (open, program) = (pair.scratch.join("open"), binary());
        let words = [
            Path::new("-c"),
            Path::new("exec 9>\"$0\"; exec \"$@\""),
            &open,
            &program,
        ];
        let options = "run -d --lab never --net none --memory 64M --cpus 1 --name a --count 2 --kernel";
        let client = Call::new("sh")
            .args(words)
            .args(options.split(' '))
            .args([&guest]);
        pair.with_directories(client).ok();
        pair
    }

    fn with_directories(&self, call: Call) -> Call {
        call.limit(SOON)
            .env("MIRRORBALL_RUNTIME", self.scratch.join("runtime"))
            .env("MIRRORBALL_DATA", self.scratch.join("data"))
    }

    fn inspect(&self, name: &str) -> Option<Value> {
        let called = self.with_directories(mirrorball(["inspect", name])).run();
        (called.status == 0).then(|| called.json())
    }

    /// The process ids of the monitor and the shard of a VM.
    #[track_caller]
    fn processes(&self, name: &str) -> [u32; 2] {
        let vm = self.inspect(name).expect("it runs");
        ["monitor_pid", "shard_pid"].map(|key| {
            let pid = vm[key].as_u64().and_then(|pid| pid.try_into().ok());
            pid.unwrap_or_else(|| panic!("no {key}: {vm}"))
        })
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for name in ["a-0", "a-1"] {
            // A VM that has ended is no error here.
            self.with_directories(mirrorball(["kill", name])).run();
        }
    }
}

fn command_line(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).trim_end_matches('\0').to_owned()
}

#[test]
fn each_vm_of_a_run_has_a_monitor_of_its_own_whose_death_costs_neither_vm() {
    let pair = Pair::start("monitor-killed");
    let ([first, shard], other) = (pair.processes("a-0"), pair.processes("a-1"));
    assert_ne!(first, other[0], "one monitor serves both");
    assert_eq!(command_line(first), "mirrorball monitor a-0");
    assert_eq!(command_line(other[0]), "mirrorball monitor a-1");
    host::kill9(first);
    let next = wait::until("the killed monitor has a successor", SOON, || {
        let vm = pair.inspect("a-0")?;
        (vm["monitor_pid"] != first && vm["state"] == "running").then_some(vm)
    });
    assert_eq!(next["shard_pid"], shard, "the VM was started again");
    assert_eq!(pair.processes("a-1"), other, "the other VM was concerned");
    assert!(host::is_running(other[0]) && host::is_running(other[1]));
}

#[test]
fn monitor_has_none_of_its_clients_files_and_a_session_of_its_own() {
    let pair = Pair::start("monitor-files");
    let open = pair.scratch.join("open");
    for name in ["a-0", "a-1"] {
        let [monitor, _] = pair.processes(name);
        let files = fs::read_dir(format!("/proc/{monitor}/fd")).expect("our own process");
        let mut files = files.flatten().filter_map(|file| fs::read_link(file.path()).ok());
        assert!(!files.any(|file| file == open), "{name} holds {}", open.display());
        for standard in 0..3 {
            let stream = fs::read_link(format!("/proc/{monitor}/fd/{standard}")).expect("our own process");
            assert_eq!(stream, Path::new("/dev/null"));
        }
        let monitor = Pid::from_raw(monitor.cast_signed());
        assert_eq!(getsid(Some(monitor)).expect("it runs"), monitor);
    }
}

#[test]
fn terminated_monitor_ends_its_vm_and_no_other() {
    let pair = Pair::start("monitor-asked");
    let ([monitor, shard], other) = (pair.processes("a-0"), pair.processes("a-1"));
    kill(Pid::from_raw(monitor.cast_signed()), Signal::SIGTERM).expect("our own process");
    host::wait_gone(&[monitor, shard], SOON);
    assert!(pair.inspect("a-0").is_none());
    assert_eq!(pair.processes("a-1"), other, "the other VM was concerned");
}

/// Gives a terminal this size, as a window that is resized does.
#[track_caller]
fn resize(terminal: &Terminal, columns: u16, lines: u16) {
    let size = libc::winsize {
        ws_row: lines,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the terminal is open, and `size` is of the type that this request reads.
    let set = unsafe { libc::ioctl(terminal.descriptor(), libc::TIOCSWINSZ, &raw const size) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// Promises CMD-29, CMD-30.
#[test]
fn top_shows_vms_without_a_cluster_pins_a_vcpu_by_keys_and_gives_the_terminal_back() {
    let pair = Pair::start("monitor-top");
    let options = ["top", "--json", "--count", "2", "--interval", "0.2"];
    let sample = wait::until("a sample of guests that have halted forever", SOON, || {
        let text = pair.with_directories(mirrorball(options)).ok().text();
        let lines = text.lines();
        let mut samples: Vec<Value> = lines
            .map(|line| serde_json::from_str(line).expect("a line of JSON"))
            .collect();
        assert_eq!(samples.len(), 2, "{text}");
        let sample = samples.pop()?;
        let vcpu = &sample["vcpus"][1];
        // The host's KVM may count no halts.
        let halts = vcpu["is_halted"].is_null() || vcpu["halt_milli"] == 1000;
        (halts && sample["unknown"] == Value::Array(vec![])).then_some(sample)
    });
    let vcpu = &sample["vcpus"][1];
    assert_eq!((&vcpu["vm"], &vcpu["cell"]), (&"a-1".into(), &Value::Null));
    assert_eq!(vcpu["shard_pid"], pair.processes("a-1")[1], "{vcpu}");
    assert!(vcpu["run_milli"].is_u64() && vcpu["last_cpu"].is_u64(), "{vcpu}");
    assert_eq!(vcpu["spin_milli"], Value::Null);
    assert_eq!(sample["vms"][0]["memory_bytes"], 64 << 20);
    assert!(sample["vms"][0]["host_bytes"].is_u64(), "{sample}");
    assert_eq!(sample["cells"], Value::Array(vec![]));

    // Without a terminal there is nothing to show.
    let refused = pair.with_directories(mirrorball(["top"])).run().expect(1);
    assert!(refused.errors().contains("--batch"), "{refused}");

    let (runtime, data) = (pair.scratch.join("runtime"), pair.scratch.join("data"));
    let variables = [
        ("MIRRORBALL_RUNTIME", runtime.as_os_str()),
        ("MIRRORBALL_DATA", data.as_os_str()),
    ];
    let start = || {
        let mut terminal = Terminal::mirrorball_with(&["top", "--interval", "0.5"], &variables);
        resize(&terminal, 40, 10);
        terminal.expect("40x10", SOON);
        assert!(terminal.is_raw());
        resize(&terminal, 110, 30);
        terminal.expect("a-1", SOON);
        terminal
    };
    let is_restored = |terminal: &Terminal| {
        assert!(!terminal.is_raw());
        // The screen that was there before.
        assert!(terminal.seen().contains("\x1b[?1049l"), "{}", terminal.seen());
    };
    let cpu = allowed_cpus().next().expect("a CPU");
    let mut top = start();
    top.send(format!("\x1b[Bmcpu {cpu}\r").as_bytes());
    wait::until("a pinned vCPU", SOON, || {
        let vm = pair.inspect("a-1")?;
        (vm["pins"]["0"] == serde_json::json!([cpu])).then_some(())
    });
    assert!(pair.inspect("a-0").expect("it runs")["pins"].is_null());
    top.send(b"q");
    assert_eq!(top.wait(SOON), 0);
    is_restored(&top);

    let mut top = start();
    top.send(b"\x03");
    assert_eq!(top.wait(SOON), 0);
    is_restored(&top);

    let mut top = start();
    kill(Pid::from_raw(top.pid().cast_signed()), Signal::SIGTERM).expect("our own process");
    assert_eq!(top.wait(SOON), 0);
    is_restored(&top);
}
