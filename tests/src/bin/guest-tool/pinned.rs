//! Work pinned to each CPU at the same time, with one result that must be the same everywhere.

use std::sync::atomic::AtomicU32;
use std::thread;

use guest_tests::pattern::mix;
use nix::sched::{CpuSet, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

use crate::Fault;

const ROUNDS: u64 = 200_000;
const WAIT: i32 = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
const WAKE: i32 = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;

/// Runs one thread on each of the CPUs 0 to `cpus` - 1. Returns the CPUs in order.
pub fn work_on_each(cpus: usize) -> Result<String, Fault> {
    let threads: Vec<_> = (0..cpus).map(|cpu| thread::spawn(move || work_on(cpu))).collect();
    let wanted = compute();
    for (cpu, thread) in threads.into_iter().enumerate() {
        let result = thread
            .join()
            .map_err(|_| format!("the thread of CPU {cpu} panicked"))??;
        if result != wanted {
            return Err(format!("CPU {cpu} computed {result:#x} instead of {wanted:#x}").into());
        }
    }
    let names: Vec<String> = (0..cpus).map(|cpu| cpu.to_string()).collect();
    Ok(names.join(" "))
}

fn work_on(cpu: usize) -> Result<u64, String> {
    pin(cpu)?;
    let result = compute();
    match sched_getcpu() {
        Ok(at) if at == cpu => Ok(result),
        other => Err(format!("pinned to CPU {cpu}, but ran on {other:?}")),
    }
}

fn compute() -> u64 {
    (0..ROUNDS).fold(1, |sum, round| mix(sum ^ round))
}

/// Keeps this thread to one CPU.
pub fn pin(cpu: usize) -> Result<(), String> {
    let mut set = CpuSet::new();
    set.set(cpu).map_err(|error| format!("CPU {cpu}: {error}"))?;
    sched_setaffinity(Pid::from_raw(0), &set).map_err(|error| format!("pinning to CPU {cpu}: {error}"))
}

/// Sleeps while `word` has this value, until it is woken, or a signal was handled.
pub fn sleep_while(word: &AtomicU32, value: u32) {
    let none = std::ptr::null::<libc::timespec>();
    // SAFETY: the kernel reads the word, which outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), WAIT, value, none) };
}

/// Wakes the threads that sleep on `word`. Signal handlers may call it.
pub fn wake(word: &AtomicU32) {
    // SAFETY: names an address; nothing there is read or written.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), WAKE, i32::MAX) };
}

/// Ends this process by a signal after `seconds`: by then a thread waits without success.
pub fn alarm_after(seconds: u64) {
    nix::unistd::alarm::set(seconds as u32);
}
