//! Two real hosts from a lab file: NUMA nodes and distances, a network between them, shared memory; and the
//! remains after a lab's owner is killed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use guest_tests::repetitions::{each, in_campaign};

use crate::background::Background;
use crate::command::{Ended, directory, hosts, lab, program, turn};

const LAB: &str = r#"
[[hosts]]
name = "left"
cpus = 2
memory = "1G"
[[hosts.nodes]]
cpus = 1
memory = "640M"
distances = [10, 30]
[[hosts.nodes]]
cpus = 1
memory = "384M"
distances = [30, 10]

[[hosts]]
name = "right"
cpus = 1
memory = "512M"

[[links]]
hosts = ["left", "right"]

[[shared]]
size = "16M"
hosts = ["left", "right"]
"#;

const TOOL: &str = env!("CARGO_BIN_EXE_lab-tool");

/// Has `client` send some megabytes to `server`, found by its name, and take them back.
#[track_caller]
fn talk(running: &Background, server: &str, client: &str) -> String {
    let mut serving = lab(&running.command(server, &[TOOL, "serve", "7777"]));
    let mut serving = serving.stdout(Stdio::piped()).spawn().unwrap();
    let mut up = String::new();
    BufReader::new(serving.stdout.take().unwrap())
        .read_line(&mut up)
        .unwrap();
    assert_eq!(up, "up\n");
    let ask = format!("address=$(getent hosts {server}); exec {TOOL} ask ${{address%% *}} 7777");
    let answer = running.on(client, &["sh", "-c", &ask]);
    assert!(serving.wait().unwrap().success());
    answer
}

/// Number of labs that a campaign starts, one after the other; a landing starts one.
const LABS_IN_CAMPAIGN: usize = 100;
/// Programs that start and end on each CPU at the same time.
const WORK: &str = "for cpu in $(seq $(nproc)); do \
    (i=0; while [ $i -lt 50 ]; do i=$((i+1)); /bin/true; done) & done; wait; echo done";

/// The emulation loses a host occasionally: a campaign counts how often.
#[test]
fn consecutive_labs_start_and_work() {
    let _turn = turn();
    each("hosts::consecutive_labs_start_and_work", LABS_IN_CAMPAIGN, |_| {
        let running = Background::up(LAB);
        for host in ["left", "right"] {
            assert_eq!(running.on(host, &["sh", "-c", WORK]), "done\n");
        }
        talk(&running, "left", "right");
        // At a landing the test runner counts it.
        assert!(!in_campaign() || !running.started_again, "a host did not come up");
        String::new()
    });
}

#[test]
fn two_hosts_have_their_nodes_their_network_and_shared_memory() {
    let _turn = turn();
    let lab_of_two = Background::up(LAB);
    let emulators = hosts(&format!("{}/", lab_of_two.name));
    assert_eq!(emulators.len(), 2);
    for pid in emulators {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(
            status.contains("Seccomp:\t2"),
            "QEMU runs without its filter: {status}"
        );
    }

    let script = "cd /sys/devices/system/node; cat online node*/distance node*/cpulist; \
                  sed -n 's/.*MemTotal: *//p' node*/meminfo; hostname";
    let nodes = lab_of_two.on("left", &["sh", "-c", script]);
    let words: Vec<&str> = nodes.split_whitespace().collect();
    assert_eq!(words[..7], ["0-1", "10", "30", "30", "10", "0-1", "2"], "{nodes}");
    let kib = |word: &str| word.parse::<u64>().unwrap();
    // The kernel keeps some for itself.
    assert!((500 << 10..=640 << 10).contains(&kib(words[7])), "{nodes}");
    assert!((300 << 10..=384 << 10).contains(&kib(words[9])), "{nodes}");
    assert_eq!(words.last(), Some(&"left"), "{nodes}");
    let nodes = lab_of_two.on("right", &["sh", "-c", script]);
    assert_eq!(nodes.split_whitespace().next(), Some("0"), "{nodes}");

    assert_eq!(
        talk(&lab_of_two, "left", "right"),
        "the same 4194304 bytes from 10.77.0.2\n"
    );
    assert_eq!(
        talk(&lab_of_two, "right", "left"),
        "the same 4194304 bytes from 10.77.0.1\n"
    );

    for (writer, reader, word) in [("left", "right", "hello"), ("right", "left", "olleh")] {
        lab_of_two.on(writer, &[TOOL, "write", word]);
        assert_eq!(lab_of_two.on(reader, &[TOOL, "read", "5"]).trim(), word);
    }

    // A host that dies is remembered.
    let name = lab_of_two.name.as_str();
    let crash = lab_of_two.command("right", &["sh", "-c", "echo c > /proc/sysrq-trigger"]);
    let ended = Ended::of(lab(&crash)).expect(125);
    assert!(ended.stderr.contains("host right ended by itself"), "{ended}");
    let list = Ended::of(lab(&["ls"])).expect(0).text();
    let remembered = format!("{name}  died: the lab died: host right");
    assert!(list.lines().any(|line| line.starts_with(&remembered)), "{list}");
    let list: serde_json::Value =
        serde_json::from_slice(&Ended::of(lab(&["ls", "--json"])).expect(0).stdout).unwrap();
    let ours = |entry: &&serde_json::Value| entry["name"] == name;
    let entry = list.as_array().unwrap().iter().find(ours).unwrap();
    assert!(entry["died"].as_str().unwrap().contains("host right"), "{entry}");
}

#[track_caller]
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn killed_run_leaves_no_host_and_its_directory_is_pruned() {
    let _turn = turn();
    let mut run: Child = program(&["run", "--", "sleep", "100"]).spawn().unwrap();
    let name = format!("run-{}", run.id());
    let word = format!("{name}/");
    wait_for("the host starts", || hosts(&word).len() == 1);
    run.kill().unwrap();
    run.wait().unwrap();
    wait_for("the host is gone", || hosts(&word).is_empty());
    Ended::of(lab(&["ls"])).expect(0);
    assert!(!directory(&name).exists());
}

#[test]
fn interrupted_start_leaves_no_host() {
    let _turn = turn();
    let name = format!("test-up-{}", std::process::id());
    let mut up = program(&["up", "--name", &name]).spawn().unwrap();
    let word = format!("{name}/");
    wait_for("the host starts", || hosts(&word).len() == 1);
    up.kill().unwrap();
    up.wait().unwrap();
    wait_for("the host is gone", || hosts(&word).is_empty());
    wait_for("its directory is gone", || !directory(&name).exists());
}

#[test]
fn lab_file_error_shows_its_position() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("lab.toml");
    std::fs::write(&file, "[[hosts]]\nname = \"a\"\ncpuz = 2\n").unwrap();
    let ended = Ended::of(lab(&["run", file.to_str().unwrap(), "--", "true"])).expect(1);
    assert!(ended.stderr.contains("did you mean `cpus`?"), "{ended}");
}
