//! Measures the host's memory that N guests which read the same disk take, under Mirrorball and QEMU.
//!
//! `bench-sharing stage FOLDER --kernel VMLINUX --initrd INITRD` makes the guests' files; they are to lie
//! where the host's page cache works for them. `bench-sharing measure FOLDER --mirrorball PATH --kinds LIST
//! --counts LIST --runs N --out FILE.json --machine TEXT` needs root, KVM and `qemu-system-x86_64`, and a
//! host with nothing else to do. `bench-sharing speed` with the same options (one guest at a time, so COUNTS
//! does not matter) times how fast guests read. `bench-sharing builds` with them compiles in VMs of the image
//! `debian-12`; its FOLDER holds the image's `root.raw`, and `bzip2.tar`. `bench-sharing clones` clones such
//! a VM, each of COUNTS at once.

mod builds;
mod clones;
mod guests;
mod host;
mod kinds;
mod measure;
mod plot;
mod speed;
mod stage;
mod table;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Options of `measure`.
pub struct Options {
    folder: PathBuf,
    mirrorball: PathBuf,
    kinds: Vec<kinds::Kind>,
    counts: Vec<usize>,
    runs: usize,
    out: PathBuf,
    machine: String,
}

fn run() -> Outcome<()> {
    let mut words = std::env::args().skip(1);
    let usage = "bench-sharing stage|measure|speed|builds|clones FOLDER --OPTION VALUE ...";
    let (task, folder) = words.next().zip(words.next()).ok_or(usage)?;
    let folder = PathBuf::from(folder);
    let mut values = HashMap::new();
    while let Some(word) = words.next() {
        let name = word.strip_prefix("--").ok_or(usage)?.to_owned();
        let value = words.next().ok_or_else(|| format!("--{name} wants a value"))?;
        values.insert(name, value);
    }
    let mut take = |name: &str| values.remove(name).ok_or_else(|| format!("--{name} is missing"));
    match task.as_str() {
        "stage" => stage::stage(&folder, take("kernel")?.as_ref(), take("initrd")?.as_ref()),
        "measure" | "speed" | "builds" | "clones" => {
            let options = Options {
                folder,
                mirrorball: take("mirrorball")?.into(),
                kinds: take("kinds")?
                    .split(',')
                    .map(str::parse)
                    .collect::<Result<_, _>>()?,
                counts: take("counts")?
                    .split(',')
                    .map(str::parse)
                    .collect::<Result<_, _>>()?,
                runs: take("runs")?.parse()?,
                out: take("out")?.into(),
                machine: take("machine")?,
            };
            match task.as_str() {
                "speed" => speed::speed(&options),
                "builds" => builds::builds(&options),
                "clones" => clones::clones(&options),
                _ => measure::measure(&options),
            }
        }
        _ => Err(usage.into()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-sharing: {error}");
            ExitCode::FAILURE
        }
    }
}
