//! Random reads and updates in a VM with memory of its own cell, and in one with borrowed memory.

use std::collections::BTreeMap;
use std::time::Duration;

use bench::Outcome;
use bench::mirrorball::Cluster;
use bench::tables::median;
use bench::tiny_vm::TinyVm;
use serde::Serialize;
use serde_json::Value;

use crate::size::Rates;
use crate::{Bench, twice};

/// Memory of the VM, and its table, MiB. The rest is the guest kernel's.
const VM_MIB: u64 = 256;
const TABLE_MIB: u64 = 160;
/// The borrowed part, MiB, of so many lenders.
const BORROWED_MIB: u64 = VM_MIB / 4 * 3;
const LENDERS: u64 = 3;
/// Memory that a lender keeps, MiB.
const FLOOR_MIB: u64 = 16;
/// Number of timed rounds in each VM.
const ROUNDS: usize = 5;
/// Goal for the time with borrowed memory, as a multiple of that without (Cellular Disco, SOSP '99, section
/// 5.2: less than 1% slower).
const GOAL: f64 = 1.01;
/// Time limit of a guest's program.
const LIMIT: Duration = Duration::from_secs(900);

/// Where the VM's memory is.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Ord, PartialOrd)]
enum Kind {
    Own,
    Borrowed,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Own, Self::Borrowed];

    fn name(self) -> &'static str {
        match self {
            Self::Own => "all memory of the VM's cell",
            Self::Borrowed => "three quarters of other cells",
        }
    }

    /// The file of four cells, each of a node, of which the first one has the VM.
    fn cluster_file(self) -> String {
        let lender_mib = BORROWED_MIB / LENDERS + FLOOR_MIB;
        let own_mib = match self {
            Self::Own => VM_MIB,
            Self::Borrowed => VM_MIB - BORROWED_MIB,
        };
        let mut text = format!("[[cells]]\nnodes = [0]\nmemory = \"{own_mib}M\"\n");
        for node in 1..=LENDERS {
            text += &format!("[[cells]]\nnodes = [{node}]\nmemory = \"{lender_mib}M\"\n");
        }
        text + &limits(FLOOR_MIB)
    }
}

/// Section of a cluster file: cells lend by themselves, and keep so many MiB.
pub fn limits(floor_mib: u64) -> String {
    format!("[borrowing]\nchunk = \"4M\"\nlow_water = \"{floor_mib}M\"\nfloor = \"{floor_mib}M\"\n")
}

/// Times of a kind.
#[derive(Debug, Serialize)]
struct Row {
    memory: &'static str,
    /// Of each round.
    round_s: Vec<f64>,
    /// Memory of other cells by the VM's record.
    borrowed_bytes: u64,
    /// Present guest memory on each of the host's nodes, at the end, as `node0_mib`.
    nodes: BTreeMap<String, u64>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    machine: &'a str,
    vm_bytes: u64,
    table_bytes: u64,
    operations: u64,
    /// Median with borrowed memory, divided by that without.
    borrowed_by_own: Option<f64>,
    goal: f64,
    rows: &'a [Row],
}

/// Takes all samples, and passes on a report after each run.
///
/// # Errors
/// If a VM does not have its memory where it should be, or a program fails.
pub fn measure(
    bench: &Bench,
    machine: &str,
    runs: usize,
    seconds: usize,
    write: impl Fn(String) -> Outcome<()>,
) -> Outcome<()> {
    let rates = twice("the calibration", || {
        let _cluster = cluster(bench, Kind::Own)?;
        Rates::measure(&vm(bench)?, 1)
    })?;
    let operations = rates.times(seconds).operations;
    eprintln!("bench-cluster: {operations} operations in a round");
    let mut rows: Vec<Row> = Vec::new();
    for run in 1..=runs {
        // A host that gets busier favours neither.
        let mut order = Kind::ALL;
        if run % 2 == 0 {
            order.reverse();
        }
        for kind in order {
            let row = twice(kind.name(), || take(bench, kind, operations))?;
            eprintln!("bench-cluster: {}: {:.2?} s", row.memory, row.round_s);
            match rows.iter_mut().find(|known| known.memory == row.memory) {
                Some(known) => known.round_s.extend(row.round_s),
                None => rows.push(row),
            }
        }
        let [own, borrowed] = Kind::ALL.map(|kind| {
            let row = rows.iter().find(|row| row.memory == kind.name());
            row.and_then(|row| median(&row.round_s))
        });
        let report = Report {
            machine,
            vm_bytes: VM_MIB << 20,
            table_bytes: TABLE_MIB << 20,
            operations,
            borrowed_by_own: own.zip(borrowed).map(|(own, borrowed)| borrowed / own),
            goal: GOAL,
            rows: &rows,
        };
        write(serde_json::to_string_pretty(&report)?)?;
        if let Some(ratio) = report.borrowed_by_own {
            println!("borrowed / own: {ratio:.3} (goal {GOAL})");
        }
    }
    Ok(())
}

fn cluster(bench: &Bench, kind: Kind) -> Outcome<Cluster<'_>> {
    Cluster::up(&bench.mirrorball, &[&bench.cluster_file(&kind.cluster_file())?])
}

fn vm(bench: &Bench) -> Outcome<TinyVm<'_>> {
    let memory = format!("{VM_MIB}M");
    bench.vm("rows", &["--cpus", "1", "--memory", &memory, "--cell", "0"])
}

/// One sample.
fn take(bench: &Bench, kind: Kind, operations: u64) -> Outcome<Row> {
    let _cluster = cluster(bench, kind)?;
    let vm = vm(bench)?;
    let known = vm.inspect()?;
    let borrowed_bytes = borrowed_bytes(&known);
    let expected = match kind {
        Kind::Own => 0,
        Kind::Borrowed => BORROWED_MIB << 20,
    };
    if borrowed_bytes != expected {
        return Err(format!("the VM has borrowed {borrowed_bytes} bytes, and not {expected}").into());
    }
    let [mib, operations, rounds] = [TABLE_MIB, operations, ROUNDS as u64].map(|number| number.to_string());
    let words = [
        "--program",
        "rows",
        "--hot-percent",
        "50",
        "--passes",
        "1",
        "--mib",
        &mib,
    ];
    let words = [&words[..], &["--operations", &operations, "--rounds", &rounds]].concat();
    let mut working = vm.work(&words, LIMIT)?;
    working.ready()?;
    working.go()?;
    let round_s = seconds(&working.result()?)?;
    let shard = known["shard_pid"].as_u64().ok_or("the VM has no shard")?;
    Ok(Row {
        memory: kind.name(),
        round_s,
        borrowed_bytes,
        nodes: memory_mib(&std::fs::read_to_string(format!("/proc/{shard}/numa_maps"))?),
    })
}

/// Memory of a VM that is other cells', by its record.
fn borrowed_bytes(known: &Value) -> u64 {
    let loans = known["borrowed"].as_array().into_iter().flatten();
    loans.filter_map(|loan| loan["bytes"].as_u64()).sum()
}

/// The times that a guest's program has printed.
pub fn seconds(result: &Value) -> Outcome<Vec<f64>> {
    let times = result["seconds"].as_array().into_iter().flatten();
    let times: Vec<f64> = times.filter_map(Value::as_f64).collect();
    match times.is_empty() {
        true => Err(format!("no time in {result}").into()),
        false => Ok(times),
    }
}

/// Guest memory by node, of lines like `7f00 bind:0 file=/memfd:guest-memory\040(deleted) N0=8 N1=1
/// kernelpagesize_kB=4` (proc(5)).
fn memory_mib(maps: &str) -> BTreeMap<String, u64> {
    let mut nodes_kib: BTreeMap<String, u64> = BTreeMap::new();
    for line in maps.lines().filter(|line| line.contains("file=/memfd:guest")) {
        let pairs: Vec<(&str, u64)> = line
            .split_whitespace()
            .filter_map(|word| word.split_once('='))
            .filter_map(|(key, number)| Some((key, number.parse().ok()?)))
            .collect();
        let page_kib = pairs.iter().find(|(key, _)| *key == "kernelpagesize_kB");
        let page_kib = page_kib.map_or(4, |(_, kib)| *kib);
        for (key, pages) in &pairs {
            let node = key.strip_prefix('N').filter(|node| node.parse::<u32>().is_ok());
            if let Some(node) = node {
                *nodes_kib.entry(format!("node{node}_mib")).or_default() += pages * page_kib;
            }
        }
    }
    nodes_kib
        .into_iter()
        .map(|(node, kib)| (node, kib >> 10))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn first_cell_has_room_for_its_own_part_of_the_vm() {
        let own = Kind::Own.cluster_file();
        assert!(
            own.starts_with("[[cells]]\nnodes = [0]\nmemory = \"256M\"\n"),
            "{own}"
        );
        let borrowed = Kind::Borrowed.cluster_file();
        assert!(
            borrowed.starts_with("[[cells]]\nnodes = [0]\nmemory = \"64M\"\n"),
            "{borrowed}"
        );
        assert_eq!(borrowed.matches("memory = \"80M\"").count(), 3);
    }

    #[test]
    fn guest_memory_is_counted_by_node() {
        let maps = "7f00 bind:0 file=/memfd:guest-memory\\040(deleted) N0=512 N1=256 kernelpagesize_kB=4\n\
                    7f10 bind:1 file=/memfd:guest-memory\\040(deleted) N1=1 kernelpagesize_kB=2048\n\
                    7f20 default anon=3 N0=3000 kernelpagesize_kB=4\n";
        let nodes = [("node0_mib", 2), ("node1_mib", 3)];
        assert_eq!(
            memory_mib(maps),
            nodes.map(|(node, mib)| (node.to_owned(), mib)).into()
        );
    }

    #[test]
    fn loans_and_times_are_those_of_the_answers() {
        let known = json!({ "borrowed": [{ "cell": 1, "bytes": 64 }, { "cell": 2, "bytes": 32 }] });
        assert_eq!(borrowed_bytes(&known), 96);
        assert_eq!(borrowed_bytes(&json!({})), 0);
        assert_eq!(seconds(&json!({ "seconds": [1.5, 2] })).unwrap(), [1.5, 2.0]);
        assert!(seconds(&json!({ "seconds": [] })).is_err());
    }
}
