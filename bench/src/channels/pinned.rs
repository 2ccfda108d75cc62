//! Two threads on two CPUs.

use std::thread;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::Outcome;

/// The first two CPUs that this process may use.
pub fn two_cpus() -> Outcome<[usize; 2]> {
    let mine = sched_getaffinity(Pid::from_raw(0))?;
    let mut usable = (0..CpuSet::count()).filter(|cpu| mine.is_set(*cpu).unwrap_or(false));
    match (usable.next(), usable.next()) {
        (Some(first), Some(second)) => Ok([first, second]),
        _ => Err("two CPUs are needed".into()),
    }
}

/// Keeps the calling thread on a CPU.
pub fn pin(cpu: usize) -> Outcome<()> {
    let mut one = CpuSet::new();
    one.set(cpu)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &one)?)
}

/// Runs `there` on the second CPU while `here` runs on the first; what `here` gives.
pub fn both<T>(there: impl FnOnce() + Send, here: impl FnOnce() -> T + Send) -> Outcome<T>
where
    T: Send,
{
    let [first, second] = two_cpus()?;
    thread::scope(|scope| {
        // Not the main thread, whose CPUs must stay what they are.
        let there = scope.spawn(move || {
            let pinned = pin(second).is_ok();
            there();
            pinned
        });
        let here = scope.spawn(move || (pin(first).is_ok(), here()));
        let (pinned_here, given) = here.join().map_err(|_| "a thread panicked")?;
        let pinned_there = there.join().map_err(|_| "a thread panicked")?;
        if pinned_here && pinned_there {
            Ok(given)
        } else {
            Err("threads can't be kept on CPUs".into())
        }
    })
}
