//! The guest's task `paging`: stressMem, and how many pages the guest swapped meanwhile.

use std::fs;
use std::io::{self, Error};

use bench::kernel_file::{field, swapped_pages};
use bench::stress_memory::StressMemory;
use serde_json::json;

/// The disk to which a guest swaps.
const DISK: &str = "vda";

/// Waits for a line from the console.
pub fn wait_for_line() -> io::Result<()> {
    if io::stdin().read_line(&mut String::new())? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}

/// Prints that the guest is ready, with its available memory. Runs all loops after a line from the console,
/// and returns their times and the swapped pages as JSON.
pub fn run(cmdline: &str) -> io::Result<String> {
    let number = |name: &str| -> io::Result<usize> {
        let value = cmdline
            .split_whitespace()
            .find_map(|word| word.strip_prefix(name));
        let value = value.ok_or_else(|| Error::other(format!("no {name} in {cmdline}")))?;
        value
            .parse()
            .map_err(|error| Error::other(format!("{name}{value}: {error}")))
    };
    let (mib, loops) = (number("bench.mib=")?, number("bench.loops=")?);
    let mut disk = String::new();
    if cmdline.split_whitespace().any(|word| word == "bench.swap") {
        crate::wait_for_disk()?;
        let device = format!("/dev/{DISK}");
        crate::busybox("mkswap", &[&device])?;
        crate::busybox("swapon", &[&device])?;
        fs::read_to_string(format!("/sys/block/{DISK}/serial"))?
            .trim()
            .clone_into(&mut disk);
    }
    let mut memory = StressMemory::new(mib << 20, loops);
    let available_kib = field("/proc/meminfo", "MemAvailable:")?;
    println!(
        "BENCH ready {}",
        json!({ "available_bytes": available_kib << 10, "disk": disk })
    );
    wait_for_line()?;
    let before = swapped_pages()?;
    let times = memory.run().map_err(Error::other)?;
    let [read, written] = swapped_pages()?;
    let seconds: Vec<f64> = times.iter().map(std::time::Duration::as_secs_f64).collect();
    let answer = json!({
        "loops_s": seconds,
        "swapped_in_pages": read - before[0],
        "swapped_out_pages": written - before[1],
    });
    Ok(answer.to_string())
}
