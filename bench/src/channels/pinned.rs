//! Threads on two CPUs.

use std::thread;

use bench::Outcome;
use bench::cpu::pin;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

/// The first two CPUs that this process may use.
pub fn two_cpus() -> Outcome<[usize; 2]> {
    let mine = sched_getaffinity(Pid::from_raw(0))?;
    let mut usable = (0..CpuSet::count()).filter(|cpu| mine.is_set(*cpu).unwrap_or(false));
    match (usable.next(), usable.next()) {
        (Some(first), Some(second)) => Ok([first, second]),
        _ => Err("two CPUs are needed".into()),
    }
}

/// Result of a thread, whose errors can be sent.
type Sent<T> = Result<T, String>;

/// Runs `work` in a thread on a CPU: not in the caller's, whose CPUs must stay what they are.
fn on<'scope, T: Send + 'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    cpu: usize,
    work: impl FnOnce() -> Outcome<T> + Send + 'scope,
) -> thread::ScopedJoinHandle<'scope, Sent<T>> {
    scope.spawn(move || pin(cpu).and_then(|()| work()).map_err(|error| error.to_string()))
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, Sent<T>>) -> Outcome<T> {
    Ok(thread.join().map_err(|_| "a thread panicked")??)
}

/// Runs `here` on the first CPU.
pub fn one<T: Send>(here: impl FnOnce() -> Outcome<T> + Send) -> Outcome<T> {
    let [first, _] = two_cpus()?;
    thread::scope(|scope| joined(on(scope, first, here)))
}

/// Runs `there` on the second CPU while `here` runs on the first; returns the result of `here`.
pub fn both<T: Send>(
    there: impl FnOnce() -> Outcome<()> + Send,
    here: impl FnOnce() -> Outcome<T> + Send,
) -> Outcome<T> {
    let [first, second] = two_cpus()?;
    thread::scope(|scope| {
        let there = on(scope, second, there);
        let given = joined(on(scope, first, here));
        joined(there)?;
        given
    })
}
