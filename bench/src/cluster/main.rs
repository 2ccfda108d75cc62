//! Cells that lend each other memory and CPUs, beside a VM that needs no loan, and beside fixed partitions.
//! `bench-cluster --what borrowing|sharing --mirrorball PATH --folder NEW --out FILE.json --machine TEXT
//! [--runs N] [--seconds N] [--paging-folder PATH]`.
//!
//! `borrowing` times random reads and updates in a VM, all of whose memory is its cell's, and in one that has
//! three quarters of it from three other cells (Cellular Disco, SOSP '99, section 5.2). `sharing` runs two
//! programs in one VM, in two cells that lend each other memory and CPUs, and in two that don't (section 7,
//! Table 13). The guest is the image `tiny`. It needs KVM, and that no other VM runs; `borrowing` takes four
//! nodes and `sharing` two CPUs.

mod borrowing;
mod cpu_use;
mod sharing;
mod size;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use bench::Outcome;
use bench::mirrorball::Mirrorball;
use bench::options::Options;
use bench::tiny_vm::{TinyVm, copy_program};

const USAGE: &str = "bench-cluster --what borrowing|sharing --mirrorball PATH --folder NEW --out FILE.json \
                     --machine TEXT [--runs N] [--seconds N] [--paging-folder PATH]";
const GUEST: &str = "bench-cluster-guest";

/// Programs of all runs.
pub struct Bench {
    mirrorball: Mirrorball,
    /// The program to copy into guests.
    guest: std::path::PathBuf,
}

impl Bench {
    /// Writes a cluster file; returns its path.
    fn cluster_file(&self, text: &str) -> Outcome<String> {
        let file = self.mirrorball.folder().join("cluster.toml");
        fs::write(&file, text)?;
        Ok(file.to_str().ok_or("a folder whose name is no text")?.to_owned())
    }

    /// Starts a VM with the guest's program.
    fn vm(&self, name: &'static str, words: &[&str]) -> Outcome<TinyVm<'_>> {
        TinyVm::start(&self.mirrorball, name, words, &self.guest)
    }
}

/// Takes a measurement. In emulation a nested guest dies occasionally, under any VMM. The measurement is then
/// repeated, with a message.
fn twice<T>(what: &str, take: impl Fn() -> Outcome<T>) -> Outcome<T> {
    take().or_else(|error| {
        eprintln!("bench-cluster: {what} failed and is repeated: {error}");
        take()
    })
}

fn run() -> Outcome<()> {
    let options = Options::of_process(USAGE)?;
    let number = |name: &str, default: usize| -> Outcome<usize> {
        Ok(options.get(name).map_or(Ok(default), str::parse)?)
    };
    let (runs, seconds) = (number("runs", 2)?, number("seconds", 15)?);
    let (out, machine) = (options.needed("out")?, options.needed("machine")?);
    let [folder, program] = [options.needed("folder")?, options.needed("mirrorball")?].map(Path::new);
    let mirrorball = Mirrorball::new(folder, program)?;
    let guest = copy_program(&mirrorball, GUEST)?;
    let bench = Bench { mirrorball, guest };
    let write = |report: String| -> Outcome<()> { Ok(fs::write(out, report + "\n")?) };
    match options.needed("what")? {
        "borrowing" => borrowing::measure(&bench, machine, runs, seconds, write),
        "sharing" => {
            let paging = Path::new(options.get("paging-folder").unwrap_or("/var/tmp"));
            sharing::measure(&bench, machine, runs, seconds, paging, write)
        }
        other => Err(format!("--what {other}: {USAGE}").into()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-cluster: {error}");
            ExitCode::FAILURE
        }
    }
}
