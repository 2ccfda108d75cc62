//! Threads on CPUs of their own.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::Outcome;

/// Keeps the calling thread, and its later children, on a CPU.
///
/// # Errors
/// If there is no such CPU, or this process may not use it.
pub fn pin(cpu: usize) -> Outcome<()> {
    let mut one = CpuSet::new();
    one.set(cpu)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &one)?)
}

/// Two CPUs that this process may use: the first ones.
///
/// # Errors
/// If it may use one CPU only.
pub fn two() -> Outcome<(usize, usize)> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    let mut cpus = (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false));
    let pair = cpus.next().zip(cpus.next());
    Ok(pair.ok_or("this bench takes two CPUs, and this process may use one only")?)
}
