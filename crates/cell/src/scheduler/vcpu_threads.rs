//! The threads of a VM's vCPUs, as a driver sees and orders them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::str;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use shard_api::launch::Order;

use super::activity::ThreadTimes;
use super::gate::LEASE_MS;
use crate::affinity::threads_of;
use crate::handle::VmHandle;
use crate::vcpu_statistics::HaltCounter;

/// Attempts to get the counters of halts from a shard, and the time between two. Ours: a shard that starts
/// its VM may be late.
const COUNTER_TRIES: u32 = 5;
const COUNTER_INTERVAL: Duration = Duration::from_secs(1);
/// Length of a line of `/proc/TID/stat` and `schedstat` at most.
const LINE_BYTES_MAX: usize = 1024;

/// Threads of the vCPUs of one boot of a VM, by number. No method blocks.
pub(super) trait VcpuThreads: Send + Sync {
    /// Restricts a thread to CPUs of the host.
    ///
    /// # Errors
    /// If the thread has ended, or may use none of the CPUs.
    fn pin(&self, vcpu: u16, cpus: &[usize]) -> io::Result<()>;
    /// Stops a vCPU for [`LEASE_MS`] from now, or renews its stop.
    fn stop(&self, vcpu: u16);
    /// Ends the stop of a vCPU.
    fn go_on(&self, vcpu: u16);
    /// Reads a thread's state; `None` if it has ended.
    fn read(&self, vcpu: u16) -> Option<ThreadTimes>;
}

/// Threads of a shard. Their files in `/proc` are held open: a thread of another process that gets the same
/// id later is not taken for one of these.
#[derive(Debug)]
pub(super) struct ShardThreads {
    handle: VmHandle,
    /// Number of the boot.
    starts: u64,
    threads: Vec<Thread>,
    halts: Arc<OnceLock<Vec<HaltCounter>>>,
}

/// Thread of a vCPU.
#[derive(Debug)]
pub(super) struct Thread {
    id: Pid,
    stat: File,
    schedstat: File,
}

impl ShardThreads {
    /// The threads of the `vcpus` vCPUs of a VM that runs in one shard.
    ///
    /// # Errors
    /// If it does not run, or not all threads have started.
    pub(super) fn find(handle: &VmHandle, vcpus: u8) -> io::Result<Self> {
        let (starts, home) = handle
            .running_home()
            .ok_or_else(|| io::Error::other("the VM does not run"))?;
        let pid = home.pid;
        let mut threads = Vec::new();
        for (vcpu, thread) in (0..vcpus).zip(threads_of(pid)?) {
            if thread.vcpu != vcpu {
                break;
            }
            threads.push(Thread::open(pid, thread.id)?);
        }
        // The id is the shard's as long as that has not ended.
        if threads.len() != usize::from(vcpus) || home.has_ended() {
            return Err(io::Error::other("not all of its vCPUs run"));
        }
        Ok(Self {
            handle: handle.clone(),
            starts,
            threads,
            halts: find_halt_counters(handle),
        })
    }

    fn thread(&self, vcpu: u16) -> Option<&Thread> {
        self.threads.get(usize::from(vcpu))
    }

    fn order(&self, order: &Order) {
        // An order that is not sent counts as lost: a stop is ordered again when it would be renewed, and
        // ends by itself.
        self.handle.gate(self.starts, order);
    }
}

impl VcpuThreads for ShardThreads {
    fn pin(&self, vcpu: u16, cpus: &[usize]) -> io::Result<()> {
        let thread = self.thread(vcpu).ok_or(io::ErrorKind::NotFound)?;
        // Fails once the thread has ended.
        thread.is_ready()?;
        let mut set = CpuSet::new();
        cpus.iter().try_for_each(|cpu| set.set(*cpu))?;
        Ok(sched_setaffinity(thread.id, &set)?)
    }

    fn stop(&self, vcpu: u16) {
        if let Ok(vcpu) = u8::try_from(vcpu) {
            let for_ms = LEASE_MS;
            self.order(&Order::StopVcpu { vcpu, for_ms });
        }
    }

    fn go_on(&self, vcpu: u16) {
        if let Ok(vcpu) = u8::try_from(vcpu) {
            self.order(&Order::ContinueVcpu { vcpu });
        }
    }

    fn read(&self, vcpu: u16) -> Option<ThreadTimes> {
        let times = self.thread(vcpu)?.read()?;
        let counter = self.halts.get().and_then(|all| all.get(usize::from(vcpu)));
        Some(ThreadTimes {
            halts: counter.and_then(HaltCounter::read),
            ..times
        })
    }
}

impl Thread {
    /// A thread by the ids of its process and its own.
    ///
    /// # Errors
    /// If it has ended.
    pub(super) fn open(pid: i32, id: i32) -> io::Result<Self> {
        let open = |name: &str| File::open(format!("/proc/{pid}/task/{id}/{name}"));
        Ok(Self {
            id: Pid::from_raw(id),
            stat: open("stat")?,
            schedstat: open("schedstat")?,
        })
    }

    /// Its state; `None` if it has ended.
    pub(super) fn read(&self) -> Option<ThreadTimes> {
        let is_ready = self.is_ready().ok()?;
        let mut line = [0; LINE_BYTES_MAX];
        let (ran_ns, ready_ns) = times_of(read_line(&self.schedstat, &mut line).ok()?)?;
        Some(ThreadTimes {
            is_ready,
            ready_ns,
            ran_ns,
            halts: None,
        })
    }

    fn is_ready(&self) -> io::Result<bool> {
        let mut line = [0; LINE_BYTES_MAX];
        is_ready_in(read_line(&self.stat, &mut line)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Gets the counters of halts of a VM, on a thread of its own: its shard may be slow. Until they are there,
/// no vCPU of it is known to halt often.
fn find_halt_counters(handle: &VmHandle) -> Arc<OnceLock<Vec<HaltCounter>>> {
    let found = Arc::new(OnceLock::new());
    let (handle, awaited) = (handle.clone(), Arc::downgrade(&found));
    let find = move || {
        for _ in 0..COUNTER_TRIES {
            let counters = handle.halt_counters();
            let Some(found) = awaited.upgrade() else { return };
            if !counters.is_empty() {
                let _ = found.set(counters);
                return;
            }
            drop(found);
            thread::sleep(COUNTER_INTERVAL);
        }
    };
    // Without a thread the VM's gang is a strict one.
    if let Err(error) = thread::Builder::new().name("halts".into()).spawn(find) {
        tracing::warn!(%error, "halts of vCPUs are not counted");
    }
    found
}

fn read_line<'a>(file: &File, line: &'a mut [u8]) -> io::Result<&'a str> {
    let length = file.read_at(line, 0)?;
    str::from_utf8(&line[..length]).map_err(io::Error::other)
}

/// Whether the thread of a line of `/proc/TID/stat` runs or is ready: the state follows the name, which is
/// in parentheses and may have some itself (proc(5)).
fn is_ready_in(stat: &str) -> Option<bool> {
    let (_, fields) = stat.rsplit_once(')')?;
    Some(fields.trim_start().starts_with('R'))
}

/// Run time, and run time and time of waiting for a CPU together, nanoseconds, in a line of
/// `/proc/TID/schedstat`.
fn times_of(schedstat: &str) -> Option<(u64, u64)> {
    let mut fields = schedstat.split_ascii_whitespace();
    let mut next = || fields.next()?.parse::<u64>().ok();
    let (ran, waited) = (next()?, next()?);
    Some((ran, ran.saturating_add(waited)))
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Threads that have ended.
    pub(in super::super) struct NoThreads;

    impl VcpuThreads for NoThreads {
        fn pin(&self, _: u16, _: &[usize]) -> io::Result<()> {
            Err(io::ErrorKind::NotFound.into())
        }

        fn stop(&self, _: u16) {}

        fn go_on(&self, _: u16) {}

        fn read(&self, _: u16) -> Option<ThreadTimes> {
            None
        }
    }

    #[test]
    fn state_and_times_are_read_whatever_the_name_of_the_thread() {
        assert_eq!(is_ready_in("7 (vcpu0) R 1 7 7"), Some(true));
        assert_eq!(is_ready_in("7 (a) R (b) S 1 7 7"), Some(false));
        assert_eq!(is_ready_in("7"), None);
        assert_eq!(times_of("5 7 9\n"), Some((5, 12)));
        assert_eq!((times_of("5"), times_of("x 7")), (None, None));
    }

    #[test]
    fn thread_is_ready_while_it_runs_and_not_while_it_sleeps_and_is_none_once_it_has_ended() {
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let sleeper = std::thread::spawn(move || {
            tell.send(nix::unistd::gettid()).unwrap();
            let _ = ended.recv();
        });
        let id = told.recv().unwrap();
        let open = |id: Pid, name| File::open(format!("/proc/self/task/{id}/{name}")).unwrap();
        let thread = |id| Thread {
            id,
            stat: open(id, "stat"),
            schedstat: open(id, "schedstat"),
        };
        let threads = ShardThreads {
            handle: VmHandle::default(),
            starts: 1,
            threads: vec![thread(nix::unistd::gettid()), thread(id)],
            halts: Arc::default(),
        };
        assert!(threads.read(0).unwrap().is_ready);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while threads.read(1).unwrap().is_ready {
            assert!(std::time::Instant::now() < deadline, "it does not sleep");
            std::thread::yield_now();
        }
        assert!(threads.read(0).unwrap().ready_ns > 0);
        drop(end);
        sleeper.join().unwrap();
        while threads.read(1).is_some() {
            assert!(std::time::Instant::now() < deadline, "it does not end");
            std::thread::yield_now();
        }
        assert!(threads.pin(1, &[0]).is_err(), "its id may be another thread's");
        assert_eq!(threads.read(2), None);
        // The VM does not run: orders are lost.
        threads.stop(0);
        threads.go_on(0);
    }
}
