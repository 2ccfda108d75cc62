//! The agent's own CPUs, which differ from those of its commands.

use std::io;
use std::sync::OnceLock;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// CPUs of commands, once the agent is bound to fewer.
static COMMANDS: OnceLock<CpuSet> = OnceLock::new();

/// Binds the calling thread, and the threads that it starts later, to some CPUs. Commands may use all CPUs,
/// including those that come online later, for which the kernel does not report whether this thread could use
/// them.
///
/// # Errors
/// Fails if none of the CPUs is online, or may be used.
pub fn keep_to(cpus: &CpuSet) -> io::Result<()> {
    let mut all = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        all.set(cpu)?;
    }
    sched_setaffinity(Pid::from_raw(0), cpus)?;
    COMMANDS.get_or_init(|| all);
    Ok(())
}

/// Restores the CPUs for a command that is about to begin. Async-signal-safe: one system call.
pub(super) fn restore() -> io::Result<()> {
    match COMMANDS.get() {
        Some(all) => sched_setaffinity(Pid::from_raw(0), all).map_err(io::Error::from),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use nix::sched::sched_getaffinity;

    use super::*;

    #[test]
    fn commands_may_run_on_cpus_that_the_agent_may_not_use() {
        let this = Pid::from_raw(0);
        restore().expect("nothing to do");
        let before = sched_getaffinity(this).expect("its CPUs");
        let first = (0..CpuSet::count())
            .find(|cpu| before.is_set(*cpu).unwrap_or(false))
            .expect("a CPU");
        let mut only = CpuSet::new();
        only.set(first).expect("a CPU");
        keep_to(&only).expect("a CPU that it has");
        assert_eq!(sched_getaffinity(this).expect("its CPUs"), only);
        let child = std::thread::spawn(move || (sched_getaffinity(this), restore(), sched_getaffinity(this)));
        let (kept, restored, after) = child.join().expect("it ends");
        restored.expect("they may be used");
        assert_eq!(kept, Ok(only));
        // All existing CPUs, if this test could use all.
        let after = after.expect("its CPUs");
        assert!(
            (0..CpuSet::count()).all(|cpu| after.is_set(cpu) == Ok(true) || before.is_set(cpu) == Ok(false))
        );
        restore().expect("as it was");
    }
}
