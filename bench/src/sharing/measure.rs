//! One sample: the host before, the guests, the host with them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::guests::Guests;
use crate::kinds::Kind;
use crate::table::Table;
use crate::{Options, Outcome, host, stage};

/// Cost of guests of one kind, in MB (10^6 bytes) and seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// Drop of the host's free memory.
    pub drop_mb: f64,
    /// The same after it dropped clean page cache that no process maps.
    pub kept_mb: f64,
    /// The proportional set sizes of all processes.
    pub pss_mb: f64,
    /// CPU time of all processes, the guests' boot and reading included.
    pub cpu_s: f64,
    /// CPU time of KSM's thread.
    pub ksm_cpu_s: Option<f64>,
    /// The slowest guest's reading.
    pub read_s: f64,
    /// From the command to when all clones run, seconds.
    pub clone_s: Option<f64>,
    /// The pause of the parent for it, milliseconds.
    pub pause_ms: Option<f64>,
    /// Figures of the first of Mirrorball's VMs on sharing.
    pub sharing: Option<serde_json::Value>,
}

/// Measures everything, prints the table, writes the JSON. A kind that fails is marked in the table, and
/// reported at the end.
pub fn measure(options: &Options) -> Outcome<()> {
    let runtime = Runtime::new()?;
    let mut table = Table::new(&options.machine, &options.counts);
    let mut failures = Vec::new();
    for kind in &options.kinds {
        for count in &options.counts {
            let mut samples = Vec::new();
            for _ in 0..options.runs {
                match sample(kind, *count, options, &runtime.folder) {
                    Ok(sample) => samples.push(sample),
                    Err(error) => {
                        failures.push(format!("{} of {}: {error}", count, kind.name()));
                        break;
                    }
                }
            }
            table.add(&kind.name(), *count, samples);
            // All of it takes long; results so far are kept if it is interrupted.
            table.save(&options.out)?;
        }
    }
    table.print();
    match failures.as_slice() {
        [] => Ok(()),
        failures => Err(format!("not measured: {}", failures.join("; ")).into()),
    }
}

fn sample(kind: &Kind, count: usize, options: &Options, runtime: &Path) -> Outcome<Sample> {
    host::drop_caches(true)?;
    let before = host::settle(Duration::from_secs(3), Duration::from_secs(30))?;
    let ksm = match kind {
        Kind::QemuKsm => Some(host::Ksm::start()?),
        _ => None,
    };
    let files = stage::files(&options.folder);
    let clones = if *kind == Kind::MirrorballClones {
        count - 1
    } else {
        0
    };
    let mut guests = Guests::start(kind, count - clones, &files, &options.mirrorball, runtime, "")?;
    let read_s = guests.wait()?.iter().map(|read| read.first_s).fold(0.0, f64::max);
    let ksm_cpu_s = ksm.as_ref().map(host::Ksm::converge).transpose()?;
    let sharing = guests.share()?;
    let made = if clones > 0 {
        Some(guests.clone_first(clones)?)
    } else {
        None
    };
    let with = host::settle(Duration::from_secs(5), Duration::from_secs(60))?;
    let processes = guests.processes()?;
    let pss = host::proportional_bytes(&processes)?;
    let cpu_s = host::cpu_s(&processes)?;
    host::drop_caches(false)?;
    let kept = host::settle(Duration::from_secs(2), Duration::from_secs(20))?;
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let sample = Sample {
        drop_mb: mb(before.saturating_sub(with)),
        kept_mb: mb(before.saturating_sub(kept)),
        pss_mb: mb(pss),
        cpu_s,
        ksm_cpu_s,
        read_s,
        clone_s: made.map(|made| made.0),
        pause_ms: made.map(|made| made.1),
        sharing,
    };
    eprintln!(
        "bench-sharing: {count} x {}: {:.0} MB less free, {:.0} kept, {:.0} PSS, {:.1} s of CPU, \
         read in {:.1} s",
        kind.name(),
        sample.drop_mb,
        sample.kept_mb,
        sample.pss_mb,
        sample.cpu_s + ksm_cpu_s.unwrap_or(0.0),
        sample.read_s
    );
    if let Some((seconds, pause_ms)) = made {
        eprintln!(
            "bench-sharing: {clones} clones ran after {seconds:.2} s; \
             their parent stood still for {pause_ms} ms"
        );
    }
    if let Some(sharing) = &sample.sharing {
        eprintln!("bench-sharing: its sharing: {sharing}");
    }
    Ok(sample)
}

/// A folder in memory for consoles. Removed when dropped.
pub struct Runtime {
    /// Path of the folder, below `/dev/shm`.
    pub folder: PathBuf,
}

impl Runtime {
    /// Creates a folder that has this process's id in its name.
    pub fn new() -> Outcome<Self> {
        let folder = PathBuf::from(format!("/dev/shm/bench-sharing-{}", std::process::id()));
        fs::create_dir(&folder)?;
        Ok(Self { folder })
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
