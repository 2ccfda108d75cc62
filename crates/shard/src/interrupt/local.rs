//! Interface between a vCPU's thread and the vCPU's local interrupt controller.

use std::convert::Infallible;
use std::io;

use kvm_ioctls::VcpuFd;

use crate::arch::x86_64::state::StateError;
use crate::sandbox::ThreadKind;

/// Next action of a vCPU's thread.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<O> {
    /// Enter the guest.
    Enter,
    /// Prepare the entry again.
    Retry,
    /// Complete the current access of the vCPU, then send the vCPU to another shard
    /// ([`LocalController::depart`]).
    Leave(O),
}

/// Local interrupt controller of one vCPU. There are two: KVM's own ([`InKernel`]) for plain VMs, and the
/// shard's ([`SpanVcpu`](crate::span::span_vcpu::SpanVcpu)) for spanning VMs. The loop that runs a vCPU is
/// compiled for each of them, so that no exit has to choose.
pub trait LocalController: Send + 'static {
    /// Kind of the vCPU's thread, which determines its system calls.
    const THREAD: ThreadKind;
    /// Order that sends the vCPU to another shard.
    type MoveOrder;

    /// Makes the calling thread the vCPU's thread.
    ///
    /// # Errors
    /// Fails if the host refuses a resource of that thread.
    fn open(&mut self) -> io::Result<()>;

    /// Detaches the thread.
    fn close(&self);

    /// Prepares the entry into the guest, or blocks. Called between two entries, after the flag of earlier
    /// kicks was cleared.
    ///
    /// # Errors
    /// Fails if KVM refuses the vCPU's state.
    fn prepare_entry(&mut self, fd: &mut VcpuFd) -> Result<Next<Self::MoveOrder>, StateError>;

    /// Records that the vCPU has left the guest. Called at every exit, before the exit is served.
    fn note_exit(&mut self);

    /// Applies what the guest did to its local APIC without an exit. Called at every exit, after the exit was
    /// served.
    fn sync_after_exit(&mut self, fd: &mut VcpuFd);

    /// Returns whether the vCPU is in this shard. The registers of one that is not mean nothing here.
    fn is_resident(&self) -> bool;

    /// Sends the paused vCPU to another shard. No access of it may be incomplete.
    fn depart(&mut self, fd: &VcpuFd, order: Self::MoveOrder);

    /// Records that the guest has executed HLT.
    fn halt(&mut self, fd: &mut VcpuFd);

    /// Reads a model-specific register that KVM leaves to the shard; returns none for a register that does
    /// not exist or is not readable.
    fn read(&mut self, fd: &mut VcpuFd, index: u32) -> Option<u64>;

    /// Writes such a register; returns false if the write must fault.
    fn write(&mut self, fd: &mut VcpuFd, index: u32, value: u64) -> bool;
}

/// KVM's own controller. KVM delivers interrupts, halts the vCPU and serves all registers, so this one does
/// nothing.
#[derive(Debug)]
pub struct InKernel;

impl LocalController for InKernel {
    const THREAD: ThreadKind = ThreadKind::Vcpu;
    type MoveOrder = Infallible;

    fn open(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn close(&self) {}

    fn prepare_entry(&mut self, _fd: &mut VcpuFd) -> Result<Next<Infallible>, StateError> {
        Ok(Next::Enter)
    }

    fn note_exit(&mut self) {}

    fn sync_after_exit(&mut self, _fd: &mut VcpuFd) {}

    fn is_resident(&self) -> bool {
        true
    }

    fn depart(&mut self, _fd: &VcpuFd, order: Infallible) {
        match order {}
    }

    fn halt(&mut self, _fd: &mut VcpuFd) {}

    fn read(&mut self, _fd: &mut VcpuFd, _index: u32) -> Option<u64> {
        None
    }

    fn write(&mut self, _fd: &mut VcpuFd, _index: u32, _value: u64) -> bool {
        false
    }
}
