//! The cells of this host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::{Scratch, Vm, host, mirrorball, vm::runtime_directory, wait};

/// Time that a cell has to start again.
const RESTART_LIMIT: Duration = Duration::from_secs(20);

/// Cells that are up. Ended when dropped; VMs that still run are left alone.
pub struct Cluster;

impl Cluster {
    /// Brings up two cells: the nodes of the host where it has two with CPUs (in the lab,
    /// `labs/two-nodes.toml`), else two of its CPUs.
    #[track_caller]
    pub fn up(scratch: &Scratch) -> Self {
        match Self::file(scratch) {
            None => Self::up_by(&[]),
            Some(file) => Self::of(&file),
        }
    }

    /// Brings up `cells` cells: nodes if the host has as many, else equal parts of its CPUs.
    #[track_caller]
    pub fn up_with(cells: usize) -> Self {
        Self::up_by(&["--cells", &cells.to_string()])
    }

    /// Brings up the cells of a file.
    #[track_caller]
    pub fn of(file: &Path) -> Self {
        Self::up_by(&[file.to_str().expect("UTF-8")])
    }

    #[track_caller]
    fn up_by(arguments: &[&str]) -> Self {
        // Ended even if it comes up half.
        let cluster = Self;
        mirrorball(["cluster", "up", "--lab", "never"])
            .args(arguments)
            .ok();
        cluster
    }

    /// Brings up `cells` cells that give out `memory` each and lend by command only: nodes if the host has as
    /// many, else a CPU each.
    #[track_caller]
    pub fn up_with_memory(cells: usize, memory: &str, scratch: &Scratch) -> Self {
        let nodes = nodes_with_cpus();
        let places: Vec<String> = match nodes.len() >= cells {
            true => nodes.iter().map(|node| format!("nodes = [{node}]")).collect(),
            false => allowed_cpus().map(|cpu| format!("cpus = \"{cpu}\"")).collect(),
        };
        assert!(places.len() >= cells, "a host with {} CPUs", places.len());
        let cell = |place: &String| format!("[[cells]]\n{place}\nmemory = \"{memory}\"\n");
        let cells: String = places.iter().take(cells).map(cell).collect();
        let file = format!("{cells}[borrowing]\nautomatic = false\n");
        Self::of(&scratch.write("cluster.toml", file))
    }

    /// The file of two cells; none where the host's nodes are two cells by themselves.
    #[track_caller]
    pub fn file(scratch: &Scratch) -> Option<PathBuf> {
        if nodes_with_cpus().len() == 2 {
            return None;
        }
        let mut cpus = allowed_cpus();
        let mut cell = || format!("[[cells]]\ncpus = \"{}\"\n", cpus.next().expect("two CPUs"));
        Some(scratch.write("cluster.toml", format!("{}{}", cell(), cell())))
    }

    /// The report of `cluster status` on each cell.
    #[track_caller]
    pub fn cells(&self) -> Vec<Value> {
        let status = mirrorball(["cluster", "status", "--json"]).ok().json();
        status.as_array().expect("an array").clone()
    }

    /// The report of `cluster status` on one cell.
    #[track_caller]
    pub fn cell(&self, number: usize) -> Value {
        self.cells()[number].clone()
    }

    /// Whether the cell runs in another life than its first. On a machine that is slow enough it may take
    /// more than one.
    pub fn is_new(cell: &Value) -> bool {
        cell["life"].as_u64().is_some_and(|life| life > 1)
    }

    /// The VMs of a cell.
    #[track_caller]
    pub fn vms(&self, number: usize) -> Vec<String> {
        let cell = self.cell(number);
        let vms = cell["vms"].as_array().expect("an array");
        vms.iter()
            .map(|name| name.as_str().expect("a name").to_owned())
            .collect()
    }

    /// The report of `cluster vcpus` on the vCPUs of a VM, in their order.
    #[track_caller]
    pub fn vcpus(&self, vm: &Vm) -> Vec<Value> {
        let all = mirrorball(["cluster", "vcpus", "--json"]).ok().json();
        let all = all.as_array().expect("an array").iter();
        all.filter(|vcpu| vcpu["vm"] == vm.name()).cloned().collect()
    }

    /// The memory of a cell that VMs have, in bytes.
    #[track_caller]
    pub fn given_bytes(&self, number: usize) -> u64 {
        self.cell(number)["given_bytes"].as_u64().expect("bytes")
    }

    /// Kills a cell's process and the guard that would start it again.
    #[track_caller]
    pub fn kill_for_good(&self, number: usize) {
        let pid = self.pid(number);
        host::kill9(host::parent(pid));
        host::kill9(pid);
    }

    /// The log of a cell's processes and of its guard.
    pub fn log(number: usize) -> String {
        let path = runtime_directory().join(format!("cells/{number}/log"));
        std::fs::read_to_string(&path).unwrap_or_else(|error| format!("{}: {error}", path.display()))
    }

    /// The process of a cell.
    #[track_caller]
    pub fn pid(&self, number: usize) -> u32 {
        self.cell(number)["pid"].as_u64().expect("a process number") as u32
    }

    /// The process of a cell, once it is another one than `before`, which has ended or will end.
    #[track_caller]
    pub fn pid_after(&self, number: usize, before: u32) -> u32 {
        wait::until("the cell's next process", RESTART_LIMIT, || {
            let status = mirrorball(["cluster", "status", "--json"]).run();
            let pid = (status.status == 0).then(|| status.json()[number]["pid"].as_u64())??;
            u32::try_from(pid).ok().filter(|pid| *pid != before)
        })
    }
}

/// The nodes of this host that have CPUs.
#[track_caller]
fn nodes_with_cpus() -> Vec<Value> {
    let nodes = mirrorball(["topology", "--json"]).ok().json();
    let nodes = nodes["hosts"][0]["nodes"].as_array().expect("an array").clone();
    let has_cpus = |node: &Value| node["cpus"].as_array().is_some_and(|cpus| !cpus.is_empty());
    let nodes = nodes.into_iter().filter(has_cpus);
    nodes.map(|node| node["number"].clone()).collect()
}

/// The CPUs that this process may use.
#[track_caller]
pub fn allowed_cpus() -> impl Iterator<Item = usize> {
    let cpus = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).expect("of this process");
    (0..nix::sched::CpuSet::count()).filter(move |cpu| cpus.is_set(*cpu).unwrap_or(false))
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", mirrorball(["cluster", "status"]).run().text());
            for number in 0..2 {
                eprintln!("--- the log of cell {number}\n{}", Self::log(number));
            }
        }
        let _ = mirrorball(["cluster", "down", "--leave"]).run();
    }
}
