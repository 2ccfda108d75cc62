//! The threads of a shard's vCPUs.

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::kick;
use crate::sandbox::Threads;
use crate::vcpu::{VcpuCounters, VcpuThread};
use crate::vcpu_stop::{LeaseError, VcpuStop};

/// Time limit for vCPUs to leave the guest. A vCPU that blocks in the kernel for memory can take longer, and
/// is abandoned.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
const KICK_INTERVAL: Duration = Duration::from_millis(1);

/// The threads of a shard's vCPUs.
pub struct VcpuThreads {
    threads: Vec<JoinHandle<()>>,
    /// Counters of each vCPU.
    pub counters: Vec<Arc<VcpuCounters>>,
    /// Stop of each vCPU.
    pub stops: Vec<Arc<VcpuStop>>,
}

impl VcpuThreads {
    /// Starts a thread for each vCPU, which runs the guest once the first thread is sealed.
    pub fn start(threads: &Threads, vcpus: Vec<VcpuThread>) -> io::Result<Self> {
        let mut started = Self {
            threads: Vec::with_capacity(vcpus.len()),
            counters: Vec::with_capacity(vcpus.len()),
            stops: Vec::with_capacity(vcpus.len()),
        };
        for (id, vcpu) in vcpus.into_iter().enumerate() {
            let VcpuThread {
                kind,
                counters,
                stop,
                run,
            } = vcpu;
            started.counters.push(counters);
            started.stops.push(stop);
            let quiescer = threads.quiescer().clone();
            let thread = threads.spawn_held(kind, &format!("vcpu{id}"), move || run(&quiescer))?;
            started.threads.push(thread);
        }
        Ok(started)
    }

    /// Stops vCPU `vcpu` for `length` from now. It parks before its next entry into the guest. Returns `None`
    /// if there is no such vCPU.
    pub fn stop_one(&self, vcpu: u8, length: Duration) -> Option<Result<(), LeaseError>> {
        let (stop, thread) = (
            self.stops.get(usize::from(vcpu))?,
            self.threads.get(usize::from(vcpu))?,
        );
        let stopped = stop.stop(length);
        if stopped.is_ok() {
            // SAFETY: the thread is not joined yet, so its handle is valid.
            let _ = unsafe { libc::pthread_kill(thread.as_pthread_t(), kick::signal()) };
        }
        Some(stopped)
    }

    /// Waits until all threads have left the guest for good, after the end of the VM was signalled.
    pub fn stop(&self) {
        let deadline = Instant::now() + STOP_TIMEOUT;
        self.stops.iter().for_each(|stop| stop.go_on());
        // A vCPU between its check of the end signal and KVM_RUN would miss a single kick, so kicks repeat
        // until it has left.
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            for thread in self.threads.iter().filter(|thread| !thread.is_finished()) {
                // SAFETY: the thread is not joined yet, so its handle is valid.
                let _ = unsafe { libc::pthread_kill(thread.as_pthread_t(), kick::signal()) };
            }
            std::thread::sleep(KICK_INTERVAL);
        }
    }
}
