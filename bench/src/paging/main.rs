//! The program stressMem (Cellular Disco, SOSP '99, section 6) in a guest of which half can be in the host's
//! memory: paged by Mirrorball, without and with the virtual paging disk, and by the host's swap under QEMU.
//! `bench-paging --mirrorball PATH --kernel VMLINUX --initrd INITRD --folder DIR --out FILE.json --machine
//! TEXT [--runs N] [--resident-mib N] [--memory-mib N] [--array-mib N] [--kinds LIST] [--add RECORD]`.
//!
//! With `--add` the runs are added to those of an earlier record, so that one kind can be repeated alone. All
//! kinds run in turn, `runs` times. The paging file, the guest's disk and the host's swap are files in
//! the folder. Needs root, for control groups and swap, KVM and `qemu-system-x86_64`.

mod control_group;
mod kinds;
mod mirrorball;
mod qemu;
mod report;
mod sample;
mod swap_file;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bench::Outcome;
use bench::guest_files::GuestFiles;
use bench::options::Options;

use kinds::{Kind, Sizes};
use report::Report;
use sample::{Run, take};
use serde_json::Value;

/// Files of a run, and its sizes.
pub struct Environment {
    /// Programs, kernel and initramfs.
    pub files: GuestFiles,
    /// Directory of paging file, disk and swap file. Removed at the end.
    pub folder: PathBuf,
    /// Sizes of the VMs.
    pub sizes: Sizes,
}

impl Environment {
    fn new(options: &Options) -> Outcome<Self> {
        let [mirrorball, kernel, initrd, folder] = [
            options.needed("mirrorball")?,
            options.needed("kernel")?,
            options.needed("initrd")?,
            options.needed("folder")?,
        ]
        .map(Path::new);
        let number = |name: &str, default: u64| options.get(name).map_or(Ok(default), str::parse);
        let resident_mib = number("resident-mib", 128)?;
        let memory_mib = number("memory-mib", 2 * resident_mib)?;
        let array_mib = number("array-mib", memory_mib)?;
        let folder = folder.join(format!("bench-paging-{}", std::process::id()));
        fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let environment = |files| Self {
            files,
            sizes: Sizes {
                resident_mib,
                memory_mib,
                array_mib,
            },
            folder: folder.clone(),
        };
        let staged = GuestFiles::stage(mirrorball, kernel, initrd).map(environment);
        staged.inspect_err(|_| drop(fs::remove_dir(&folder)))
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn run() -> Outcome<()> {
    let options = Options::of_process(
        "bench-paging --mirrorball PATH --kernel VMLINUX --initrd INITRD --folder DIR --out FILE.json \
         --machine TEXT [--runs N] [--resident-mib N] [--memory-mib N] [--array-mib N] [--kinds LIST] \
         [--add RECORD]",
    )?;
    let runs: usize = options.get("runs").unwrap_or("3").parse()?;
    let kinds = options
        .get("kinds")
        .map_or(Ok(Kind::ALL.to_vec()), Kind::of_list)?;
    let (out, machine) = (options.needed("out")?, options.needed("machine")?);
    let earlier = options.get("add").map(record).transpose()?;
    let environment = Environment::new(&options)?;
    let report = |all: &_| Report::of(machine, environment.sizes, all, earlier.as_ref());
    // Sizes that differ are refused before the first run.
    report(&Kind::ALL.map(|_| Vec::new()))?;
    let mut all = Kind::ALL.map(|_| Vec::new());
    for run in 1..=runs {
        for (place, kind) in Kind::ALL.into_iter().enumerate() {
            if !kinds.contains(&kind) {
                continue;
            }
            let taken = sample(&environment, kind)?;
            eprintln!("bench-paging: run {run} of {runs}, {}: {taken:?}", kind.name());
            all[place].push(taken);
            // Finished runs are saved, should a later one fail.
            fs::write(out, serde_json::to_string_pretty(&report(&all)?)? + "\n")?;
        }
    }
    print!("{}", report(&all)?.markdown()?);
    Ok(())
}

/// Reads the record of earlier runs.
fn record(file: &str) -> Outcome<Value> {
    let wrong = |error: String| format!("--add: {file}: {error}");
    let text = fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    Ok(serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?)
}

/// Takes a sample. In emulation a nested guest dies occasionally, under any VMM. The sample is then taken
/// again, with a message.
fn sample(environment: &Environment, kind: Kind) -> Outcome<Run> {
    take(environment, kind).or_else(|error| {
        eprintln!("bench-paging: {} failed and is repeated: {error}", kind.name());
        take(environment, kind)
    })
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-paging: {error}");
            ExitCode::FAILURE
        }
    }
}
