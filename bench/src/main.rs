//! Times Mirrorball against QEMU on this host, in one run, alternating, and prints a table of medians.
//!
//! `bench --mirrorball PATH --kernel VMLINUX --initrd INITRD --runs N --out FILE.json --machine TEXT [--only
//! PART,...]`; needs root (TAP, the kernel's trace), KVM, `qemu-system-x86_64`, `ip`. Everything timed is
//! first copied to memory, so that no program is read over a network.

mod idle;
mod measure;
mod memory;
mod pair;
mod report;
mod trace;
mod virtiofsd;
mod vmm;
mod work;

use std::path::PathBuf;
use std::process::ExitCode;

use bench::guest_files::GuestFiles;

use measure::Measurement;
use report::{Better, Table};
use vmm::Vmm;

type Part = fn(&Options, &GuestFiles, &mut Table) -> Outcome<()>;

/// The parts of the bench, in the order of the table.
const PARTS: [(&str, Part); 7] = [
    ("boot", boot),
    ("idle", idle),
    ("disk", disk),
    ("net", net),
    ("compute", compute),
    (SUBNET, subnet),
    (FOLDERS, folders),
];
/// The parts that run only when they are named: each has a result of its own.
const SUBNET: &str = "subnet";
const FOLDERS: &str = "folders";
/// The largest MTU of a card of the subnet.
const MTU_LARGE: u16 = 65_520;
const ALL: [Vmm; 3] = [Vmm::Mirrorball, Vmm::QemuMicrovm, Vmm::QemuPc];

/// Options of the command line.
pub struct Options {
    mirrorball: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
    out: PathBuf,
    machine: String,
    runs: usize,
    /// The parts to run; when empty, all of them but [`SUBNET`] and [`FOLDERS`].
    only: Vec<String>,
}

impl Options {
    fn wants(&self, part: &str) -> bool {
        let named = self.only.iter().any(|name| name == part);
        named || (self.only.is_empty() && ![SUBNET, FOLDERS].contains(&part))
    }

    /// Number of runs of tasks that take longer than a start.
    fn shorter(&self) -> usize {
        self.runs.div_ceil(2)
    }
}

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn options() -> Outcome<Options> {
    let mut values = std::collections::HashMap::new();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let name = word
            .strip_prefix("--")
            .ok_or_else(|| format!("unexpected '{word}'"))?
            .to_owned();
        let value = words.next().ok_or_else(|| format!("--{name} wants a value"))?;
        values.insert(name, value);
    }
    let only = values.remove("only").unwrap_or_default();
    let only: Vec<String> = only
        .split(',')
        .filter(|part| !part.is_empty())
        .map(Into::into)
        .collect();
    let names = PARTS.map(|(name, _)| name);
    if let Some(part) = only.iter().find(|part| !names.contains(&part.as_str())) {
        return Err(format!("no part '{part}'; there are {}", names.join(", ")).into());
    }
    let mut take = |name: &str| values.remove(name).ok_or_else(|| format!("--{name} is missing"));
    Ok(Options {
        mirrorball: take("mirrorball")?.into(),
        kernel: take("kernel")?.into(),
        initrd: take("initrd")?.into(),
        out: take("out")?.into(),
        machine: take("machine")?,
        runs: take("runs")?.parse()?,
        only,
    })
}

fn run() -> Outcome<()> {
    let options = options()?;
    let files = GuestFiles::stage(&options.mirrorball, &options.kernel, &options.initrd)?;
    let mut table = report::Table::new(&options.machine);
    eprintln!("bench: {} runs of each, alternating", options.runs);
    for (part, measure) in PARTS {
        if options.wants(part) {
            measure(&options, &files, &mut table)?;
            // Finished parts are saved, should a later one fail.
            table.save(&options.out)?;
        }
    }
    table.print();
    Ok(())
}

fn boot(options: &Options, files: &GuestFiles, table: &mut Table) -> Outcome<()> {
    // Not counted: the first guest of a host is slower than all others.
    vmm::first_user_process(Vmm::Mirrorball, files)?;
    let starts = measure::alternate(options.runs, &ALL, |vmm| vmm::first_user_process(vmm, files))?;
    let starts = measure::column(&starts, |seconds| Ok(*seconds))?;
    table.add("start to first user process", "s", Better::Lower, starts);
    Ok(())
}

fn idle(options: &Options, files: &GuestFiles, table: &mut Table) -> Outcome<()> {
    let samples = measure::alternate(options.shorter(), &ALL, |vmm| idle::sample(vmm, files))?;
    type Figure = fn(&idle::Sample) -> f64;
    let rows: [(&str, &str, Figure); 7] = [
        (
            "of a start: host, to the first guest instruction",
            "s",
            |sample| sample.host,
        ),
        ("of a start: firmware and early kernel", "s", |sample| {
            sample.early
        }),
        ("of a start: kernel, to the first user process", "s", |sample| {
            sample.kernel
        }),
        ("of a start: the first line's way out", "s", |sample| {
            sample.output
        }),
        ("exits from the guest in a start", "count", |sample| sample.exits),
        ("exits to user space in a start", "count", |sample| {
            sample.device_exits
        }),
        ("memory beyond the guest's, 1 vCPU, 128 MiB", "MiB", |sample| {
            sample.overhead_mib
        }),
    ];
    for (name, unit, figure) in rows {
        let column = measure::column(&samples, |sample| Ok(figure(sample)))?;
        table.add(name, unit, Better::Lower, column);
    }
    Ok(())
}

fn disk(options: &Options, files: &GuestFiles, table: &mut Table) -> Outcome<()> {
    let rows = [
        ("sequential_read_iops", "sequential 4 KiB read", "IOPS"),
        ("sequential_write_iops", "sequential 4 KiB write", "IOPS"),
        ("random_read_iops", "random 4 KiB read", "IOPS"),
        ("random_write_iops", "random 4 KiB write", "IOPS"),
        ("read_mb_s", "sequential 1 MiB read", "MB/s"),
        ("write_mb_s", "sequential 1 MiB write", "MB/s"),
    ];
    let compared = [Vmm::Mirrorball, Vmm::QemuPc, Vmm::QemuPcThreads];
    devices(options, files, table, "disk", &compared, &rows)
}

fn net(options: &Options, files: &GuestFiles, table: &mut Table) -> Outcome<()> {
    let rows = [
        ("send_mbit_s", "TCP guest to host through TAP", "Mbit/s"),
        ("receive_mbit_s", "TCP host to guest through TAP", "Mbit/s"),
    ];
    devices(
        options,
        files,
        table,
        "net",
        &[Vmm::Mirrorball, Vmm::QemuPc],
        &rows,
    )
}

/// Exchanges of two guests: on the subnet, and on a bridge of the host.
fn subnet(options: &Options, files: &GuestFiles, table: &mut Table) -> Outcome<()> {
    let compared = [Vmm::Mirrorball, Vmm::QemuPcVhost, Vmm::QemuPc];
    for mtu in [1500, MTU_LARGE] {
        let answers = measure::alternate(options.shorter(), &compared, |vmm| {
            pair::exchange(vmm, mtu, files)
        })?;
        for (key, name, unit, better) in [
            (
                "send_mbit_s",
                "TCP from caller to answerer",
                "Mbit/s",
                Better::Higher,
            ),
            (
                "receive_mbit_s",
                "TCP from answerer to caller",
                "Mbit/s",
                Better::Higher,
            ),
            ("round_trip_us", "round trip of 1 byte", "us", Better::Lower),
        ] {
            let column = measure::column(&answers, |json| measure::number(json, key))?;
            table.add(&format!("{name}, MTU {mtu}"), unit, better, column);
        }
    }
    Ok(())
}

fn folders(options: &Options, files: &GuestFiles, table: &mut Table) -> Outcome<()> {
    files.fill_folder()?;
    let rows = [
        ("read_mb_s", "sequential read", "MB/s"),
        ("random_read_iops", "random 4 KiB read", "IOPS"),
        ("creates_s", "new files", "1/s"),
        ("stats_s", "looks at files", "1/s"),
        ("unlinks_s", "removals of files", "1/s"),
    ];
    let compared = [Vmm::Mirrorball, Vmm::QemuPc];
    devices(options, files, table, FOLDERS, &compared, &rows)
}

/// Measures what the guest itself reports of a task, under programs that have virtio over PCI.
fn devices(
    options: &Options,
    files: &GuestFiles,
    table: &mut Table,
    task: &str,
    compared: &[Vmm],
    rows: &[(&str, &str, &str)],
) -> Outcome<()> {
    let answers = measure::alternate(options.shorter(), compared, |vmm| vmm::task(vmm, task, files))?;
    for (key, name, unit) in rows {
        let column = measure::column(&answers, |json| measure::number(json, key))?;
        table.add(name, unit, Better::Higher, column);
    }
    Ok(())
}

fn compute(options: &Options, files: &GuestFiles, table: &mut Table) -> Outcome<()> {
    let mut host = Vec::new();
    let guest = measure::alternate(options.shorter(), &[Vmm::Mirrorball], |vmm| {
        host.push(work::compute().as_secs_f64());
        vmm::task(vmm, "compute", files)
    })?;
    let mut both = measure::column(&guest, |json| measure::number(json, "compute_s"))?;
    both.push(Measurement::of("host", host));
    table.add("compute", "s", Better::Lower, both);
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}
