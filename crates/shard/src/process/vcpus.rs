//! The threads of a shard's vCPUs.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tracing::debug;

use super::orders::Outcome;
use crate::chain::chain;
use crate::kick;
use crate::launch::{Answer, STATISTICS_FILES_MAX};
use crate::sandbox::Threads;
use crate::span::router::Router;
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
    /// Files of KVM's statistics of the vCPUs; empty where the host's KVM has none.
    statistics: Vec<OwnedFd>,
}

impl VcpuThreads {
    /// Starts a thread for each vCPU, which runs the guest once the first thread is sealed.
    pub fn start(threads: &Threads, vcpus: Vec<VcpuThread>) -> io::Result<Self> {
        let mut started = Self {
            threads: Vec::with_capacity(vcpus.len()),
            counters: Vec::with_capacity(vcpus.len()),
            stops: Vec::with_capacity(vcpus.len()),
            statistics: Vec::new(),
        };
        let mut files = Vec::with_capacity(vcpus.len());
        for (id, vcpu) in vcpus.into_iter().enumerate() {
            let VcpuThread {
                kind,
                counters,
                stop,
                statistics,
                run,
            } = vcpu;
            files.push(statistics);
            started.counters.push(counters);
            started.stops.push(stop);
            let quiescer = threads.quiescer().clone();
            let thread = threads.spawn_held(kind, &format!("vcpu{id}"), move || run(&quiescer))?;
            started.threads.push(thread);
        }
        match files.into_iter().collect() {
            Ok(files) => started.statistics = files,
            Err(error) => debug!("the host's KVM has no statistics of vCPUs: {error}"),
        }
        Ok(started)
    }

    /// Carries out [`Order::StopVcpu`](crate::launch::Order::StopVcpu). `router` is that of a VM that spans
    /// cells.
    pub fn obey_stop(&self, vcpu: u8, for_ms: u16, router: Option<&Router>) -> Answer {
        if let Some(why) = absence(vcpu, router) {
            return Answer::Refused { why };
        }
        let stopped = self.stop_one(vcpu, Duration::from_millis(for_ms.into()));
        // A signal does not end the wait of a halted vCPU of a VM that spans cells.
        router.into_iter().for_each(|router| router.wake_waiter(vcpu));
        match stopped {
            Some(Ok(())) => Answer::Done,
            Some(Err(error)) => Answer::Refused {
                why: error.to_string(),
            },
            None => Answer::Refused { why: no_vcpu(vcpu) },
        }
    }

    /// Carries out [`Order::ContinueVcpu`](crate::launch::Order::ContinueVcpu). `router` is that of a VM that
    /// spans cells.
    pub fn obey_continue(&self, vcpu: u8, router: Option<&Router>) -> Answer {
        if let Some(why) = absence(vcpu, router) {
            return Answer::Refused { why };
        }
        match self.stops.get(usize::from(vcpu)) {
            Some(stop) => {
                stop.go_on();
                Answer::Done
            }
            None => Answer::Refused { why: no_vcpu(vcpu) },
        }
    }

    /// Carries out [`Order::VcpuStatistics`](crate::launch::Order::VcpuStatistics).
    pub fn pass_statistics(&self, first: u8) -> Outcome {
        let wanted = self.statistics.iter().skip(first.into());
        let files: io::Result<Vec<OwnedFd>> = wanted
            .take(STATISTICS_FILES_MAX)
            .map(OwnedFd::try_clone)
            .collect();
        match files {
            Ok(files) => {
                // There are 64 at most.
                let count = files.len() as u8;
                Outcome::AnswerWithFiles(Answer::VcpuStatistics { files: count }, files)
            }
            Err(error) => Outcome::Answer(Answer::Refused { why: chain(&error) }),
        }
    }

    /// Stops vCPU `vcpu` for `length` from now. It parks before its next entry into the guest. Returns `None`
    /// if there is no such vCPU.
    fn stop_one(&self, vcpu: u8, length: Duration) -> Option<Result<(), LeaseError>> {
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

    /// Waits until all threads have left the guest permanently, after the end of the VM was signalled.
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

/// Returns the reason why this shard can't stop a vCPU: the VM has no such vCPU, or the vCPU is in another
/// shard, or on its way.
fn absence(vcpu: u8, router: Option<&Router>) -> Option<String> {
    match router?.is_here(vcpu) {
        Some(true) => None,
        Some(false) => Some(format!("vCPU {vcpu} is not in this shard")),
        None => Some(no_vcpu(vcpu)),
    }
}

fn no_vcpu(vcpu: u8) -> String {
    format!("the VM has no vCPU {vcpu}")
}

#[cfg(test)]
mod tests;
