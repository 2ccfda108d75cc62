//! Risk: VMs of one `run` depend on each other, or files that the client had open stay open in their
//! monitors.
//!
//! The guests halt at once; monitors, keepers and shards are real. Each test has directories of its own.

use std::fs;
use std::path::Path;
use std::time::Duration;

use guest_tests::command::{Call, binary};
use guest_tests::halting::halting_guest;
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
