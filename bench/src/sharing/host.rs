//! Figures of the host's kernel: memory, processes, KSM.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::Outcome;

const KSM: &str = "/sys/kernel/mm/ksm";
/// Time limit until KSM has found everything.
const KSM_LIMIT: Duration = Duration::from_secs(240);
const TICKS_PER_SECOND: f64 = 100.0;

/// `MemFree`, in bytes. `MemAvailable` would count mapped pages of files as free.
pub fn free_bytes() -> Outcome<u64> {
    kib(&fs::read_to_string("/proc/meminfo")?, "MemFree:")
}

fn kib(text: &str, field: &str) -> Outcome<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(field));
    let rest = rest.ok_or_else(|| format!("no {field}"))?;
    Ok(rest.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}

/// Drops clean page cache that no process maps, and with `objects` the kernel's cached objects.
pub fn drop_caches(objects: bool) -> Outcome<()> {
    Ok(fs::write(
        "/proc/sys/vm/drop_caches",
        if objects { "3" } else { "1" },
    )?)
}

/// Waits until free memory has stayed within 2 MB for `calm`; the last figure.
pub fn settle(calm: Duration, limit: Duration) -> Outcome<u64> {
    const STEP: Duration = Duration::from_secs(1);
    const MOVE_BYTES: u64 = 2_000_000;
    let deadline = Instant::now() + limit;
    let (mut reference, mut since) = (free_bytes()?, Instant::now());
    loop {
        std::thread::sleep(STEP);
        let now = free_bytes()?;
        if now.abs_diff(reference) > MOVE_BYTES {
            (reference, since) = (now, Instant::now());
        }
        if since.elapsed() >= calm {
            return Ok(now);
        }
        if Instant::now() > deadline {
            eprintln!("bench-sharing: free memory still moves after {limit:?}");
            return Ok(now);
        }
    }
}

/// A process and all its descendants.
pub fn family(root: u32) -> Vec<u32> {
    let mut family = vec![root];
    let mut at = 0;
    while at < family.len() {
        let threads = fs::read_dir(format!("/proc/{}/task", family[at]));
        for thread in threads.into_iter().flatten().flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            family.extend(
                children
                    .split_whitespace()
                    .filter_map(|word| word.parse::<u32>().ok()),
            );
        }
        at += 1;
    }
    family
}

/// The proportional set size of processes, in bytes.
pub fn proportional_bytes(pids: &[u32]) -> Outcome<u64> {
    pids.iter()
        .map(|pid| kib(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?, "Pss:"))
        .sum()
}

/// CPU time of processes, in seconds.
pub fn cpu_s(pids: &[u32]) -> Outcome<f64> {
    let mut ticks = 0;
    for pid in pids {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let (_, rest) = stat.rsplit_once(") ").ok_or("no command in stat")?;
        let words = rest.split(' ').skip(11).take(2);
        ticks += words.map(str::parse::<u64>).sum::<Result<u64, _>>()?;
    }
    Ok(ticks as f64 / TICKS_PER_SECOND)
}

/// CPU time so far of each thread that shares memory for a running VM, nanoseconds, by its number.
pub fn sharing_ns() -> BTreeMap<u32, u64> {
    let tasks = |process: fs::DirEntry| {
        fs::read_dir(process.path().join("task"))
            .into_iter()
            .flatten()
            .flatten()
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let used = |task: fs::DirEntry| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        let number = task.file_name().to_str()?.parse().ok()?;
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        (name.trim() == "sharing").then_some((number, text.split(' ').next()?.parse().ok()?))
    };
    // A thread that ends meanwhile has been counted before.
    processes.flat_map(tasks).filter_map(used).collect()
}

/// Lets KSM run from now until this is dropped.
pub struct Ksm {
    thread: u32,
    started_cpu_s: f64,
}

impl Ksm {
    /// Starts it, at a pace that lets it reach the end.
    pub fn start() -> Outcome<Self> {
        let thread = kernel_thread("ksmd").ok_or("this host has no KSM")?;
        fs::write(format!("{KSM}/pages_to_scan"), "2000")?;
        fs::write(format!("{KSM}/sleep_millisecs"), "20")?;
        let started_cpu_s = cpu_s(&[thread])?;
        fs::write(format!("{KSM}/run"), "1")?;
        Ok(Self {
            thread,
            started_cpu_s,
        })
    }

    /// Waits until a whole scan has found less than 1% more; returns the CPU time so far.
    pub fn converge(&self) -> Outcome<f64> {
        let number =
            |name: &str| -> Outcome<u64> { Ok(fs::read_to_string(format!("{KSM}/{name}"))?.trim().parse()?) };
        let deadline = Instant::now() + KSM_LIMIT;
        let (mut scans, mut sharing) = (number("full_scans")?, 0);
        loop {
            std::thread::sleep(Duration::from_secs(1));
            // A page is merged in the second scan that finds it unchanged.
            if number("full_scans")? >= scans + 2 {
                let now = number("pages_sharing")?;
                if now > 0 && now.abs_diff(sharing) * 100 < now {
                    break;
                }
                (scans, sharing) = (number("full_scans")?, now);
            }
            if Instant::now() > deadline {
                eprintln!("bench-sharing: KSM has not converged after {KSM_LIMIT:?}");
                break;
            }
        }
        Ok(cpu_s(&[self.thread])? - self.started_cpu_s)
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        let _ = fs::write(format!("{KSM}/run"), "0");
    }
}

fn kernel_thread(name: &str) -> Option<u32> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes
        .filter(|entry| is_named(&entry.path(), name))
        .find_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn is_named(process: &Path, name: &str) -> bool {
    fs::read_to_string(process.join("comm")).is_ok_and(|comm| comm.trim() == name)
}

/// Calls `mount`.
pub fn mount(words: &[&str]) -> Outcome<()> {
    let output = Command::new("mount").args(words).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "mount {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    )
    .into())
}

/// Lets programs ask for huge pages in memory files, as most hosts do not by themselves.
pub fn allow_huge_memory_files() -> Outcome<()> {
    fs::write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "advise")?;
    Ok(())
}
