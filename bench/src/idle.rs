//! One idle guest: the parts of its start's time, the number of its exits to the host, and its monitor's
//! memory.

use std::time::Duration;

use bench::guest_files::GuestFiles;

use crate::measure::number;
use crate::trace::{FirstEntry, VmCounts, tsc};
use crate::vmm::{FIRST, Vmm};
use crate::{Outcome, memory};

/// Time for which a guest is left alone before its monitor's memory is counted.
const SETTLE: Duration = Duration::from_secs(2);

/// Figures of one guest; times in seconds.
pub struct Sample {
    /// From the start of the program to KVM's first entry to the guest.
    pub host: f64,
    /// From there to the start of the guest kernel's clock: firmware, and the kernel's first steps.
    pub early: f64,
    /// From there to the first instructions of the first user process.
    pub kernel: f64,
    /// From there until the caller has its first line.
    pub output: f64,
    /// Exits from the guest until it idled.
    pub exits: f64,
    /// Those that went on to user space for a port or a device register.
    pub device_exits: f64,
    /// Memory beyond the guest's, in MiB.
    pub overhead_mib: f64,
}

/// Starts a guest, lets it idle, takes its figures, ends it.
pub fn sample(vmm: Vmm, files: &GuestFiles) -> Outcome<Sample> {
    let entry = FirstEntry::watch()?;
    let started = tsc();
    let mut guest = vmm.start("idle", files)?;
    guest.wait_for(FIRST)?;
    let (first_line, told) = (tsc(), guest.age());
    let (json, _) = guest.wait_for("BENCH ")?;
    let json: serde_json::Value = serde_json::from_str(&json)?;
    let entered = entry.tsc()?;
    let counts = VmCounts::find(&memory::family(guest.child.id())?)?;
    let offset = counts.count("vcpu0/tsc-offset")?;
    let first_process = (number(&json, "tsc")? as u64).wrapping_sub(offset as u64);
    // Time stamp ticks in a second, by this host's clock over the whole start.
    let rate = (first_line - started) as f64 / told.as_secs_f64();
    let seconds = |from: u64, to: u64| to.wrapping_sub(from) as i64 as f64 / rate;
    let kernel = number(&json, "clock_s")?;
    let exits = counts.count("exits")? as f64;
    let device_exits = (counts.count("io_exits")? + counts.count("mmio_exits")?) as f64;
    std::thread::sleep(SETTLE);
    let sample = Sample {
        host: seconds(started, entered),
        early: seconds(entered, first_process) - kernel,
        kernel,
        output: seconds(first_process, first_line),
        exits,
        device_exits,
        overhead_mib: memory::overhead_mib(vmm, &guest)?,
    };
    eprintln!(
        "bench: {} idle: host {:.3} s, early {:.3} s, kernel {:.3} s, line {:.3} s; {} exits, \
         {} for devices; {:.2} MiB",
        vmm.name(),
        sample.host,
        sample.early,
        sample.kernel,
        sample.output,
        sample.exits,
        sample.device_exits,
        sample.overhead_mib
    );
    Ok(sample)
}
