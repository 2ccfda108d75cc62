//! Lab hosts with the cells of one cluster.

use std::time::Duration;

use guest_tests::command::{Call, Output};
use guest_tests::terminal::Terminal;
use guest_tests::{Scratch, mirrorball, wait};
use serde_json::Value;

/// Time limit of the start of a few lab hosts side by side, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(240);
/// Time limit of one command in a lab host.
pub const COMMAND_LIMIT: Duration = Duration::from_secs(120);
/// Time after which a host without an answer has locked up.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Time for which a cell may be silent: emulated hosts stand still for seconds occasionally.
pub const SILENCE: Duration = Duration::from_secs(20);

/// A lab host's own copy of the program that started the lab. Read over the shared file system the program
/// takes a second to start, each time.
const PROGRAM: &str = "/run/lab/mirrorball";

/// A lab and its hosts.
pub struct Lab {
    name: String,
    pub scratch: Scratch,
    pub hosts: &'static [&'static str],
}

impl Lab {
    /// Starts a lab with a lab file of this text.
    pub fn start(test: &str, hosts: &'static [&'static str], text: &str) -> Self {
        let lab = Self {
            name: format!("test-{test}-{}", std::process::id()),
            scratch: Scratch::shared(test),
            hosts,
        };
        let file = lab.scratch.write("lab.toml", text);
        let up = mirrorball(["lab", "up", "--name", &lab.name])
            .args([file])
            .limit(START_LIMIT)
            .ok();
        // The test runner counts the labs that had to start again.
        println!("{}", up.errors());
        lab
    }

    /// Starts hosts of one CPU and 1 GiB each, all on one link; `more` is TOML.
    pub fn linked(test: &str, hosts: &'static [&'static str], more: &str) -> Self {
        let host = |name: &&str| format!("[[hosts]]\nname = \"{name}\"\ncpus = 1\nmemory = \"1G\"\n");
        let each: String = hosts.iter().map(host).collect();
        Self::start(
            test,
            hosts,
            &format!("{each}[[links]]\nhosts = {hosts:?}\n{more}"),
        )
    }

    /// Brings up a cell for each host of [`Self::linked`], linked through shared memory if `shared` is its
    /// path on the hosts. `more` is TOML of the table `membership`.
    pub fn cluster_up(&self, shared: Option<&str>, more: &str) {
        self.cluster_of(self.hosts, shared, more);
    }

    /// The same as [`Self::cluster_up`] for some of its hosts.
    pub fn cluster_of(&self, hosts: &[&str], shared: Option<&str>, more: &str) {
        let shared = shared.map_or(String::new(), |path| format!("shared_memory = {path:?}\n"));
        let mut text = String::new();
        for (number, name) in (1..).zip(hosts) {
            text += &format!("[[hosts]]\nname = \"{name}\"\naddress = \"10.77.0.{number}:7400\"\n{shared}");
        }
        for name in hosts {
            text += &format!("[[cells]]\nhost = \"{name}\"\n");
        }
        text += &format!("[membership]\nsilence_ms = {}\n{more}", SILENCE.as_millis());
        let file = self.scratch.write("cluster.toml", text);
        let file = file.to_str().expect("UTF-8");
        let keys = mirrorball(["cluster", "keys", file]).ok();
        assert!(keys.text().trim().ends_with("/keys"), "{}", keys.text());
        for host in hosts {
            self.on(host, &["cluster", "up", file]).ok();
        }
        for host in hosts {
            self.wait_for_lives(host, &vec![true; hosts.len()]);
        }
    }

    pub fn cluster_down(&self) {
        for host in self.hosts {
            self.on(host, &["cluster", "down"]).ok();
        }
    }

    /// Changes the link between two hosts; returns its new state.
    pub fn link(&self, hosts: [&str; 2], change: &[&str]) -> String {
        let link = mirrorball(["lab", "link", "--lab", &self.name]).args(hosts);
        link.args(change).ok().text().trim().to_owned()
    }

    /// `mirrorball` on one of its hosts, on a terminal.
    pub fn terminal(&self, host: &str, arguments: &[&str]) -> Terminal {
        let lab = ["lab", "exec", "--lab", &self.name, host, "--", PROGRAM];
        Terminal::mirrorball(&[&lab[..], arguments].concat())
    }

    /// `mirrorball` with these arguments on one of its hosts.
    pub fn on(&self, host: &str, arguments: &[&str]) -> Call {
        self.exec(host, &[&[PROGRAM], arguments].concat())
    }

    /// A command on one of its hosts.
    pub fn exec(&self, host: &str, command: &[&str]) -> Call {
        mirrorball(["lab", "exec", "--lab", &self.name, host, "--"])
            .args(command)
            .limit(COMMAND_LIMIT)
    }

    /// Runs a shell's command on one of its hosts, which has to succeed; returns its output.
    pub fn shell(&self, host: &str, command: &str) -> String {
        self.exec(host, &["sh", "-c", command])
            .ok()
            .text()
            .trim()
            .to_owned()
    }

    /// Whether each cell lives, by the view of a host's cell.
    pub fn lives(&self, host: &str) -> Vec<bool> {
        let status = self.on(host, &["cluster", "status", "--json"]).run();
        if status.status != 0 {
            return Vec::new();
        }
        let cells = status.json();
        let cells = cells.as_array().expect("an array");
        cells.iter().map(|cell| !cell["life"].is_null()).collect()
    }

    /// Waits until a host's cell has this view.
    pub fn wait_for_lives(&self, host: &str, lives: &[bool]) {
        let limit = SILENCE + Duration::from_secs(60);
        wait::until(&format!("{host} sees {lives:?}"), limit, || {
            (self.lives(host) == lives).then_some(())
        });
    }

    /// Starts a VM on a cell, from `from`.
    pub fn start_vm(&self, from: &str, name: &str, cell: u16) -> Output {
        let vm = [
            "run", "--image", "tiny", "--memory", "96M", "--net", "none", "--lab", "never",
        ];
        let cell = cell.to_string();
        self.on(
            from,
            &[&vm[..], &["--name", name, "--cell", &cell, "-d"]].concat(),
        )
        .run()
    }

    /// VMs and their cells, by a host's `ps`.
    pub fn names(&self, host: &str) -> Vec<(String, Value)> {
        let listed = self.on(host, &["ps", "--json"]).ok().json();
        let listed = listed.as_array().expect("an array");
        let name = |vm: &Value| vm["name"].as_str().expect("a name").to_owned();
        let mut names: Vec<_> = listed.iter().map(|vm| (name(vm), vm["cell"].clone())).collect();
        names.sort_by(|a, b| a.0.cmp(&b.0));
        names
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for host in self.hosts {
                let logs = "tail -n 20 /run/mirrorball/cells/*/log";
                let said = self.exec(host, &["sh", "-c", logs]).limit(ANSWER_LIMIT).run();
                if said.status == Output::OVER_LIMIT {
                    // The runner classifies the failure as the lab's by these words.
                    eprintln!("THE LAB: host {host} does not answer");
                }
                eprintln!("--- {host}:\n{}", said.text());
            }
        }
        let _ = mirrorball(["lab", "down", "--name", &self.name]).run();
    }
}
