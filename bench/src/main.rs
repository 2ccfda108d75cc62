//! Times Mirrorball against QEMU on this host, in one run, alternating, and prints a table of medians.
//!
//! `bench --mirrorball PATH --kernel VMLINUX --initrd INITRD --runs N --out FILE.json --machine TEXT`; needs root (TAP),
//! KVM, `qemu-system-x86_64`, `ip`. Everything timed is first copied to memory, so that no program is read over a network.

mod guest_files;
mod measure;
mod memory;
mod report;
mod vmm;
mod work;

use std::path::PathBuf;
use std::process::ExitCode;

use measure::Measurement;
use vmm::Vmm;

/// What to run, from the command line.
pub struct Options {
    mirrorball: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
    out: PathBuf,
    machine: String,
    runs: usize,
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
    let mut take = |name: &str| values.remove(name).ok_or_else(|| format!("--{name} is missing"));
    Ok(Options {
        mirrorball: take("mirrorball")?.into(),
        kernel: take("kernel")?.into(),
        initrd: take("initrd")?.into(),
        out: take("out")?.into(),
        machine: take("machine")?,
        runs: take("runs")?.parse()?,
    })
}

fn run() -> Outcome<()> {
    let options = options()?;
    let files = guest_files::GuestFiles::stage(&options)?;
    let mut table = report::Table::new(&options.machine);
    eprintln!("bench: {} runs of each, alternating", options.runs);

    let boot = measure::alternate(
        options.runs,
        &[Vmm::Mirrorball, Vmm::QemuMicrovm, Vmm::QemuPc],
        |vmm| vmm::first_user_process(vmm, &files),
    )?;
    table.add("start to first user process", "s", report::Better::Lower, boot);

    let overhead = measure::alternate(1, &[Vmm::Mirrorball, Vmm::QemuMicrovm], |vmm| {
        memory::overhead_mib(vmm, &files)
    })?;
    table.add(
        "memory beyond the guest's, 1 vCPU, 128 MiB",
        "MiB",
        report::Better::Lower,
        overhead,
    );

    let compared = [Vmm::Mirrorball, Vmm::QemuPc];
    let disks = measure::answers(options.runs, &compared, "disk", &files)?;
    for (key, name, unit) in [
        ("read_mb_s", "sequential 1 MiB read", "MB/s"),
        ("write_mb_s", "sequential 1 MiB write", "MB/s"),
        ("random_read_iops", "random 4 KiB read", "IOPS"),
        ("random_write_iops", "random 4 KiB write", "IOPS"),
    ] {
        table.add(name, unit, report::Better::Higher, measure::column(&disks, key)?);
    }
    let nets = measure::answers(options.runs, &compared, "net", &files)?;
    for (key, name) in [
        ("send_mbit_s", "TCP guest to host through TAP"),
        ("receive_mbit_s", "TCP host to guest"),
    ] {
        table.add(
            name,
            "Mbit/s",
            report::Better::Higher,
            measure::column(&nets, key)?,
        );
    }
    let guest = measure::alternate(options.runs, &[Vmm::Mirrorball], |vmm| {
        vmm::task(vmm, "compute", &files).and_then(|json| measure::number(&json, "compute_s"))
    })?;
    let host: Vec<f64> = (0..options.runs).map(|_| work::compute().as_secs_f64()).collect();
    table.add(
        "compute",
        "s",
        report::Better::Lower,
        vec![guest[0].clone(), Measurement::of("host", host)],
    );

    table.print();
    table.save(&options.out)?;
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
