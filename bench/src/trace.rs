//! The time of KVM's first entry to a guest, from the host kernel's own trace, and KVM's counts of a VM.
//! Needs root, and that no other VM runs.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use crate::Outcome;

const TRACING: &str = "/sys/kernel/debug/tracing";
const VMS: &str = "/sys/kernel/debug/kvm";
/// Time limit until the guest's first entry shows up after the guest's first output.
const SHOWN: Duration = Duration::from_secs(5);

/// The processor's time-stamp counter.
pub fn tsc() -> u64 {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Waits, on a thread of its own, for the first entry to any guest.
pub struct FirstEntry {
    seen: mpsc::Receiver<u64>,
}

impl FirstEntry {
    /// Starts to watch.
    pub fn watch() -> Outcome<Self> {
        put("trace_clock", "x86-tsc")?;
        put("trace", "")?;
        let pipe = File::open(Path::new(TRACING).join("trace_pipe"))?;
        put("events/kvm/kvm_entry/enable", "1")?;
        let (sender, seen) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            // Without a line the receiver times out and reports that.
            if BufReader::new(pipe).read_line(&mut line).is_ok() {
                let _ = put("events/kvm/kvm_entry/enable", "0");
                if let Some(time) = timestamp(&line) {
                    let _ = sender.send(time);
                }
            }
        });
        Ok(Self { seen })
    }

    /// The time-stamp counter at the first entry.
    pub fn tsc(self) -> Outcome<u64> {
        let seen = self.seen.recv_timeout(SHOWN);
        seen.map_err(|_| "the kernel traced no entry to a guest".into())
    }
}

/// The time of a line like `vcpu0-123  [001] d..1. 456789: kvm_entry: vcpu 0, rip 0xfff0`.
fn timestamp(line: &str) -> Option<u64> {
    let (before, _) = line.split_once(": kvm_entry")?;
    before.split_whitespace().last()?.parse().ok()
}

fn put(file: &str, value: &str) -> Outcome<()> {
    let file = Path::new(TRACING).join(file);
    fs::write(&file, value).map_err(|error| format!("{}: {error}", file.display()).into())
}

/// KVM's counters of one VM.
pub struct VmCounts {
    folder: PathBuf,
}

impl VmCounts {
    /// Finds the only VM of these processes. The kernel names the folder of a VM by the process that made it,
    /// and by its descriptor there.
    pub fn find(pids: &[u32]) -> Outcome<Self> {
        let is_theirs = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            let pid = name.and_then(|name| name.split_once('-')?.0.parse().ok());
            pid.is_some_and(|pid| pids.contains(&pid))
        };
        let vms: Vec<_> = fs::read_dir(VMS)?
            .flatten()
            .map(|entry| entry.path())
            .filter(is_theirs)
            .collect();
        match <[PathBuf; 1]>::try_from(vms) {
            Ok([folder]) => Ok(Self { folder }),
            Err(vms) => Err(format!("the guest's processes have {} VMs, not one", vms.len()).into()),
        }
    }

    /// One of KVM's counters.
    pub fn count(&self, name: &str) -> Outcome<i64> {
        let file = self.folder.join(name);
        let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(text.trim().parse()?)
    }
}
