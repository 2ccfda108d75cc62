//! A vCPU's local interrupt controller, as the thread that runs the vCPU meets it.

use std::convert::Infallible;
use std::io;

use kvm_ioctls::VcpuFd;

use crate::arch::x86_64::state::StateError;
use crate::sandbox::ThreadKind;

/// The next act of a vCPU's thread.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<O> {
    /// Enter the guest.
    Enter,
    /// Look again.
    Again,
    /// Complete what the vCPU has half done, then send it away ([`LocalController::depart`]).
    Leave(O),
}

/// The local interrupt controller of one vCPU. There are two: KVM's own ([`InKernel`]) for plain VMs, and the
/// shard's ([`SpanVcpu`](crate::span::span_vcpu::SpanVcpu)) for spanning VMs. The loop that runs a vCPU is compiled for each
/// of them, so that no exit asks which one serves.
pub trait LocalController: Send + 'static {
    /// The kind of the vCPU's thread, which decides its system calls.
    const THREAD: ThreadKind;
    /// An order that sends the vCPU to another shard.
    type MoveOrder;

    /// Makes the calling thread the vCPU's.
    ///
    /// # Errors
    /// If the host refuses what that thread needs.
    fn open(&mut self) -> io::Result<()>;

    /// Ends the thread's part.
    fn close(&self);

    /// Prepares the vCPU to be entered, or waits. Called between two entries, after the kicks so far have been
    /// forgotten.
    ///
    /// # Errors
    /// If KVM refuses the vCPU's state.
    fn before(&mut self, fd: &mut VcpuFd) -> Result<Next<Self::MoveOrder>, StateError>;

    /// Notes that the vCPU has left the guest. Called at every exit, before that is served.
    fn left(&mut self);

    /// Takes over what the guest did without an exit. Called at every exit, after that was served.
    fn after(&mut self, fd: &mut VcpuFd);

    /// Sends the vCPU to another shard. It stands still, with no access of its own half done.
    fn depart(&mut self, fd: &VcpuFd, order: Self::MoveOrder);

    /// Notes that the guest has executed HLT.
    fn halt(&mut self, fd: &mut VcpuFd);

    /// Reads a model-specific register that KVM leaves to the shard; none for one that does not exist, or must
    /// not be read.
    fn read(&mut self, fd: &mut VcpuFd, index: u32) -> Option<u64>;

    /// Writes one; false if that is to fault.
    fn write(&mut self, fd: &mut VcpuFd, index: u32, value: u64) -> bool;
}

/// KVM's own controller. KVM delivers interrupts, halts the vCPU and serves all registers, so nothing is left to
/// do here.
#[derive(Debug)]
pub struct InKernel;

impl LocalController for InKernel {
    const THREAD: ThreadKind = ThreadKind::Vcpu;
    type MoveOrder = Infallible;

    fn open(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn close(&self) {}

    fn before(&mut self, _fd: &mut VcpuFd) -> Result<Next<Infallible>, StateError> {
        Ok(Next::Enter)
    }

    fn left(&mut self) {}

    fn after(&mut self, _fd: &mut VcpuFd) {}

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
