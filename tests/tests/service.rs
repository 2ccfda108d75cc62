//! Risk: a service manager takes the cluster for up before it is, ends VMs with it, or keeps a unit whose
//! cluster is gone.
//!
//! The tests take the service manager's role: they start `cluster up --foreground`, receive its reports, and
//! signal that process alone, as `KillMode=process` has it. The guests halt at once.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use guest_tests::cluster::allowed_cpus;
use guest_tests::command::{Call, Running};
use guest_tests::halting::{end_cells, halting_guest};
use guest_tests::{Scratch, host, mirrorball, wait};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;
use serde_json::Value;

/// Time limit of a short step on an emulated host.
const SOON: Duration = Duration::from_secs(60);
/// Longer than a guest that ignores its power button lives when it is stopped.
const STOP_LIMIT: Duration = Duration::from_secs(90);

/// A service manager with one unit, of two cells. All ends when this is dropped.
struct Manager {
    scratch: Scratch,
    file: PathBuf,
    guest: PathBuf,
    socket: UnixDatagram,
}

impl Manager {
    fn new(test: &str) -> Self {
        let scratch = Scratch::new(test);
        let cells = allowed_cpus().map(|cpu| format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"192M\"\n"));
        let cells: Vec<String> = cells.take(2).collect();
        assert_eq!(cells.len(), 2, "two cells need two CPUs");
        let socket = UnixDatagram::bind(scratch.join("notify")).expect("our own directory");
        socket.set_read_timeout(Some(SOON)).expect("a socket");
        Self {
            file: scratch.write("cluster.toml", cells.concat()),
            guest: scratch.write("guest", halting_guest()),
            socket,
            scratch,
        }
    }

    fn call<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Call {
        mirrorball(arguments)
            .limit(STOP_LIMIT)
            .env("MIRRORBALL_IN_LAB", "1")
            .env("MIRRORBALL_RUNTIME", self.scratch.join("runtime"))
            .env("MIRRORBALL_DATA", self.scratch.join("data"))
            .env("MIRRORBALL_USERS", self.scratch.join("users"))
    }

    fn unit(&self) -> Call {
        let file = self.file.to_str().expect("UTF-8");
        self.call(["cluster", "up", "--foreground", "--lab", "never", file])
            .env("NOTIFY_SOCKET", self.scratch.join("notify"))
    }

    /// Starts the unit, and returns when it is ready, which is when all cells answer.
    #[track_caller]
    fn start(&self) -> Running {
        let unit = self.unit().spawn();
        let report = self.report();
        assert!(report.starts_with("READY=1\n"), "{report}");
        let cells = self.status();
        assert!(cells.iter().all(|cell| cell["life"].is_u64()), "{cells:?}");
        unit
    }

    /// Stops the unit: SIGTERM to its process alone.
    #[track_caller]
    fn stop(&self, unit: Running) {
        unit.signal(Signal::SIGTERM);
        let report = self.report();
        assert!(report.starts_with("STOPPING=1\n"), "{report}");
        unit.wait().expect(0);
        let gone = self.call(["cluster", "status"]).run().expect(1);
        assert!(gone.errors().contains("no cluster is up here"), "{gone}");
    }

    /// The next report of the unit.
    #[track_caller]
    fn report(&self) -> String {
        let mut bytes = [0; 4096];
        let count = self.socket.recv(&mut bytes).expect("a report in time");
        String::from_utf8(bytes[..count].to_vec()).expect("UTF-8")
    }

    #[track_caller]
    fn status(&self) -> Vec<Value> {
        let status = self.call(["cluster", "status", "--json"]).ok().json();
        status.as_array().expect("an array").clone()
    }

    #[track_caller]
    fn pids(&self) -> Vec<Value> {
        self.status().iter().map(|cell| cell["pid"].clone()).collect()
    }

    #[track_caller]
    fn run(&self, name: &str) {
        let kernel = format!("kernel = {{ path = {:?} }}", self.guest);
        let text = format!("name = \"{name}\"\n{kernel}\nnets = []\nmemory = \"64M\"\ncell = 1\n");
        let file = self.scratch.write(&format!("{name}.toml"), text);
        self.call(["run", "-d", file.to_str().expect("UTF-8")]).ok();
    }

    /// The output of `inspect` for a VM; none if it does not run.
    fn inspect(&self, name: &str) -> Option<Value> {
        let output = self.call(["inspect", name]).run();
        (output.status == 0).then(|| output.json())
    }

    /// Waits until cell 1 serves a VM, and returns its shard.
    #[track_caller]
    fn served(&self, name: &str) -> Value {
        wait::until("a VM that its cell serves", SOON, || {
            let (vm, cells) = (self.inspect(name)?, self.pids());
            (vm["monitor_pid"] == cells[1]).then(|| vm["shard_pid"].clone())
        })
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        end_cells(&self.scratch.join("runtime"), |words| {
            drop(self.call(words.iter().copied()).run())
        });
    }
}

#[test]
fn stopped_unit_leaves_vms_that_the_next_start_adopts_and_down_with_stop_ends_both() {
    let manager = Manager::new("service-stop");
    let unit = manager.start();
    manager.run("web");
    let shard = manager.served("web");
    assert!(shard.is_u64());
    let before = manager.pids();

    manager.stop(unit);
    let alone = manager.inspect("web").expect("it runs on");
    assert_eq!(
        (&alone["shard_pid"], &alone["state"]),
        (&shard, &"running".into())
    );

    let unit = manager.start();
    assert_eq!(manager.served("web"), shard);
    assert!(manager.pids().iter().zip(&before).all(|(now, then)| now != then));

    let refused = manager.call(["cluster", "down"]).run().expect(1);
    assert!(
        refused.errors().contains("VMs run in the cluster: web"),
        "{refused}"
    );
    let since = Instant::now();
    manager.call(["cluster", "down", "--stop"]).ok();
    assert!(manager.inspect("web").is_none());
    let report = manager.report();
    assert!(
        report.starts_with("STOPPING=1\nSTATUS=The cluster is down."),
        "{report}"
    );
    unit.wait().expect(0);
    assert!(since.elapsed() < STOP_LIMIT);
}

#[test]
fn killed_unit_ends_no_cell_and_its_next_process_goes_on_with_them() {
    let manager = Manager::new("service-kill");
    let unit = manager.start();
    manager.run("web");
    let (shard, cells) = (manager.served("web"), manager.pids());
    host::kill9(unit.pid());
    host::wait_gone(&[unit.pid()], SOON);
    drop(unit);
    assert_eq!(manager.pids(), cells);

    // Only as long as it is planned so.
    let again = manager.call([
        "cluster",
        "up",
        "--lab",
        "never",
        manager.file.to_str().expect("UTF-8"),
    ]);
    let refused = again.run().expect(1);
    assert!(
        refused.errors().contains("a cluster of 2 cells is up already"),
        "{refused}"
    );
    let planned = fs::read_to_string(&manager.file).expect("our own file");
    fs::write(&manager.file, planned.replacen("192M", "128M", 1)).expect("our own file");
    let refused = manager.unit().run().expect(1);
    assert!(
        refused.errors().contains("a cluster of 2 cells is up already"),
        "{refused}"
    );
    fs::write(&manager.file, planned).expect("our own file");

    let unit = manager.start();
    assert_eq!((manager.pids(), manager.served("web")), (cells, shard));
    manager.stop(unit);
    assert_eq!(manager.inspect("web").expect("it runs on")["state"], "running");
}

/// Kills a cell's process and its guard.
#[track_caller]
fn kill_with_guard(pid: &Value) {
    let pid = pid.as_u64().and_then(|pid| u32::try_from(pid).ok());
    let pid = pid.expect("a process");
    let guard = host::parent(pid);
    host::kill9(guard);
    host::kill9(pid);
    host::wait_gone(&[guard, pid], SOON);
}

#[test]
fn next_process_of_a_unit_starts_the_missing_cell_of_a_half_running_cluster() {
    let manager = Manager::new("service-half");
    let unit = manager.start();
    let before = manager.pids();
    host::kill9(unit.pid());
    host::wait_gone(&[unit.pid()], SOON);
    drop(unit);
    kill_with_guard(&before[1]);

    // It is ready when both cells answer.
    let unit = manager.start();
    let after = manager.pids();
    assert_eq!(after[0], before[0], "the cell that ran runs on");
    assert_ne!(after[1], before[1]);
    manager.stop(unit);
}

#[test]
fn unit_that_is_stopped_while_its_cells_come_up_ends_them_at_once() {
    let manager = Manager::new("service-early");
    // No process of cell 1 can make its socket, so the cells never meet.
    let runtime = manager.scratch.join("runtime");
    let mut private = fs::DirBuilder::new();
    private.recursive(true).mode(0o700);
    private
        .create(runtime.join("cells/1/cell.sock/taken"))
        .expect("our own directory");
    let unit = manager.unit().spawn();
    wait::until("a cell that runs", SOON, || {
        let lock = fs::File::open(runtime.join("cells/0/lock")).ok()?;
        Flock::lock(lock, FlockArg::LockSharedNonblock)
            .is_err()
            .then_some(())
    });
    let begun = Instant::now();
    unit.signal(Signal::SIGTERM);
    let report = manager.report();
    assert!(report.starts_with("STOPPING=1\n"), "{report}");
    unit.wait().expect(0);
    // The cells have 20 s to meet.
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    let gone = manager.call(["cluster", "status"]).run().expect(1);
    assert!(gone.errors().contains("no cluster is up here"), "{gone}");
}

#[test]
fn unit_fails_when_all_cells_end_by_themselves() {
    let manager = Manager::new("service-lost");
    let unit = manager.start();
    manager.pids().iter().for_each(kill_with_guard);
    let failed = unit.wait().expect(1);
    assert!(
        failed.errors().contains("no cell of this host runs any more"),
        "{failed}"
    );
    manager.stop(manager.start());
}

/// The lines of a unit of `packaging/systemd`.
fn unit(kind: &str) -> (PathBuf, String) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    let path = folder.join(kind).join("mirrorball-cluster.service");
    let text = fs::read_to_string(&path).expect("the unit");
    (path, text)
}

#[test]
fn shipped_units_are_accepted_by_systemd_and_the_command() {
    for kind in ["system", "user"] {
        let (path, text) = unit(kind);
        let mut section = "";
        let mut keys = Vec::new();
        for line in text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            if line.starts_with('[') {
                section = line;
                continue;
            }
            let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("{line}"));
            keys.push((section, key, value));
        }
        let value = |key: &str| {
            let mut all = keys.iter().filter(|(_, known, _)| *known == key);
            let (section, _, value) = all.next().unwrap_or_else(|| panic!("{kind}: {key}"));
            assert!(all.next().is_none(), "{kind}: {key} twice");
            (*section, *value)
        };
        for (key, expected) in [
            ("Type", "notify"),
            ("Delegate", "yes"),
            ("KillMode", "process"),
            ("Restart", "on-failure"),
        ] {
            assert_eq!(value(key), ("[Service]", expected), "{kind}: {key}");
        }
        // The command takes its words, but for those of the installation.
        let words = value("ExecStart").1.replace("$CLUSTER", "--help");
        let words = words.split_whitespace().skip(1);
        let help = mirrorball(words).ok().text();
        assert!(help.contains("--foreground"), "{help}");
        let words = value("ExecReload").1.split_whitespace().skip(1).chain(["--help"]);
        mirrorball(words).ok();

        let scratch = Scratch::new("unit");
        // systemd checks that the program is there.
        let program = value("ExecStart").1.split_whitespace().next().expect("a program");
        let here = text.replace(program, "/bin/true");
        let copy = scratch.write(
            path.file_name().and_then(|name| name.to_str()).expect("a name"),
            here,
        );
        let scope = format!("--{kind}");
        let verified = Command::new("systemd-analyze")
            .args(["verify", "--man=no", &scope])
            .arg(&copy)
            .env("XDG_RUNTIME_DIR", scratch.path())
            .output();
        let Ok(verified) = verified else {
            println!("NOT TESTED HERE: `systemd-analyze verify`, which this host does not have");
            continue;
        };
        let said = String::from_utf8_lossy(&verified.stderr);
        let of_unit: Vec<&str> = said
            .lines()
            .filter(|line| line.contains("mirrorball-cluster"))
            .collect();
        assert!(of_unit.is_empty(), "{kind}: {said}");
    }
}
