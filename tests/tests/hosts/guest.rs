//! A Linux VM with coherent memory over lab hosts, its home on alpha, with a disk and a network card there;
//! and its traces on the hosts.

use std::path::Path;
use std::time::{Duration, Instant};

use guest_tests::command::{Call, Output, built, tail};
use guest_tests::terminal::Terminal;
use guest_tests::vm::TOOL;
use guest_tests::{VmFile, wait};

use crate::lab::{COMMAND_LIMIT, Lab};

pub const HOSTS: &[&str] = &["alpha", "beta"];
/// Time limit from its start to its agent's first answer with both CPUs; 50 to 80 s on machines with little
/// other work, 170 s on a slow one.
const BOOT_LIMIT: Duration = Duration::from_secs(600);
/// Time limit of a command in a guest whose pages take milliseconds to arrive.
const CALL_LIMIT: Duration = Duration::from_secs(300);
/// A late agent gets the request again: its work has not begun.
const TRIES: usize = 3;
/// The disk of the guest, in alpha's memory.
const DISK: &str = "/run/hosts.ext4";
const DISK_BYTES: u64 = 8 << 20;
const TAP: &str = "mbhosts";
/// Alpha's address at the other end of the guest's card.
pub const ALPHA: &str = "10.99.0.1";
const CARD: &str = "ip link set eth0 up && ip addr add 10.99.0.2/24 dev eth0";
/// Change of a host's shared memory while a VM runs, less than any part of one takes: the disk's blocks,
/// logs.
const OTHER_MEMORY_KIB: u64 = 4 << 10;

/// Two hosts, one cluster, and on alpha the files and devices that the guest needs.
pub fn two_hosts(test: &str) -> Lab {
    let lab = Lab::linked(test, HOSTS, "");
    lab.cluster_up(None, "spans = \"plain\"\n");
    let image = lab.scratch.sparse("disk.ext4", DISK_BYTES);
    // Nothing that writes by itself: each page that it used would move between hosts.
    let format = [
        "-q",
        "-t",
        "ext4",
        "-b",
        "4096",
        "-O",
        "^has_journal",
        "-E",
        "lazy_itable_init=0",
    ];
    Call::new("mke2fs").args(format).args([&image]).ok();
    lab.shell(
        "alpha",
        &format!(
            "cp {} {DISK} && ip tuntap add dev {TAP} mode tap vnet_hdr && \
             ip addr add {ALPHA}/24 dev {TAP} && ip link set {TAP} up",
            image.display()
        ),
    );
    lab
}

/// A VM of one CPU on each of `hosts`.
pub fn over(file: VmFile, hosts: usize) -> VmFile {
    let cells: Vec<usize> = (0..hosts).collect();
    file.cpus(hosts as u8)
        .key("span", &format!("{{ cells = {cells:?}, memory = \"coherent\" }}"))
}

/// The running VM. `run` is in the foreground, on a terminal, so that its end is reported. Dropping this ends
/// the VM.
pub struct Guest<'a> {
    lab: &'a Lab,
    name: String,
    pub terminal: Terminal,
    begun: Instant,
    pub cpus: usize,
}

impl<'a> Guest<'a> {
    /// Starts one over both hosts with `memory`, the disk and the card, and waits until its agent has both
    /// CPUs.
    #[track_caller]
    pub fn boot(lab: &'a Lab, name: &str, memory: &str) -> Self {
        let file = over(VmFile::new(name).memory(memory), HOSTS.len())
            .disk(Path::new(DISK), "mode = \"exclusive\"\npersistent = true")
            .net(&format!("kind = \"tap\"\ntap = \"{TAP}\""));
        Self::of(lab, &file, HOSTS.len())
    }

    /// Starts the file's VM, on alpha, and waits until its agent has `cpus`.
    #[track_caller]
    pub fn of(lab: &'a Lab, file: &VmFile, cpus: usize) -> Self {
        let path = file.write(&lab.scratch);
        let run = ["run", "--lab", "never", path.to_str().expect("UTF-8")];
        let mut guest = Self {
            lab,
            name: file.name().to_owned(),
            terminal: lab.terminal("alpha", &run),
            begun: Instant::now(),
            cpus,
        };
        guest.wait_up("");
        guest
    }

    /// Waits until the agent answers with all CPUs, in another boot than `before`; returns that boot.
    #[track_caller]
    fn wait_up(&mut self, before: &str) -> String {
        let ask = "cat /proc/sys/kernel/random/boot_id && nproc";
        let answer = wait::within(BOOT_LIMIT, || {
            if let Some(status) = self.terminal.ended() {
                panic!("it ended with {status} before its agent answered");
            }
            let said = self.call(&["sh", "-c", ask]).run();
            let boot = said.text().lines().next().unwrap_or_default().to_owned();
            // A system that starts services has its agent before its late CPUs.
            let all = said.text().lines().nth(1) == Some(self.cpus.to_string().as_str());
            (said.status == 0 && boot != before && all).then_some(boot)
        });
        let boot = answer
            .unwrap_or_else(|| panic!("no agent answers with {} CPUs within {BOOT_LIMIT:?}", self.cpus));
        self.told(&format!("the agent answers with {} CPUs", self.cpus));
        boot
    }

    /// Prints on the test's output which step is done, and when.
    pub fn told(&self, what: &str) {
        eprintln!(
            "{}: {what}, after {:.1} s",
            self.name,
            self.begun.elapsed().as_secs_f32()
        );
    }

    fn call(&self, command: &[&str]) -> Call {
        let exec = ["exec", "-T", &self.name, "--"];
        self.lab
            .on("alpha", &[&exec[..], command].concat())
            .limit(CALL_LIMIT)
    }

    #[track_caller]
    fn run(&self, command: &[&str]) -> Output {
        for _ in 1..TRIES {
            let said = self.call(command).run();
            if !said.errors().contains("no agent answers") {
                return said;
            }
        }
        self.call(command).run()
    }

    /// Runs a command on one of its CPUs; returns its output.
    #[track_caller]
    pub fn on(&self, cpu: usize, command: &[&str]) -> String {
        let mask = (1 << cpu).to_string();
        let said = self.run(&[&["taskset", &mask], command].concat()).expect(0);
        said.text().trim().to_owned()
    }

    /// Runs a shell's commands on one of its CPUs, each of which has to succeed.
    #[track_caller]
    pub fn sh(&self, cpu: usize, script: &str) -> String {
        self.on(cpu, &["sh", "-ec", script])
    }

    /// Runs jobs of `guest-tool` one after the other, each on its own CPU, in one process: a program that
    /// starts on the CPU of another host takes seconds, and so does each call of the agent. Returns the line
    /// of each.
    #[track_caller]
    pub fn works<S: AsRef<str>>(&self, works: &[(usize, S)]) -> Vec<String> {
        let named: Vec<String> = works
            .iter()
            .map(|(cpu, work)| format!("{cpu}:{}", work.as_ref()))
            .collect();
        let words = named.iter().map(String::as_str);
        let said = self.on(0, &[TOOL, "works"].into_iter().chain(words).collect::<Vec<_>>());
        let lines: Vec<String> = said.lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), works.len(), "{named:?}:\n{said}");
        lines
    }

    /// Runs a shell's commands on all CPUs at the same time, by one call of the agent. Returns the line of
    /// each.
    #[track_caller]
    pub fn on_each(&self, script: &str) -> Vec<String> {
        let all = format!(
            "for cpu in $(seq 0 {}); do \
             taskset $((1 << cpu)) sh -ec \"$1\" >/tmp/said$cpu & done; wait; cat /tmp/said*",
            self.cpus - 1
        );
        let said = self.on(0, &["sh", "-ec", &all, "sh", script]);
        said.lines().map(str::to_owned).collect()
    }

    /// Gives its card an address.
    #[track_caller]
    pub fn connect(&self) {
        self.sh(0, CARD);
    }

    /// Copies `guest-tool` into it.
    #[track_caller]
    pub fn equip(&self) {
        let tool = built("guest-tool");
        let target = format!("{}:{TOOL}", self.name);
        let copy = ["cp", tool.to_str().expect("UTF-8"), &target];
        self.lab.on("alpha", &copy).limit(CALL_LIMIT).ok();
        self.told("guest-tool is there");
    }

    /// Reboots it from a CPU; it is up again when this returns.
    #[track_caller]
    pub fn reboot(&mut self, cpu: usize) {
        let before = self.sh(0, "cat /proc/sys/kernel/random/boot_id");
        self.last_words(cpu, "reboot -f");
        self.wait_up(&before);
    }

    /// Runs a command that ends the guest. The call may end in any way, as its agent goes away under it.
    pub fn last_words(&self, cpu: usize, command: &str) {
        let script = format!("taskset {} {command} >/dev/null 2>&1 &", 1 << cpu);
        let _ = self.call(&["sh", "-c", &script]).limit(COMMAND_LIMIT / 2).run();
    }

    /// Pauses it (`pause`), or has it go on (`resume`).
    #[track_caller]
    pub fn order(&self, order: &str) {
        self.lab.on("alpha", &[order, &self.name]).ok();
    }

    /// Moves a vCPU to a cell.
    #[track_caller]
    pub fn move_vcpu(&self, vcpu: usize, cell: usize) {
        let [vcpu, cell] = [vcpu, cell].map(|number| number.to_string());
        let order = ["move", &self.name, "--vcpu", &vcpu, "--cell", &cell];
        self.lab.on("alpha", &order).ok();
    }

    /// A command on its home's host with this word, its name, and these flags.
    pub fn command(&self, words: &[&str]) -> Call {
        let (command, flags) = words.split_first().expect("a command");
        self.lab
            .on("alpha", &[&[*command, &self.name[..]], flags].concat())
    }

    /// The cell of each vCPU.
    #[track_caller]
    pub fn places(&self) -> Vec<usize> {
        let known = self.inspect();
        let places = known["status"]["span"]["vcpus"].as_array();
        let places = places.unwrap_or_else(|| panic!("no places of vCPUs in {known:#}"));
        let cell = |place: &serde_json::Value| place.as_u64().expect("a cell") as usize;
        places.iter().map(cell).collect()
    }

    /// The output of `inspect`, which is the VM itself or a list of it.
    #[track_caller]
    pub fn inspect(&self) -> serde_json::Value {
        let known = self.lab.on("alpha", &["inspect", &self.name]).ok().json();
        known.get(0).cloned().unwrap_or(known)
    }
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let known = self.lab.on("alpha", &["inspect", &self.name]).run();
            let seen = tail(&self.terminal.seen(), 80);
            eprintln!(
                "--- {}: output of inspect, and its terminal\n{}\n{seen}\n---",
                self.name,
                known.text()
            );
        }
        let _ = self.lab.on("alpha", &["kill", &self.name]).run();
    }
}

/// Traces of VMs on a host.
#[derive(Debug)]
pub struct Traces {
    /// Command lines of monitors and parts' monitors, of keepers, and of shards, which name their VM.
    processes: Vec<String>,
    /// Memory of files in memory, which holds guests' memory.
    shared_kib: u64,
}

impl Traces {
    pub fn of(lab: &Lab, host: &str) -> Self {
        // Few programs: each takes a fifth of a second to start on a lab host.
        let list = "sed -s 's/\\x00/ /g' /proc/[0-9]*/cmdline 2>/dev/null | \
                    grep -aE '^mirrorball (monitor|part-monitor) |^mirrorball-(shard|keeper) ' | sort; \
                    sed -n 's/^Shmem: *\\([0-9]*\\) kB$/\\1/p' /proc/meminfo";
        let said = lab.shell(host, list);
        let mut lines: Vec<String> = said.lines().map(str::to_owned).collect();
        let shared_kib = lines.pop().and_then(|kib| kib.parse().ok());
        Self {
            shared_kib: shared_kib.unwrap_or_else(|| panic!("no Shmem in {said}")),
            processes: lines,
        }
    }

    /// Number of monitors and shards.
    pub fn processes(&self) -> usize {
        let keepers = self
            .processes
            .iter()
            .filter(|line| line.starts_with("mirrorball-keeper"));
        self.processes.len() - keepers.count()
    }

    /// Whether the host has exactly the processes of `before`, and at most its memory plus files of no VM.
    pub fn are_no_more_than(&self, before: &Self) -> bool {
        self.processes == before.processes && self.shared_kib <= before.shared_kib + OTHER_MEMORY_KIB
    }

    /// Checks that a part of a VM runs here, with memory.
    #[track_caller]
    pub fn expect_vm(&self, before: &Self) {
        assert!(self.processes() >= 2, "a monitor and a shard: {self:?}");
        let taken_kib = self.shared_kib.saturating_sub(before.shared_kib);
        assert!(taken_kib > OTHER_MEMORY_KIB, "{before:?}, and with a VM {self:?}");
    }
}

/// Waits until nothing of a VM is on the host any more.
#[track_caller]
pub fn expect_nothing_left(lab: &Lab, host: &str, before: &Traces) {
    let mut now = Traces::of(lab, host);
    let gone = wait::within(COMMAND_LIMIT, || {
        now = Traces::of(lab, host);
        let memory = now.shared_kib <= before.shared_kib + OTHER_MEMORY_KIB;
        (now.processes.is_empty() && memory).then_some(())
    });
    assert!(gone.is_some(), "left on {host}: {now:?}, before {before:?}");
    let number = lab
        .hosts
        .iter()
        .position(|name| *name == host)
        .expect("one of the hosts");
    let cell = wait::within(COMMAND_LIMIT, || {
        let status = lab.on(host, &["cluster", "status", "--json"]).run();
        let cell = (status.status == 0).then(|| status.json()[number].clone())?;
        let empty = cell["given_bytes"] == 0 && cell["vms"].as_array().is_some_and(Vec::is_empty);
        empty.then_some(())
    });
    assert!(cell.is_some(), "the cell of {host} still gives a VM something");
}
