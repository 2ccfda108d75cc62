//! Time of moves of a vCPU between CPUs of a node, of two nodes, and of two cells, beside a request without
//! effect. `bench-moves --mirrorball PATH --folder NEW --idle KERNEL --busy KERNEL --out FILE.json --machine
//! TEXT [--samples N]`.
//!
//! A move is a request to the process that serves the VM, and its reply: from then on the vCPU runs on the
//! other CPU. The time until its caches are filled is not part of it. The guests are two kernels, one of
//! which halts and one of which computes, so any KVM runs them. Needs two CPUs; the moves are between nodes
//! where these belong to two.

mod kinds;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bench::mirrorball::{Cluster, Mirrorball};
use bench::options::Options;
use bench::tables::median;
use bench::{Outcome, cpu};
use kinds::{KINDS, Kind};
use registry::control::{Answer, Request, ask};
use registry::vms::Registry;
use serde::Serialize;

const USAGE: &str = "bench-moves --mirrorball PATH --folder NEW --idle KERNEL --busy KERNEL --out FILE.json \
                     --machine TEXT [--samples N]";
/// Time limit of a request.
const LIMIT: Duration = Duration::from_secs(10);
/// Pause between two samples: a driver that has taken a vCPU is at rest again.
const PAUSE: Duration = Duration::from_millis(20);
const VM: &str = "mover";

/// Samples of a kind of move.
#[derive(Serialize)]
struct Row {
    moved: String,
    /// Whether the vCPU computed, or was idle.
    vcpu: &'static str,
    request_us: Vec<f64>,
    moves_us: Vec<f64>,
    /// The median of the moves by that of the requests without effect.
    requests: Option<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: &'a str,
    rows: &'a [Row],
}

struct Bench {
    mirrorball: Mirrorball,
    /// The vCPU's work, and the kernel that does it.
    guests: [(&'static str, PathBuf); 2],
    cpus: [usize; 2],
    samples: usize,
}

/// A VM with a kernel of the bench. Ended when dropped.
struct Vm<'a>(&'a Mirrorball);

impl<'a> Vm<'a> {
    fn start(mirrorball: &'a Mirrorball, kernel: &Path) -> Outcome<Self> {
        let kernel = kernel.to_str().ok_or("a kernel whose path is no text")?;
        let words = [
            "run", "--detach", "--lab", "never", "--net", "none", "--memory", "128M",
        ];
        let more = ["--cpus", "1", "--cell", "0", "--kernel", kernel, "--name", VM];
        mirrorball.call(&[&words[..], &more].concat(), LIMIT)?;
        Ok(Self(mirrorball))
    }
}

impl Drop for Vm<'_> {
    fn drop(&mut self) {
        let _ = self.0.call(&["kill", VM], LIMIT);
    }
}

impl Bench {
    fn cluster(&self, kind: &Kind) -> Outcome<Cluster<'_>> {
        let file = self.mirrorball.folder().join("cluster.toml");
        fs::write(&file, kind.cluster_file(self.cpus))?;
        let file = file.to_str().ok_or("a folder whose name is no text")?;
        Cluster::up(&self.mirrorball, &[file])
    }

    /// Samples of a kind of move, of an idle vCPU and of one that computes.
    fn take(&self, kind: &Kind) -> Outcome<Vec<Row>> {
        let _cluster = self.cluster(kind)?;
        let mut rows = Vec::new();
        for (vcpu, kernel) in &self.guests {
            let _vm = Vm::start(&self.mirrorball, kernel)?;
            let folder = Registry::at(&self.mirrorball.runtime())?.find(VM)?;
            let (mut request_us, mut moves_us) = (Vec::new(), Vec::new());
            for sample in 0..=2 * self.samples {
                let request = Request::AwaitRunning { limit_s: 1 };
                let request = timed(&folder, &request)?;
                let cpu = self.cpus[(sample + 1) % 2];
                let moved = timed(&folder, &Request::Place { vcpu: 0, cpu })?;
                std::thread::sleep(PAUSE);
                // The first one finds everything cold.
                if sample > 0 {
                    request_us.push(request);
                    moves_us.push(moved);
                }
            }
            let requests = median(&moves_us).zip(median(&request_us));
            rows.push(Row {
                moved: kind.name(are_of_one_node(self.cpus)?),
                vcpu,
                request_us,
                moves_us,
                requests: requests.map(|(moved, request)| moved / request),
            });
        }
        Ok(rows)
    }
}

/// Time of a request and its reply, microseconds.
fn timed(folder: &Path, request: &Request) -> Outcome<f64> {
    let begun = Instant::now();
    let answer = ask(folder, request, Some(LIMIT))?;
    let us = begun.elapsed().as_nanos() as f64 / 1e3;
    match answer {
        Answer::Done | Answer::Placed(_) => Ok(us),
        other => Err(format!("{VM}: {request:?} is answered by {other:?}").into()),
    }
}

/// Whether the host's kernel has both CPUs in one NUMA node.
fn are_of_one_node(cpus: [usize; 2]) -> Outcome<bool> {
    let node = |cpu: usize| -> Outcome<Option<String>> {
        let entries = fs::read_dir(format!("/sys/devices/system/cpu/cpu{cpu}"))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let number = |name: String| Some(name.strip_prefix("node")?.to_owned());
        Ok(names.filter_map(number).next())
    };
    Ok(node(cpus[0])? == node(cpus[1])?)
}

fn run() -> Outcome<()> {
    let options = Options::of_process(USAGE)?;
    let (out, machine) = (options.needed("out")?, options.needed("machine")?);
    let [folder, program] = [options.needed("folder")?, options.needed("mirrorball")?].map(Path::new);
    let samples = options.get("samples").unwrap_or("15").parse()?;
    let (first, second) = cpu::two()?;
    let mirrorball = Mirrorball::new(folder, program)?;
    let guests = [
        ("idle", options.needed("idle")?),
        ("computes", options.needed("busy")?),
    ];
    let bench = Bench {
        mirrorball,
        guests: guests.map(|(vcpu, kernel)| (vcpu, kernel.into())),
        cpus: [first, second],
        samples,
    };
    let mut rows = Vec::new();
    for kind in &KINDS {
        rows.extend(bench.take(kind)?);
        let report = Report { machine, rows: &rows };
        fs::write(out, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    for row in &rows {
        let [request, moved] = [&row.request_us, &row.moves_us].map(|samples| median(samples).unwrap_or(0.0));
        println!(
            "{}, {}: {moved:.0} us, a request {request:.0} us",
            row.moved, row.vcpu
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-moves: {error}");
            ExitCode::FAILURE
        }
    }
}
