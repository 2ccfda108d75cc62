//! Risk: a killed keeper or a failed cell leaves a part of a VM behind, or takes resources of a running VM.
//!
//! Each test is an entry of the table in `docs/design/owners.md` ("Resources and events"), or a column of
//! entries. It needs a host with control groups or with NUMA nodes; `cells` has those that need neither. The
//! guests halt at once; cells, keepers and shards are real. Each test has a runtime directory of its own.

#[path = "cells/two_cells.rs"]
mod two_cells;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_tests::command::Running;
use guest_tests::{host, wait};
use serde_json::Value;

use two_cells::{Cells, END_LIMIT, NAME, SMALL, SOON, as_pid, names_of};

/// More than a cell has: 32 MiB of it are borrowed.
const LARGE: &str = "memory = \"224M\"\ncell = 1\n";
const BORROWED_BYTES: u64 = 32 << 20;
/// Amount of a loan in advance: the smallest, which the file names.
const CHUNK: &str = "[borrowing]\nchunk = \"4M\"\n";
const CHUNK_BYTES: u64 = 4 << 20;
/// Time until a request that waits is in progress, after it has connected.
const REQUEST_TIME: Duration = Duration::from_millis(500);

impl Cells {
    /// Memory that cell 0 has lent cell 1, as both report it, in bytes.
    #[track_caller]
    fn lent_bytes(&self) -> u64 {
        let status = self.status();
        let sum = |parts: &Value| -> u64 {
            let parts = parts.as_array().expect("an array").iter();
            parts.map(|part| part["bytes"].as_u64().expect("bytes")).sum()
        };
        let lent = sum(&status[0]["lent"]);
        assert_eq!(lent, sum(&status[1]["borrowed"]), "{status:?}");
        lent
    }

    /// Requests to the VM that wait for its end. All are under way.
    #[track_caller]
    fn requests(&self) -> Vec<Running> {
        let requests = [&["wait", NAME][..], &["stop", NAME, "--limit", "600"]];
        let requests: Vec<Running> = requests
            .into_iter()
            .map(|words| self.call(words.iter().copied()).spawn())
            .collect();
        for request in &requests {
            wait::until("a request that has connected", SOON, || {
                has_socket(request.pid()).then_some(())
            });
        }
        std::thread::sleep(REQUEST_TIME);
        requests
    }
}

fn has_socket(pid: u32) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd"));
    let links = files
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|file| fs::read_link(file.path()).ok());
    links
        .into_iter()
        .any(|link| link.to_string_lossy().starts_with("socket:"))
}

/// The inodes of the guest memory that a process has mapped.
fn guest_memory(pid: &str) -> BTreeSet<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let inode = |line: &str| line.split_whitespace().nth(4)?.parse().ok();
    maps.lines()
        .filter(|line| line.contains("guest-memory"))
        .filter_map(inode)
        .collect()
}

/// The processes that map a file of guest memory, or have it open.
fn holders(memory: &BTreeSet<u64>) -> Vec<String> {
    use std::os::unix::fs::MetadataExt;
    let is_open = |pid: &str| {
        let files = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten();
        let paths = files.map(|file| file.path());
        let mut guest = paths.filter(|path| {
            fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("guest-memory"))
        });
        guest.any(|path| fs::metadata(path).is_ok_and(|file| memory.contains(&file.ino())))
    };
    let all = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let pids = all.filter_map(|entry| entry.file_name().into_string().ok());
    let pids = pids.filter(|name| name.parse::<u32>().is_ok());
    pids.filter(|pid| !guest_memory(pid).is_disjoint(memory) || is_open(pid))
        .collect()
}

/// The keys of a VM's limits; none, with a line that says so, where the host has no control groups.
fn limits() -> &'static str {
    if host::has_controllers(&["cpu", "memory", "pids"]) {
        "cpu_limit = 0.5\nmemory_limit = \"640M\"\n"
    } else {
        println!("NOT TESTED HERE: the control group of the VM, since this host has no cgroup v2");
        ""
    }
}

/// The control group of a process that has limits, once it is known to be the VM's own.
#[track_caller]
fn group_of(limits: &str, shard: u32) -> Option<PathBuf> {
    if limits.is_empty() {
        return None;
    }
    let text = fs::read_to_string(format!("/proc/{shard}/cgroup")).expect("a process");
    let group = text.trim().replacen("0::", "/sys/fs/cgroup", 1);
    assert!(
        group.starts_with(&format!("/sys/fs/cgroup/mirrorball/{NAME}.")),
        "{group}"
    );
    expect_limits(Path::new(&group));
    Some(group.into())
}

#[track_caller]
fn expect_limits(group: &Path) {
    let limit = |name: &str| fs::read_to_string(group.join(name)).expect("a limit");
    assert_eq!(limit("memory.max").trim(), (640_u64 << 20).to_string());
    assert_eq!(limit("cpu.max").trim(), "50000 100000");
}

/// The host's count of the pages of a VM's memory, by node; none where the kernel does not count.
fn pages_by_node(shard: u32) -> Option<BTreeMap<u64, u64>> {
    let maps = fs::read_to_string(format!("/proc/{shard}/numa_maps")).ok()?;
    let lines = maps.lines().filter(|line| line.contains("guest-memory"));
    let counts = lines.flat_map(|line| line.split(' ')).filter_map(|word| {
        let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
        Some((node.parse().ok()?, pages.parse::<u64>().ok()?))
    });
    let mut nodes = BTreeMap::new();
    counts.for_each(|(node, pages)| *nodes.entry(node).or_default() += pages);
    Some(nodes)
}

/// A VM that does not fit its cell has memory of the other one, on the other one's node, without a command.
#[test]
fn vm_borrows_by_itself_on_the_lenders_node_and_the_loan_ends_with_it() {
    let cells = Cells::up_with("borrows", CHUNK);
    let prefaulted = format!("{LARGE}prefault = true\n");
    let alone = cells.vm_file("alone", &format!("{prefaulted}cells = [1]\n"), None);
    let refused = cells.call(["run", "-d", &alone]).run().expect(1);
    assert!(refused.errors().contains("cell 1 has 192 MiB"), "{refused}");
    assert_eq!(cells.lent_bytes(), 0);

    let file = cells.vm_file(NAME, &prefaulted, None);
    cells.call(["run", "-d", &file]).ok();
    let vm = cells.inspect(NAME).expect("it runs");
    assert_eq!(vm["borrowed"][0]["bytes"], BORROWED_BYTES, "{vm}");
    // Cell 1 has nothing left of its own, and borrows a chunk in advance.
    wait::until("a loan in advance", SOON, || {
        (cells.lent_bytes() == BORROWED_BYTES + CHUNK_BYTES).then_some(())
    });
    let status = cells.status();
    assert_eq!(status[0]["lent_on_request"], status[0]["lent"], "{status:?}");
    let shown = cells.call(["cluster", "status"]).ok().text();
    let loan = "cell 0 has lent cell 1 36M, on its request";
    assert!(shown.contains(loan), "{shown}");
    let (own, lender) = (&status[1]["nodes"], &status[0]["nodes"]);
    if let Some(pages) = pages_by_node(cells.pid("shard_pid")) {
        let on = |nodes: &Value| -> u64 {
            let nodes = nodes.as_array().expect("an array").iter();
            let counts = nodes.filter_map(|node| pages.get(&node.as_u64()?));
            counts.sum::<u64>() * 4096
        };
        if own == lender {
            assert_eq!(on(own), 224 << 20, "{pages:?}");
        } else {
            assert_eq!((on(own), on(lender)), (192 << 20, BORROWED_BYTES), "{pages:?}");
        }
    }

    // The lender's next process counts the loan, and still as one on request.
    let [_, process] = cells.processes(0);
    host::kill9(process);
    wait::until("the lender's next process", SOON, || {
        let status = cells.call(["cluster", "status", "--json"]).run();
        let pid = (status.status == 0).then(|| as_pid(&status.json()[0]["pid"]))??;
        (pid != process && host::is_running(pid)).then_some(())
    });
    assert!(cells.lent_bytes() >= BORROWED_BYTES);
    cells.call(["kill", NAME]).ok();
    wait::until("memory that is back", SOON, || {
        (cells.lent_bytes() == 0).then_some(())
    });
}

#[test]
fn killed_keeper_leaves_nothing() {
    let cells = Cells::up("killed-keeper");
    let disk = cells.scratch.sparse("disk.raw", 4 << 20);
    cells.loan("lend", "64M").ok();
    let limits = limits();
    let file = cells.vm_file(NAME, &format!("{LARGE}{limits}"), Some(&disk));
    let run = cells.follow(&file);
    let (keeper, shard) = (cells.pid("keeper_pid"), cells.pid("shard_pid"));
    let group = group_of(limits, shard);
    let memory = guest_memory(&shard.to_string());
    assert!(holders(&memory).contains(&shard.to_string()), "{memory:?}");
    let refused = cells.loan("reclaim", "64M").run().expect(1);
    assert!(refused.errors().contains("web uses 32 MiB"), "{refused}");
    let other = cells.vm_file("other", SMALL, Some(&disk));
    let refused = cells.call(["run", "-d", &other]).run().expect(1);
    assert!(refused.errors().contains("is in use by VM web"), "{refused}");
    let mut requests = cells.requests();
    assert!(requests.iter_mut().all(|request| !request.has_ended()));

    host::kill9(keeper);
    host::wait_gone(&[keeper, shard], END_LIMIT);
    let free = wait::within(END_LIMIT, || holders(&memory).is_empty().then_some(()));
    assert!(free.is_some(), "guest memory is held by {:?}", holders(&memory));
    for request in requests {
        request.wait().expect(0);
    }
    let ended = run.wait().expect(73);
    let reason = "ended with its keeper, which was killed";
    assert!(ended.errors().contains(reason), "{ended}");

    // Its memory, and the memory that it had borrowed.
    wait::until("free memory in the cell", SOON, || {
        (cells.status()[1]["given_bytes"] == 0).then_some(())
    });
    cells.loan("reclaim", "64M").ok();
    assert_eq!(cells.lent_bytes(), 0);
    // Its disk, its name, and its control group.
    cells.call(["run", "-d", &other]).ok();
    cells.call(["kill", "other"]).ok();
    let again = cells.vm_file(NAME, &format!("{SMALL}{limits}"), Some(&disk));
    let run = cells.follow(&again);
    if let Some(group) = group {
        assert!(!group.exists(), "{}", group.display());
    }
    cells.call(["kill", NAME]).ok();
    run.wait().expect(74);
}

#[test]
fn vm_keeps_its_resources_without_a_cell() {
    let cells = Cells::up("without-a-cell");
    let disk = cells.scratch.sparse("disk.raw", 4 << 20);
    cells.loan("lend", "64M").ok();
    let limits = limits();
    let file = cells.vm_file(NAME, &format!("{LARGE}{limits}"), Some(&disk));
    cells.call(["run", "-d", &file]).ok();
    let (keeper, shard) = (cells.pid("keeper_pid"), cells.pid("shard_pid"));
    let group = group_of(limits, shard);
    let namesake = cells.vm_file(NAME, &format!("{SMALL}cell = 0\n"), None);
    let other = cells.vm_file("other", &format!("{SMALL}cell = 0\n"), Some(&disk));
    let keeps_all = |situation: &str| {
        let refused = cells.call(["run", "-d", &namesake]).run().expect(1);
        assert!(
            refused.errors().contains("running already"),
            "{situation}: {refused}"
        );
        let refused = cells.call(["run", "-d", &other]).run().expect(1);
        let in_use = refused.errors().contains("is in use by VM web");
        assert!(in_use, "{situation}: {refused}");
        let lent = &cells.status()[0]["lent"][0];
        assert_eq!(lent["bytes"], 64 << 20, "{situation}");
        let refused = cells.loan("reclaim", "64M").run();
        assert_ne!(refused.status, 0, "{situation}: {refused}");
        group.iter().for_each(|group| expect_limits(group));
        assert!([keeper, shard].into_iter().all(host::is_running), "{situation}");
    };

    // The cell and its guard are stopped.
    let [guard, cell] = cells.processes(1);
    [guard, cell].into_iter().for_each(host::stop);
    keeps_all("a cell that stands still");
    [cell, guard].into_iter().for_each(host::go_on);
    cells.wait_served(&[NAME]);

    // They are dead, and a monitor serves the VM.
    let processes = cells.processes(1);
    processes.into_iter().for_each(host::kill9);
    wait::until("a monitor", SOON, || {
        let vm = cells.inspect(NAME)?;
        as_pid(&vm["monitor_pid"]).filter(|pid| *pid != processes[1] && host::is_running(*pid))
    });
    keeps_all("a cell that is dead");

    // No cell runs; an owner without a cluster requests the disk.
    cells.processes(0).into_iter().for_each(host::kill9);
    let alone = cells.vm_file("alone", SMALL, Some(&disk));
    let refused = cells.call(["run", "-d", &alone]);
    let refused = refused
        .env("MIRRORBALL_RUNTIME", cells.scratch.join("elsewhere"))
        .run();
    assert_ne!(refused.status, 0, "{refused}");
    assert!(refused.errors().contains("in use"), "{refused}");

    // Cells that start find all resources.
    cells.up_again();
    cells.wait_served(&[NAME]);
    assert_eq!(cells.lent_bytes(), 64 << 20);
    keeps_all("cells that have started again");
    assert_eq!(
        cells.inspect(NAME).expect("it runs")["borrowed"][0]["bytes"],
        BORROWED_BYTES
    );
    let refused = cells.loan("reclaim", "64M").run().expect(1);
    assert!(refused.errors().contains("web uses 32 MiB"), "{refused}");
    cells.loan("reclaim", "32M").ok();
    assert_eq!(cells.lent_bytes(), BORROWED_BYTES);
    cells.call(["kill", NAME]).ok();
    cells.loan("reclaim", "32M").ok();
    assert_eq!(cells.lent_bytes(), 0);
    cells.call(["run", "-d", &other]).ok();
}

#[test]
fn request_fails_when_its_cell_does() {
    let cells = Cells::up("failing");
    let limits = limits();
    let disk = cells.scratch.sparse("disk.raw", 4 << 20);
    let file = cells.vm_file(NAME, &format!("{SMALL}cell = 1\n{limits}"), Some(&disk));
    let run = cells.follow(&file);
    let shard = cells.pid("shard_pid");
    let group = group_of(limits, shard);
    let requests = cells.requests();
    // A request that only this cell can answer, which does not.
    let [_, cell] = cells.processes(1);
    host::stop(cell);
    let late = cells.vm_file("late", &format!("{SMALL}cell = 1\n"), None);
    let mut late = cells.call(["run", "-d", &late]).spawn();
    wait::until("a request that has connected", SOON, || {
        has_socket(late.pid()).then_some(())
    });
    std::thread::sleep(REQUEST_TIME);
    assert!(!late.has_ended());

    let failed = cells.call(["cluster", "fail", "1"]).ok().text();
    assert!(
        failed.contains("cell 1 has failed: web ended with it"),
        "{failed}"
    );
    let late = late.wait().expect(1);
    assert!(late.errors().contains("cell 1"), "{late}");
    for request in requests {
        request.wait().expect(0);
    }
    let ended = run.wait().expect(73);
    let reason = "cell 1, of which the VM used CPUs or memory, has failed";
    assert!(ended.errors().contains(reason), "{ended}");
    host::wait_gone(&[shard], END_LIMIT);
    // The name and the disk are free, in the cell that is left.
    let again = cells.vm_file(NAME, &format!("{SMALL}cell = 0\n{limits}"), Some(&disk));
    cells.call(["run", "-d", &again]).ok();
    if let Some(group) = group {
        assert!(!group.exists(), "{}", group.display());
    }
}

#[test]
fn killed_keeper_of_a_part_ends_the_vm() {
    let cells = Cells::up("part");
    let keys = "memory = \"128M\"\ncpus = 2\nspan = { cells = [0, 1] }\n";
    for part in 0..2 {
        let file = cells.vm_file(NAME, keys, None);
        let run = cells.follow(&file);
        let vm = cells.inspect(NAME).expect("it runs");
        let shards = [&vm["shard_pid"], &vm["part_pids"][0]].map(|pid| as_pid(pid).expect("a process"));
        let keepers = shards.map(host::parent);
        assert_ne!(keepers[0], keepers[1]);
        assert_eq!(keepers[0], cells.pid("keeper_pid"));
        let requests = cells.requests();

        host::kill9(keepers[part]);
        host::wait_gone(&[shards, keepers].concat(), SOON);
        for request in requests {
            request.wait().expect(0);
        }
        let ended = run.wait().expect(73);
        let reason = "its process ended with its keeper, which was killed";
        assert!(ended.errors().contains(reason), "part {part}: {ended}");
        wait::until("free memory in both cells", SOON, || {
            let free = |cell: &Value| cell["given_bytes"] == 0 && names_of(cell).is_empty();
            cells.status().iter().all(free).then_some(())
        });
    }
}
