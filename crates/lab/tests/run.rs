//! A real lab: what a command in it sees and what its caller gets back. Needs qemu-system-x86_64 and a host kernel
//! (see `kernel`); without them these tests fail, they don't skip.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn lab(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mirrorball-lab"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[test]
fn a_command_keeps_its_directory_streams_and_exit_status() {
    let directory = tempfile::tempdir().unwrap();
    let script = "pwd; echo to-stderr >&2; test -c /dev/kvm && echo inside > result; head -c 3000000 /dev/zero; exit 7";
    let output = lab(&["run", "--limit", "90", "--", "sh", "-c", script])
        .current_dir(&directory)
        .output()
        .unwrap();
    assert_eq!(
        output.status.code(),
        Some(7),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let head = format!("{}\n", directory.path().display());
    assert!(output.stdout.starts_with(head.as_bytes()));
    assert_eq!(output.stdout.len(), head.len() + 3_000_000);
    assert!(String::from_utf8_lossy(&output.stderr).contains("to-stderr"));
    assert_eq!(
        std::fs::read_to_string(directory.path().join("result")).unwrap(),
        "inside\n"
    );
}

#[test]
fn a_run_past_its_limit_is_killed_and_keeps_its_console() {
    let start = Instant::now();
    let output = lab(&["run", "--limit", "12", "--", "sleep", "600"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(124), "{}", text(&output));
    assert!(start.elapsed() < Duration::from_secs(30));
    assert!(text(&output).contains(".console"), "{}", text(&output));
}

#[test]
fn a_host_that_panics_is_told_apart() {
    let output = lab(&[
        "run",
        "--limit",
        "90",
        "--",
        "sh",
        "-c",
        "echo c > /proc/sysrq-trigger",
    ])
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(125), "{}", text(&output));
    assert!(text(&output).contains("the lab died"), "{}", text(&output));
}
