//! Two real hosts from a lab file: NUMA nodes and distances, a network between them, memory they share; and what is
//! left when a lab's owner is killed.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const LAB: &str = r#"
[[hosts]]
name = "left"
cpus = 2
memory = "1G"
[[hosts.nodes]]
cpus = 1
memory = "512M"
distances = [10, 30]
[[hosts.nodes]]
cpus = 1
memory = "512M"
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

/// Finds the shared memory's device (ivshmem, 1af4:1110) and writes or reads its third region.
const SHARED: &str = r#"
import glob, mmap, os, sys
device = [d for d in glob.glob("/sys/bus/pci/devices/*") if open(d + "/device").read().strip() == "0x1110"]
assert len(device) == 1, device
fd = os.open(device[0] + "/resource2", os.O_RDWR)
memory = mmap.mmap(fd, 16 << 20)
if sys.argv[1] == "write":
    memory[12 << 20:(12 << 20) + 5] = b"hello"
else:
    print(memory[12 << 20:(12 << 20) + 5].decode())
"#;

fn lab(arguments: &[&str], home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mirrorball-lab"));
    command.args(arguments).stdin(Stdio::null());
    // Labs of its own: consoles and names are kept below the cache directory, and so is a fetched kernel.
    command.env("XDG_CACHE_HOME", home);
    command
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn good(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    text(&output)
}

/// A background lab that is ended however the test ends.
struct Running<'a>(&'a Path);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = lab(&["down"], self.0).status();
    }
}

#[test]
fn two_hosts_have_their_nodes_their_network_and_shared_memory() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("lab.toml");
    std::fs::write(&file, LAB).unwrap();
    good(lab(&["up", file.to_str().unwrap()], home.path()));
    let _running = Running(home.path());
    let on =
        |host: &str, command: &[&str]| good(lab(&[&["exec", host, "--"], command].concat(), home.path()));
    let nodes = on(
        "left",
        &[
            "sh",
            "-c",
            "cd /sys/devices/system/node; cat online node*/distance node*/cpulist",
        ],
    );
    assert_eq!(
        nodes.split_whitespace().collect::<Vec<_>>(),
        ["0-1", "10", "30", "30", "10", "0", "1"]
    );
    assert_eq!(
        on("right", &["cat", "/sys/devices/system/node/online"]).trim(),
        "0"
    );
    // Each answers the other's TCP, found by name.
    for (server, client) in [("left", "right"), ("right", "left")] {
        let serve = "import socket; s=socket.create_server(('', 7777)); print('up', flush=True); c, _ = s.accept(); \
                     c.sendall(socket.gethostname().encode())";
        let mut serving = lab(
            &["exec", server, "--", "/usr/bin/python3", "-c", serve],
            home.path(),
        );
        let mut serving = serving.stdout(Stdio::piped()).spawn().unwrap();
        let mut up = [0; 3];
        std::io::Read::read_exact(serving.stdout.as_mut().unwrap(), &mut up).unwrap();
        let ask = format!(
            "import socket; print(socket.create_connection(('{server}', 7777), 10).makefile().read())"
        );
        assert_eq!(on(client, &["/usr/bin/python3", "-c", &ask]).trim(), server);
        assert!(serving.wait().unwrap().success());
    }
    on("left", &["/usr/bin/python3", "-c", SHARED, "write"]);
    assert_eq!(
        on("right", &["/usr/bin/python3", "-c", SHARED, "read"]).trim(),
        "hello"
    );

    // A host that dies is remembered.
    let output = lab(
        &["exec", "right", "--", "sh", "-c", "echo c > /proc/sysrq-trigger"],
        home.path(),
    )
    .output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(125), "{}", text(&output));
    assert!(
        text(&output).contains("host right ended by itself"),
        "{}",
        text(&output)
    );
    let list = good(lab(&["ls"], home.path()));
    assert!(list.starts_with("lab  died: the lab died: host right"), "{list}");
}

/// Processes whose command line has `word`.
fn processes(word: &str) -> usize {
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .filter(|line| line.starts_with(b"qemu") && String::from_utf8_lossy(line).contains(word))
        .count()
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(40), "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_killed_run_leaves_no_host_and_the_next_command_removes_its_directory() {
    let home = tempfile::tempdir().unwrap();
    let word = home.path().to_str().unwrap().to_string();
    let mut run: Child = lab(&["run", "--", "sleep", "100"], home.path()).spawn().unwrap();
    wait_for("the host starts", || processes(&word) == 1);
    run.kill().unwrap();
    run.wait().unwrap();
    wait_for("the host is gone", || processes(&word) == 0);
    let labs = home.path().join("mirrorball/lab/labs");
    assert_eq!(std::fs::read_dir(&labs).unwrap().count(), 1);
    good(lab(&["ls"], home.path()));
    assert_eq!(std::fs::read_dir(&labs).unwrap().count(), 0);
}

#[test]
fn a_wrong_lab_file_is_shown_with_its_place() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("lab.toml");
    std::fs::write(&file, "[[hosts]]\nname = \"a\"\ncpuz = 2\n").unwrap();
    let output = lab(&["run", file.to_str().unwrap(), "--", "true"], home.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(
        text(&output).contains("did you mean `cpus`?"),
        "{}",
        text(&output)
    );
}
