//! Environment of a command in a lab, and its results for the caller.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};

use crate::command::{Ended, hosts, lab, program, turn};

/// Promise LAB-06.
#[test]
fn command_keeps_its_directory_streams_and_exit_status() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let script = "pwd; echo to-stderr >&2; test -c /dev/kvm && echo inside > result; head -c 3000000 \
        /dev/zero; exit 7";
    let mut run = lab(&["run", "--limit", "90", "--", "sh", "-c", script]);
    run.current_dir(&directory);
    let ended = Ended::of(run).expect(7);
    let head = format!("{}\n", directory.path().display());
    assert!(ended.stdout.starts_with(head.as_bytes()), "{ended}");
    assert_eq!(ended.stdout.len(), head.len() + 3_000_000);
    assert!(ended.stderr.contains("to-stderr"), "{ended}");
    assert!(ended.stderr.contains("the lab is up after"), "{ended}");
    assert_eq!(
        std::fs::read_to_string(directory.path().join("result")).unwrap(),
        "inside\n"
    );
}

/// Without them the kernel would patch itself at each host's first VM, which its emulation does not survive
/// forever.
#[test]
fn host_survives_creation_of_vms_that_never_run() {
    let _turn = turn();
    let script = "ls -d /sys/kernel/debug/kvm/*-*";
    let ended = Ended::of(lab(&["run", "--limit", "90", "--", "sh", "-c", script])).expect(0);
    let vms = String::from_utf8_lossy(&ended.stdout);
    assert_eq!(vms.lines().count(), 2, "{ended}");
}

/// Promise LAB-08.
#[test]
fn run_past_its_limit_is_killed_and_its_console_kept() {
    let _turn = turn();
    let ended = Ended::of(lab(&["run", "--limit", "12", "--", "sleep", "600"])).expect(124);
    assert!(ended.stderr.contains(".console"), "{ended}");
}

#[test]
fn host_panic_is_reported() {
    let _turn = turn();
    let script = "echo c > /proc/sysrq-trigger";
    let ended = Ended::of(lab(&["run", "--limit", "90", "--", "sh", "-c", script])).expect(125);
    assert!(ended.stderr.contains("the lab died"), "{ended}");
}

#[test]
fn hung_host_is_reported_long_before_the_limit() {
    let _turn = turn();
    let mut command = program(&["run", "--limit", "140", "--silence", "3", "--", "sleep", "600"]);
    let mut run = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(run.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains("the lab is up") {
        assert_ne!(stderr.read_line(&mut text).unwrap(), 0, "{text}");
    }
    let hosts = hosts(&format!("run-{}/", run.id()));
    assert_eq!(hosts.len(), 1);
    kill(hosts[0], Signal::SIGSTOP).unwrap();
    stderr.read_to_string(&mut text).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(125), "{text}");
    assert!(text.contains("has not answered for 3s"), "{text}");
}

#[test]
fn lab_restarts_when_a_host_dies_during_startup() {
    let _turn = turn();
    let mut command = program(&["run", "--limit", "140", "--", "echo", "it", "ran"]);
    let run = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pattern = format!("run-{}/", run.id());
    let begun = Instant::now();
    let first = loop {
        if let [first] = hosts(&pattern)[..] {
            break first;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "no host has started");
        std::thread::sleep(Duration::from_millis(20));
    };
    // The lab first sends QEMU itself a query.
    std::thread::sleep(Duration::from_secs(2));
    kill(first, Signal::SIGKILL).unwrap();
    let output = run.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("(signal: 9 (SIGKILL)); the lab starts again"),
        "{stderr}"
    );
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert_eq!(output.stdout, b"it ran\n", "{stderr}");
}
