//! Threads on CPUs of their own.

use nix::sched::{CpuSet, sched_setaffinity};
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
