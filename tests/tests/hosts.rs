//! Risk: the hosts of a cluster do not agree which cells live and what runs where, or a host can't be reached from another.
//!
//! The hosts are lab hosts, wherever the test runs.

use std::time::{Duration, Instant};

use guest_tests::command::{Call, Output, binary};
use guest_tests::{Scratch, mirrorball, wait};
use serde_json::Value;

/// Three lab hosts side by side, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(240);
/// What one command in a lab host may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(120);
const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];
/// How long a cell may be silent: emulated hosts stand still for seconds now and then.
const SILENCE: Duration = Duration::from_secs(12);

struct Lab {
    name: String,
    scratch: Scratch,
}

impl Lab {
    fn start(test: &str) -> Self {
        let lab = Self {
            name: format!("test-{test}-{}", std::process::id()),
            scratch: Scratch::shared(test),
        };
        let host = |name: &&str| format!("[[hosts]]\nname = \"{name}\"\ncpus = 1\nmemory = \"1G\"\n");
        let hosts: String = HOSTS.iter().map(host).collect();
        let links = format!("{hosts}[[links]]\nhosts = {HOSTS:?}\n");
        let file = lab.scratch.write("lab.toml", links);
        mirrorball(["lab", "up", "--name", &lab.name])
            .args([file])
            .limit(START_LIMIT)
            .ok();
        lab
    }

    /// `mirrorball` with these arguments on one of its hosts.
    fn on(&self, host: &str, arguments: &[&str]) -> Call {
        self.exec(host, &[&[binary().to_str().expect("UTF-8")], arguments].concat())
    }

    fn exec(&self, host: &str, command: &[&str]) -> Call {
        mirrorball(["lab", "exec", "--lab", &self.name, host, "--"])
            .args(command)
            .limit(COMMAND_LIMIT)
    }

    /// A cell for each host, all up.
    fn cluster(&self) {
        let mut text = String::new();
        for (number, name) in (1..).zip(HOSTS) {
            text += &format!("[[hosts]]\nname = \"{name}\"\naddress = \"10.77.0.{number}:7400\"\n");
        }
        for name in HOSTS {
            text += &format!("[[cells]]\nhost = \"{name}\"\n");
        }
        text += &format!("[membership]\nsilence_ms = {}\n", SILENCE.as_millis());
        let file = self.scratch.write("cluster.toml", text);
        let file = file.to_str().expect("UTF-8");
        let keys = mirrorball(["cluster", "keys", file]).ok();
        assert!(keys.text().trim().ends_with("/keys"), "{}", keys.text());
        for host in HOSTS {
            self.on(host, &["cluster", "up", file]).ok();
        }
    }

    /// Whether each cell lives, as a host's cell knows it.
    fn lives(&self, host: &str) -> Vec<bool> {
        let status = self.on(host, &["cluster", "status", "--json"]).run();
        if status.status != 0 {
            return Vec::new();
        }
        let cells = status.json();
        let cells = cells.as_array().expect("an array");
        cells.iter().map(|cell| !cell["life"].is_null()).collect()
    }

    fn wait_for_lives(&self, host: &str, lives: [bool; 3]) {
        let limit = SILENCE + Duration::from_secs(60);
        wait::until(&format!("{host} sees {lives:?}"), limit, || {
            (self.lives(host) == lives).then_some(())
        });
    }

    /// A VM on a host's cell, started from `from`.
    fn start_vm(&self, from: &str, name: &str, cell: &str) -> Output {
        let vm = [
            "run", "--image", "tiny", "--memory", "96M", "--net", "none", "--lab", "never",
        ];
        self.on(from, &[&vm[..], &["--name", name, "--cell", cell, "-d"]].concat())
            .run()
    }

    fn names(&self, host: &str) -> Vec<(String, Value)> {
        let listed = self.on(host, &["ps", "--json"]).ok().json();
        let listed = listed.as_array().expect("an array");
        let mut names: Vec<_> = listed
            .iter()
            .map(|vm| {
                (
                    vm["name"].as_str().expect("a name").to_owned(),
                    vm["cell"].clone(),
                )
            })
            .collect();
        names.sort_by(|a, b| a.0.cmp(&b.0));
        names
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for host in HOSTS {
                let logs = "tail -n 20 /run/mirrorball/cells/*/log";
                eprintln!(
                    "--- {host}:\n{}",
                    self.exec(host, &["sh", "-c", logs]).run().text()
                );
            }
        }
        let _ = mirrorball(["lab", "down", "--name", &self.name]).run();
    }
}

#[test]
fn three_hosts_are_one_cluster_and_one_that_is_cut_off_comes_back() {
    let lab = Lab::start("hosts");
    lab.cluster();
    lab.wait_for_lives("alpha", [true; 3]);
    lab.wait_for_lives("gamma", [true; 3]);

    // One name space: started from alpha on beta, found from gamma.
    lab.start_vm("alpha", "far", "1").expect(0);
    assert_eq!(lab.names("gamma"), [("far".to_owned(), Value::from(1))]);
    let said = lab
        .on(
            "gamma",
            &[
                "exec",
                "-T",
                "far",
                "--",
                "sh",
                "-c",
                "echo from $(cat) && exit 3",
            ],
        )
        .input(b"afar")
        .run()
        .expect(3);
    assert_eq!(said.text().trim(), "from afar");
    let inspected = lab.on("alpha", &["inspect", "far"]).ok().json();
    assert_eq!(inspected["cell"], 1);
    let taken = lab.start_vm("gamma", "far", "2").expect(1);
    assert!(
        taken.errors().contains("is running already, in cell 1"),
        "{}",
        taken.errors()
    );
    let wrong = lab.start_vm("gamma", "near", "7").expect(1);
    assert!(
        wrong.errors().contains("there is no cell 7"),
        "{}",
        wrong.errors()
    );

    // Without etcd nobody dies, and VMs run on.
    let etcd = |signal: &str| {
        lab.exec("alpha", &["sh", "-c", &format!("kill -{signal} $(pidof etcd)")])
            .ok()
    };
    etcd("STOP");
    lab.start_vm("gamma", "near", "2").expect(0);
    assert_eq!(
        lab.on("alpha", &["exec", "-T", "near", "--", "uname"])
            .ok()
            .text()
            .trim(),
        "Linux"
    );
    etcd("CONT");

    // A host that is cut off is dead for the others, and its VM runs on.
    let cut = Instant::now();
    lab.exec("beta", &["ip", "link", "set", "eth1", "down"]).ok();
    lab.wait_for_lives("alpha", [true, false, true]);
    // By its silence: its lease would have lasted three times as long.
    assert!(cut.elapsed() < SILENCE * 5 / 2, "only after {:?}", cut.elapsed());
    lab.wait_for_lives("gamma", [true, false, true]);
    assert_eq!(
        lab.on("gamma", &["exec", "-T", "near", "--", "echo", "answers"])
            .ok()
            .text()
            .trim(),
        "answers"
    );
    let taken = lab.start_vm("gamma", "far", "2").expect(1);
    assert!(
        taken.errors().contains("far is running already"),
        "{}",
        taken.errors()
    );
    let up = "ip link set eth1 up && ip addr add 10.77.0.2/24 dev eth1 2>/dev/null; true";
    lab.exec("beta", &["sh", "-c", up]).ok();
    for host in HOSTS {
        lab.wait_for_lives(host, [true; 3]);
    }
    wait::until("the VM is back in its cell", COMMAND_LIMIT, || {
        let status = lab.on("gamma", &["cluster", "status", "--json"]).ok().json();
        (status[1]["vms"] == serde_json::json!(["far"])).then_some(())
    });
    lab.on("alpha", &["stop", "far", "--limit", "60"]).ok();
    lab.on("beta", &["kill", "near"]).ok();
    wait::until("nothing runs", COMMAND_LIMIT, || {
        lab.names("alpha").is_empty().then_some(())
    });
    for host in HOSTS {
        lab.on(host, &["cluster", "down"]).ok();
    }
}
