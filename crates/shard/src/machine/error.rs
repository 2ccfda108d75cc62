//! Reasons why a VM can't be created from its launch spec.

use std::io;

use crate::arch::x86_64::acpi;
use crate::arch::x86_64::kernel::KernelError;
use crate::arch::x86_64::state::StateError;
use crate::bus::Overlap;
use crate::memory::MemoryError;
use crate::memory::replica::ReplicaError;
use crate::paging::PagingError;

/// Reason why the VM can't be created.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The memory can't be created.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The shard's replica of the memory can't be created.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The memory can't be paged.
    #[error(transparent)]
    Paging(#[from] PagingError),
    /// Kernel, initramfs or command line can't be loaded.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The address map has no room.
    #[error("memory and disks do not fit in the guest's address space")]
    Layout,
    /// The ACPI tables are too large.
    #[error(transparent)]
    Acpi(#[from] acpi::TooLarge),
    /// Two devices claim the same addresses; a bug.
    #[error(transparent)]
    Bus(#[from] Overlap),
    /// KVM lacks a required capability.
    #[error("this host's KVM has no {0}")]
    Lacking(&'static str),
    /// The VM has more vCPUs than KVM supports.
    #[error("the VM wants {wanted} CPUs, but this host's KVM takes {max}")]
    TooManyCpus {
        /// vCPUs of the VM.
        wanted: u8,
        /// vCPUs that KVM supports.
        max: usize,
    },
    /// KVM refused an operation.
    #[error("KVM: cannot {what}")]
    Kvm {
        /// The refused operation.
        what: &'static str,
        /// Error of KVM.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// The saved state can't be restored.
    #[error(transparent)]
    State(#[from] StateError),
    /// The host refused a resource.
    #[error("cannot make the VM's devices")]
    Host(#[from] io::Error),
}

/// Returns the error of KVM's refusal to do `what`.
pub(super) fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> MachineError {
    move |source| MachineError::Kvm { what, source }
}
