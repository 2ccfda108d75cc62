//! Threads of the vCPUs of a VM that spans cells which are in this cell, as its drivers see them.

use std::io;

use registry::cluster::windows::SpanningVcpu;

use super::activity::ThreadTimes;
use super::vcpu_threads::{Thread, VcpuThreads};

/// Threads of a part. The process of the VM's home stops and pins them ([`super::span_gate`]); drivers read
/// whether they have work.
#[derive(Debug)]
pub(super) struct PartThreads(Vec<Thread>);

impl PartThreads {
    /// The threads of these vCPUs, in this order.
    ///
    /// # Errors
    /// If one has ended.
    pub(super) fn find(vcpus: &[SpanningVcpu]) -> io::Result<Self> {
        let thread = |vcpu: &SpanningVcpu| Thread::open(vcpu.shard_pid, vcpu.thread_id);
        Ok(Self(vcpus.iter().map(thread).collect::<io::Result<_>>()?))
    }
}

impl VcpuThreads for PartThreads {
    fn pin(&self, _: u16, _: &[usize]) -> io::Result<()> {
        Ok(())
    }

    fn stop(&self, _: u16) {}

    fn go_on(&self, _: u16) {}

    fn read(&self, vcpu: u16) -> Option<ThreadTimes> {
        self.0.get(usize::from(vcpu))?.read()
    }
}
