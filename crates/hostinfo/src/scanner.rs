//! The kernel's scanner for equal pages of memory (KSM, *kernel samepage merging*): its state, its result,
//! and its CPU time.

use std::fs;
use std::path::Path;

use page::PAGE_BYTES;
use serde::Serialize;

/// File by which root starts and stops the scanner.
pub const RUN_FILE: &str = "/sys/kernel/mm/ksm/run";
const STATE: &str = "/sys/kernel/mm/ksm";
const PROC: &str = "/proc";
/// Name of the scanner's thread.
const THREAD: &str = "ksmd";
/// Fields of `/proc/PID/stat` after the name: the state is the third of the file.
const USER_TICKS: usize = 11;
const SYSTEM_TICKS: usize = 12;
/// Length of a clock tick of `/proc` on x86-64 (`USER_HZ`), ms.
const TICK_MS: u64 = 10;
/// Flags of a process are the ninth field of the file.
const FLAGS: usize = 6;
/// Flag of a thread of the kernel (`PF_KTHREAD`).
const OF_KERNEL: u64 = 0x0020_0000;

/// The scanner of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Scanner {
    /// Whether it looks for equal pages.
    pub is_running: bool,
    /// Memory that holds merged pages, bytes: each once.
    pub shared_bytes: u64,
    /// Memory that merging saves, bytes: further uses of those pages, by any process of the host.
    pub saved_bytes: u64,
    /// CPU time of the scanner's thread since the host started, ms; none if its thread is not visible.
    pub cpu_ms: Option<u64>,
}

impl Scanner {
    /// Reads the state of this host's scanner; none if its kernel has none.
    pub fn of_host() -> Option<Self> {
        Self::of(Path::new(STATE), Path::new(PROC))
    }

    /// Reads the state from the directories of the scanner and of all processes.
    fn of(state: &Path, processes: &Path) -> Option<Self> {
        let number = |name: &str| -> Option<u64> {
            let text = fs::read_to_string(state.join(name)).ok()?;
            text.trim().parse().ok()
        };
        let pages = |name| number(name).unwrap_or(0).saturating_mul(PAGE_BYTES);
        Some(Self {
            // 2 ends the scan, and separates the pages again.
            is_running: number("run")? == 1,
            shared_bytes: pages("pages_shared"),
            saved_bytes: pages("pages_sharing"),
            cpu_ms: cpu_ms(processes),
        })
    }
}

/// Returns the CPU time of the scanner's thread.
fn cpu_ms(processes: &Path) -> Option<u64> {
    let numbers = fs::read_dir(processes).ok()?.flatten();
    let numbers = numbers.filter(|entry| {
        let name = entry.file_name();
        name.as_encoded_bytes().iter().all(u8::is_ascii_digit)
    });
    numbers
        .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok())
        .find_map(|stat| thread_ticks(&stat))
        .map(|ticks| ticks.saturating_mul(TICK_MS))
}

/// Returns the CPU time of a process in clock ticks, if it is the scanner's thread. A program may have the
/// same name.
fn thread_ticks(stat: &str) -> Option<u64> {
    let (before, after) = stat.rsplit_once(") ")?;
    let (_, name) = before.split_once('(')?;
    let fields: Vec<&str> = after.split_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    if name != THREAD || number(FLAGS)? & OF_KERNEL == 0 {
        return None;
    }
    Some(number(USER_TICKS)?.saturating_add(number(SYSTEM_TICKS)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KSMD: &str = "38 (ksmd) S 2 0 0 0 -1 2138176 0 0 0 0 3 1250 0 0 25 5 1 0 94 0 0";
    /// A program of a user with the name of the scanner's thread.
    const OTHER: &str = "77 (ksmd) S 1 0 0 0 -1 4194304 0 0 0 0 900 900 0 0 25 5 1 0 94 0 0";

    #[test]
    fn cpu_time_is_that_of_the_kernels_thread() {
        assert_eq!(thread_ticks(KSMD), Some(1253));
        assert_eq!(thread_ticks(OTHER), None);
        assert_eq!(thread_ticks(&KSMD.replace("ksmd", "ksm) S")), None);
        assert_eq!(thread_ticks("38 (ksmd) S 2"), None);
        assert_eq!(thread_ticks(""), None);
    }

    #[test]
    fn state_is_read_from_the_kernels_files() {
        let (state, processes) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let of = || Scanner::of(state.path(), processes.path());
        assert_eq!(of(), None, "a kernel without a scanner");
        for (name, text) in [("run", "1\n"), ("pages_shared", "3\n"), ("pages_sharing", "10\n")] {
            fs::write(state.path().join(name), text).unwrap();
        }
        for (pid, stat) in [("77", OTHER), ("38", KSMD), ("self", "")] {
            fs::create_dir(processes.path().join(pid)).unwrap();
            fs::write(processes.path().join(pid).join("stat"), stat).unwrap();
        }
        let scanner = of().unwrap();
        assert!(scanner.is_running);
        assert_eq!((scanner.shared_bytes, scanner.saved_bytes), (3 * 4096, 10 * 4096));
        assert_eq!(scanner.cpu_ms, Some(12_530));
        fs::write(state.path().join("run"), "2\n").unwrap();
        assert!(!of().unwrap().is_running, "separating pages is no scan");
    }

    #[test]
    fn scanner_of_this_host_can_be_read() {
        assert_eq!(Scanner::of_host().is_some(), Path::new(RUN_FILE).exists());
    }
}
