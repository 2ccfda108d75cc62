//! CPU affinity of the threads of vCPUs.

use std::fs;
use std::io;
use std::path::Path;

use config::cpulist;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Restricts vCPU `vcpu` of the shard with the process id `shard` to these CPUs, or to all that the VM may
/// use when `cpus` is empty. `cell` is the vCPU's, of a VM that spans cells, for messages.
///
/// Threads are identified by their names. A shard that a guest has taken over may change those, which moves
/// its own threads between CPUs that it may use anyway.
///
/// # Errors
/// If the shard has no such vCPU, or may not use such a CPU.
pub(crate) fn pin(shard: i32, vcpu: u8, cpus: &[usize], cell: Option<u16>) -> io::Result<()> {
    // The first thread keeps the CPUs with which the shard was started.
    let own = sched_getaffinity(Pid::from_raw(shard))?;
    let set = if cpus.is_empty() {
        own
    } else {
        among(cpus, &own, cell.map(|cell| (vcpu, cell)))?
    };
    set_affinity(shard, vcpu, &set)
}

/// Restricts a vCPU to a CPU that its VM borrows, which need not be one of those with which the shard was
/// started.
///
/// # Errors
/// If the shard has no such vCPU, or the host lets its processes not use the CPU.
pub(crate) fn restrict(shard: i32, vcpu: u8, cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    let may_not = |error: io::Error| match error.raw_os_error() {
        Some(libc::EINVAL) => io::Error::other(format!(
            "the host does not let the VM's processes use CPU {cpu}; help: name another CPU"
        )),
        _ => error,
    };
    set_affinity(shard, vcpu, &set).map_err(may_not)
}

fn set_affinity(shard: i32, vcpu: u8, set: &CpuSet) -> io::Result<()> {
    let name = format!("vcpu{vcpu}");
    let mut is_found = false;
    for entry in fs::read_dir(format!("/proc/{shard}/task"))? {
        let thread = entry?.path();
        if name_of(&thread).is_none_or(|of_thread| of_thread != name) {
            continue;
        }
        let id = thread.file_name().and_then(|id| id.to_str()?.parse().ok());
        let id = id.ok_or(io::ErrorKind::InvalidData)?;
        sched_setaffinity(Pid::from_raw(id), set)?;
        is_found = true;
    }
    is_found
        .then_some(())
        .ok_or_else(|| io::Error::other(format!("the VM has no vCPU {vcpu}")))
}

/// The thread that runs a vCPU, and its times as the host reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VcpuThread {
    /// The vCPU's number.
    pub(crate) vcpu: u8,
    /// The thread's id.
    pub(crate) id: i32,
    /// The CPUs that it may use.
    pub(crate) cpus: Vec<usize>,
    /// The CPU that it used last.
    pub(crate) last_cpu: usize,
    /// The time that it has run, in milliseconds.
    pub(crate) ran_ms: u64,
    /// The time that it was ready to run and waited for a CPU, in milliseconds.
    pub(crate) waited_ms: u64,
}

/// The threads of the vCPUs of the shard with the process id `shard`, identified by their names as in
/// [`pin`].
///
/// # Errors
/// If the shard has ended.
pub(crate) fn threads_of(shard: i32) -> io::Result<Vec<VcpuThread>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{shard}/task"))? {
        // A thread that ends meanwhile is skipped.
        threads.extend(vcpu_thread(&entry?.path()));
    }
    threads.sort_by_key(|thread| thread.vcpu);
    Ok(threads)
}

/// State of the thread of a vCPU in `/proc`; none for another thread.
fn vcpu_thread(thread: &Path) -> Option<VcpuThread> {
    let vcpu = name_of(thread)?.strip_prefix("vcpu")?.parse().ok()?;
    let id = thread.file_name()?.to_str()?.parse().ok()?;
    let set = sched_getaffinity(Pid::from_raw(id)).ok()?;
    let cpus = (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false));
    let ran = fs::read_to_string(thread.join("schedstat")).ok()?;
    let (ran_ms, waited_ms) = run_times(&ran)?;
    let stat = fs::read_to_string(thread.join("stat")).ok()?;
    Some(VcpuThread {
        vcpu,
        id,
        cpus: cpus.collect(),
        last_cpu: last_cpu_of(&stat)?,
        ran_ms,
        waited_ms,
    })
}

/// Run time and time of waiting for a CPU, in milliseconds, of a line of `/proc/TID/schedstat`: nanoseconds
/// each (Linux, `Documentation/scheduler/sched-stats.rst`).
fn run_times(schedstat: &str) -> Option<(u64, u64)> {
    let mut fields = schedstat.split_ascii_whitespace();
    let mut next = || Some(fields.next()?.parse::<u64>().ok()? / 1_000_000);
    Some((next()?, next()?))
}

/// The CPU in a line of `/proc/PID/task/TID/stat`: field 39, counted from the thread's id (proc(5)). The
/// second field is the name, which may have spaces.
fn last_cpu_of(stat: &str) -> Option<usize> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(39 - 3)?.parse().ok()
}

/// The name of a thread that has not ended.
fn name_of(thread: &Path) -> Option<String> {
    let name = fs::read_to_string(thread.join("comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// The set of `cpus`, which must be in `own`: those of the VM, or of the cell that a vCPU is in.
fn among(cpus: &[usize], own: &CpuSet, of: Option<(u8, u16)>) -> io::Result<CpuSet> {
    let has = |cpu: usize| own.is_set(cpu).unwrap_or(false);
    let mut set = CpuSet::new();
    for cpu in cpus {
        if !has(*cpu) {
            let own: Vec<usize> = (0..CpuSet::count()).filter(|cpu| has(*cpu)).collect();
            let own = cpulist::write(&own);
            let what = match of {
                None => format!("the VM may not use CPU {cpu} of the host"),
                Some((vcpu, cell)) => format!("vCPU {vcpu} is in cell {cell}, which has no CPU {cpu}"),
            };
            return Err(io::Error::other(format!("{what}; help: name some of {own}")));
        }
        set.set(*cpu)?;
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// The CPUs of the calling thread.
    fn own_cpus() -> Vec<usize> {
        let set = sched_getaffinity(Pid::from_raw(0)).unwrap();
        (0..CpuSet::count())
            .filter(|cpu| set.is_set(*cpu).unwrap())
            .collect()
    }

    #[test]
    fn run_and_wait_times_of_a_thread_are_milliseconds() {
        assert_eq!(run_times("5999999 12000000 44\n"), Some((5, 12)));
        for wrong in ["", "1", "1 x 2", "-1 2 3"] {
            assert_eq!(run_times(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn thread_of_a_vcpu_keeps_to_its_cpus_until_it_may_use_all_again() {
        let own = own_cpus();
        let (ask, asked) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let vcpu = std::thread::Builder::new().name("vcpu7".into());
        let vcpu = vcpu.spawn(move || {
            while asked.recv().is_ok() {
                tell.send(own_cpus()).unwrap();
            }
        });
        let cpus = || {
            ask.send(()).unwrap();
            told.recv().unwrap()
        };
        assert_eq!(cpus(), own);
        let shard = std::process::id() as i32;
        let last = *own.last().unwrap();
        pin(shard, 7, &[last], None).unwrap();
        assert_eq!(cpus(), [last]);
        let threads = threads_of(shard).unwrap();
        let [known] = &threads[..] else {
            panic!("{threads:?}");
        };
        assert_eq!(
            (known.vcpu, &known.cpus[..], known.last_cpu),
            (7, &[last][..], last)
        );
        assert_eq!(own_cpus(), own, "another thread");
        pin(shard, 7, &[], None).unwrap();
        assert_eq!(cpus(), own);
        let refused = |vcpu, cpus: &[usize], cell| pin(shard, vcpu, cpus, cell).unwrap_err().to_string();
        assert_eq!(refused(8, &own, None), "the VM has no vCPU 8");
        let absent = CpuSet::count() - 1;
        assert!(
            refused(7, &[absent], None)
                .starts_with(&format!("the VM may not use CPU {absent} of the host; help: "))
        );
        assert_eq!(
            refused(7, &[absent], Some(2)),
            format!(
                "vCPU 7 is in cell 2, which has no CPU {absent}; help: name some of {}",
                cpulist::write(&own)
            )
        );
        drop(ask);
        vcpu.unwrap().join().unwrap();
    }
}
