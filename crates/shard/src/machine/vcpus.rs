//! New vCPUs in the state in which firmware leaves them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use kvm_bindings::CpuId;
use kvm_ioctls::{VcpuFd, VmFd};

use super::error::{MachineError, kvm};
use crate::arch::x86_64::cpuid::{self, Groups};
use crate::arch::x86_64::kernel::Entry;
use crate::arch::x86_64::registers;
use crate::launch::NodeLaunch;

/// Returns the node of each vCPU.
pub(super) fn node_of_each(nodes: &[NodeLaunch], vcpus: u8) -> Vec<u8> {
    let node = |vcpu: u8| nodes.iter().position(|node| node.vcpus.contains(&vcpu));
    (0..vcpus).map(|vcpu| node(vcpu).unwrap_or(0) as u8).collect()
}

/// Returns the CPUID of vCPU `id`.
pub fn leaves_of_vcpu(cpuid: &CpuId, id: u8, groups: Groups) -> Result<CpuId, MachineError> {
    cpuid::of_vcpu(cpuid, id, groups).map_err(|_| MachineError::Lacking("short CPUID"))
}

/// Puts a vCPU with this CPUID into the state in which firmware leaves it.
pub fn prepare_vcpu(fd: &VcpuFd, leaves: &CpuId) -> Result<(), MachineError> {
    fd.set_cpuid2(leaves).map_err(kvm("set CPUID"))?;
    let msrs = registers::model_specific().map_err(|_| MachineError::Lacking("room for MSRs"))?;
    fd.set_msrs(&msrs).map_err(kvm("set MSRs"))?;
    Ok(())
}

/// Puts the first vCPU at the kernel's entry.
pub(super) fn boot(fd: &VcpuFd, entry: Entry) -> Result<(), MachineError> {
    let mut special = fd.get_sregs().map_err(kvm("read registers"))?;
    registers::special(entry, &mut special);
    fd.set_sregs(&special).map_err(kvm("set registers"))?;
    fd.set_regs(&registers::general(entry))
        .map_err(kvm("set registers"))
}

/// Duplicates a vCPU's descriptor, to read its state while its thread is paused.
pub(super) fn second(vm: &VmFd, fd: &VcpuFd) -> Result<VcpuFd, MachineError> {
    // SAFETY: `fd` is open.
    let own = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    let copy = own.try_clone_to_owned()?.into_raw_fd();
    // SAFETY: `copy` is a descriptor of a vCPU of this VM, ours alone.
    unsafe { vm.create_vcpu_from_rawfd(copy) }.map_err(kvm("open a vCPU again"))
}

/// `KVM_GET_STATS_FD` of `linux/kvm.h`.
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;

/// Opens the file of KVM's statistics of a vCPU. Called before the first thread is sealed: no filter allows
/// the request.
///
/// # Errors
/// Fails if the host's KVM has no such file (before Linux 5.14), or the process has no descriptors left.
pub fn statistics(fd: &VcpuFd) -> io::Result<OwnedFd> {
    // SAFETY: the request has no argument, and returns a new descriptor.
    let file = unsafe { libc::ioctl(fd.as_raw_fd(), KVM_GET_STATS_FD) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}
