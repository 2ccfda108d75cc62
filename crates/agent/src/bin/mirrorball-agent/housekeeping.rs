//! Keeps the kernel's own work on the home's CPUs: its threads without a fixed CPU, unbound work, devices'
//! interrupts, and the program that handles the kernel's events of devices. Where each node's memory is
//! another host's, a grace period or a timer that runs on another node fetches every page that it uses, and
//! takes it from the programs at home. Programs run on any CPU.

use std::fs;

use agent::server::affinity;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Flags in `/proc/PID/stat` (`PF_KTHREAD`, `PF_NO_SETAFFINITY` in Linux's `include/linux/sched.h`): a thread
/// of the kernel; a thread with a fixed CPU.
const KERNEL_THREAD: u64 = 0x0020_0000;
const BOUND: u64 = 0x0400_0000;

/// The node of the home, on which the kernel boots.
const HOME: &str = "/sys/devices/system/node/node0";

/// The program that receives an event for each device, including each CPU that comes online. The rules that
/// it reads then are megabytes.
const DEVICES: &str = "systemd-udevd";

/// Returns the home's CPUs; none if there is no such node.
pub fn home() -> Option<CpuSet> {
    set(&numbers(HOME, "cpu").collect::<Vec<_>>())
}

/// Keeps all of that work on the CPUs of node 0, online or not. It should be called before other CPUs come
/// online: existing work has to be moved otherwise. Work that can't be kept there is left to the kernel.
pub fn stay_at_home() {
    let Some(home) = home() else {
        return;
    };
    // The host reaches the agent through a device, whose driver runs there too.
    let _ = affinity::keep_to(&home);
    let mask = mask(&numbers(HOME, "cpu").collect::<Vec<_>>());
    let _ = fs::write("/sys/devices/virtual/workqueue/cpumask", &mask);
    let _ = fs::write("/proc/irq/default_smp_affinity", &mask);
    for number in numbers("/proc/irq", "") {
        // The kernel refuses this for interrupts that it spreads over the CPUs itself, such as queues'.
        let _ = fs::write(format!("/proc/irq/{number}/smp_affinity"), &mask);
    }
    for thread in threads().filter(|thread| stays(*thread)) {
        let _ = sched_setaffinity(Pid::from_raw(thread as i32), &home);
    }
}

/// Returns all threads: those of programs and of the kernel.
pub fn threads() -> impl Iterator<Item = usize> {
    let processes = numbers("/proc", "");
    processes.flat_map(|process| numbers(&format!("/proc/{process}/task"), "").collect::<Vec<_>>())
}

/// Returns the numbers in a directory's entries whose names are `before` and a number.
fn numbers(folder: &str, before: &str) -> impl Iterator<Item = usize> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(move |entry| entry.file_name().to_str()?.strip_prefix(before)?.parse().ok())
}

/// Returns whether the thread stays at home: a thread of the kernel without a fixed CPU, or the program of
/// devices.
fn stays(thread: usize) -> bool {
    let stat = fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
    let name = fs::read_to_string(format!("/proc/{thread}/comm")).unwrap_or_default();
    name.trim_end() == DEVICES
        || flags(&stat).is_some_and(|flags| flags & (KERNEL_THREAD | BOUND) == KERNEL_THREAD)
}

fn flags(stat: &str) -> Option<u64> {
    number(stat, 9)
}

/// Returns a numbered field, after the second, of a line of `/proc/PID/stat` (proc_pid_stat(5)). The second
/// field is the name in parentheses, with any characters.
pub fn number(stat: &str, field: usize) -> Option<u64> {
    let (_, after) = stat.rsplit_once(')')?;
    let words = after.split_ascii_whitespace();
    words.zip(3..).find(|(_, at)| *at == field)?.0.parse().ok()
}

/// Returns the CPUs in the system call's format; none if there are none.
fn set(cpus: &[usize]) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu).ok()?;
    }
    (!cpus.is_empty()).then_some(set)
}

/// Returns the CPUs in the kernel's text format: words of 32 bits in hexadecimal, the highest first.
fn mask(cpus: &[usize]) -> String {
    let words = cpus.iter().max().map_or(1, |last| last / 32 + 1);
    let word = |number: usize| -> u32 {
        let here = cpus.iter().filter(|cpu| **cpu / 32 == number);
        here.fold(0, |word, cpu| word | 1 << (cpu % 32))
    };
    let words: Vec<String> = (0..words)
        .rev()
        .map(|number| format!("{:08x}", word(number)))
        .collect();
    words.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_and_masks_match_the_kernels_format() {
        assert_eq!(mask(&[0, 1, 5]), "00000023");
        assert_eq!(mask(&[0, 33]), "00000002,00000001");
        let some = set(&[0, 5]).expect("a set");
        assert_eq!(some.is_set(5), Ok(true));
        assert_eq!(some.is_set(1), Ok(false));
        assert_eq!(set(&[]), None);
        assert_eq!(set(&[CpuSet::count()]), None);
    }

    #[test]
    fn threads_of_the_kernel_are_recognized_by_their_flags() {
        let stat = "16 (rcu) x (y) I 2 0 0 0 -1 2129984 0 0";
        assert_eq!(flags(stat), Some(0x0020_8040));
        assert_eq!(flags("16 (sh"), None);
        assert_eq!(number(stat, 3), None, "a letter");
        assert_eq!(number(stat, 4), Some(2));
        assert_eq!(number(stat, 11), Some(0));
        assert_eq!(number(stat, 12), None);
        // This process is a program.
        assert!(!stays(std::process::id() as usize));
    }

    #[test]
    fn numbers_of_a_folder_are_found_after_their_name() {
        let folder = tempfile::tempdir().expect("a directory");
        for name in ["cpu0", "cpu12", "cpulist", "7", "meminfo"] {
            fs::write(folder.path().join(name), "").expect("a file");
        }
        let place = folder.path().to_str().expect("a path");
        let mut found: Vec<_> = numbers(place, "cpu").collect();
        found.sort_unstable();
        assert_eq!(found, [0, 12]);
        assert_eq!(numbers(place, "").collect::<Vec<_>>(), [7]);
    }
}
