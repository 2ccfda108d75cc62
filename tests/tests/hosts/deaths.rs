//! Death of a host under a guest over two hosts. The guest's home ends the guest in time, reports the reason,
//! and leaves nothing.
//!
//! The guest is the counting kernel (`guest/`), which needs few pages until its vCPUs work on both hosts.

use std::time::{Duration, Instant};

use guest_tests::terminal::Terminal;
use guest_tests::wait;
use serde_json::Value;

use crate::CRASH;
use crate::guest::{HOSTS, Traces};
use crate::lab::{COMMAND_LIMIT, Lab, SILENCE};

static KERNEL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/storm"));
/// Time limit until both vCPUs of the counting kernel run. They took 80 s over emulated hosts.
const START_LIMIT: Duration = Duration::from_secs(240);
/// Time limit of the guest's end after the silence limit of its lost host.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Exit status of `run` for a failed shard.
const FAILED: i32 = 73;

/// The counting kernel with a vCPU on each of two hosts. Its home is on the first.
pub struct Spanning<'a> {
    lab: &'a Lab,
    name: String,
    cells: [usize; 2],
    hosts: [&'static str; 2],
    before: [Traces; 2],
    cells_before: [Value; 2],
    terminal: Terminal,
}

impl<'a> Spanning<'a> {
    /// Starts the guest over two cells of the lab, by their numbers, and waits until both vCPUs run.
    #[track_caller]
    pub fn start(lab: &'a Lab, name: &str, cells: [usize; 2]) -> Self {
        let hosts = cells.map(|cell| lab.hosts[cell]);
        let before = hosts.map(|host| Traces::of(lab, host));
        let cells_before = cells.map(|cell| cell_of(lab, hosts[0], cell).expect("the cell's state"));
        let kernel = lab.scratch.write("storm", KERNEL);
        let span = format!("{},{}", cells[0], cells[1]);
        let machine = [
            "run", "--lab", "never", "--name", name, "--net", "none", "--memory", "128M", "--cpus", "2",
        ];
        let guest = [
            "--kernel",
            kernel.to_str().expect("UTF-8"),
            "--cmdline",
            "storm.cpus=2 storm.epochs=0 storm.sweeps=4",
            "--span",
            &span,
            "--span-memory",
            "coherent",
        ];
        let mut terminal = lab.terminal(hosts[0], &[&machine[..], &guest].concat());
        terminal.expect("storm begins", START_LIMIT);
        let seen = terminal.seen();
        assert!(seen.contains("CPU number=1\r"), "no second vCPU:\n{seen}");
        for (host, before) in hosts.iter().zip(&before) {
            let now = Traces::of(lab, host);
            assert!(
                now.processes() >= before.processes() + 2,
                "{host}: {before:?}, now {now:?}"
            );
        }
        Self {
            lab,
            name: name.to_owned(),
            cells,
            hosts,
            before,
            cells_before,
            terminal,
        }
    }

    /// Checks that the home ends the guest in time after the second host's loss at `lost`, and reports the
    /// reason.
    #[track_caller]
    pub fn ends_with_its_other_host(&mut self, lost: Instant) {
        let status = self.terminal.wait(SILENCE + END_LIMIT);
        let took = lost.elapsed();
        let seen = self.terminal.seen();
        assert_eq!(status, FAILED, "exit status; the terminal:\n{seen}");
        let place = format!("on host {}", self.hosts[1]);
        // The terminal's last lines may be read after the exit status.
        let reason = wait::within(COMMAND_LIMIT, || {
            let seen = self.terminal.seen();
            let line = seen.lines().rfind(|line| line.contains(&place))?;
            Some(line.trim().to_owned())
        });
        let reason = reason.unwrap_or_else(|| panic!("the lost host is not named:\n{seen}"));
        let name = &self.name;
        eprintln!(
            "{name}: ended {:.1} s after the loss: {reason}",
            took.as_secs_f32()
        );
        assert!(took < SILENCE + END_LIMIT, "only after {took:?}");
    }

    /// Checks that no process and no memory of the guest is left on one of its hosts.
    #[track_caller]
    pub fn has_left(&self, number: usize) {
        let (host, before) = (self.hosts[number], &self.before[number]);
        let mut now = Traces::of(self.lab, host);
        let gone = wait::within(COMMAND_LIMIT, || {
            now = Traces::of(self.lab, host);
            now.are_no_more_than(before).then_some(())
        });
        assert!(gone.is_some(), "left on {host}: {now:?}, before {before:?}");
    }

    /// Checks that the cell on one of its hosts has the guest's memory and vCPUs back.
    #[track_caller]
    pub fn has_given_back(&self, number: usize) {
        let (host, before) = (self.hosts[number], &self.cells_before[number]);
        let mut now = None;
        let free = wait::within(COMMAND_LIMIT, || {
            now = cell_of(self.lab, host, self.cells[number]);
            (now.as_ref() == Some(before)).then_some(())
        });
        assert!(free.is_some(), "the cell of {host}: {now:?}, before {before}");
    }
}

#[test]
fn guest_ends_in_time_when_a_host_of_it_is_cut_off_or_crashes() {
    let lab = Lab::linked("lost", HOSTS, "");
    lab.cluster_up(None, "");

    let mut cut = Spanning::start(&lab, "cut", [0, 1]);
    lab.link(["alpha", "beta"], &["--down"]);
    cut.ends_with_its_other_host(Instant::now());
    // Each side ends its own part, as neither reaches the other.
    cut.has_left(0);
    cut.has_left(1);
    cut.has_given_back(0);
    lab.link(["alpha", "beta"], &["--restore"]);
    for host in HOSTS {
        lab.wait_for_lives(host, &[true, true]);
    }
    cut.has_given_back(1);

    let mut crashed = Spanning::start(&lab, "crashed", [0, 1]);
    lab.shell("beta", CRASH);
    crashed.ends_with_its_other_host(Instant::now() + Duration::from_secs(1));
    crashed.has_left(0);
    crashed.has_given_back(0);
}

/// Memory that a cell has given to VMs, and these VMs, as a host's cell reports them.
fn cell_of(lab: &Lab, host: &str, cell: usize) -> Option<Value> {
    let status = lab.on(host, &["cluster", "status", "--json"]).run();
    let cell = (status.status == 0).then(|| status.json()[cell].clone())?;
    Some(serde_json::json!([cell["given_bytes"], cell["vms"]]))
}
