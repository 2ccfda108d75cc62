//! Why a VM can't be made of its launch spec.

use std::io;

use crate::arch::x86_64::acpi;
use crate::arch::x86_64::kernel::KernelError;
use crate::arch::x86_64::state::StateError;
use crate::bus::Overlap;
use crate::memory::MemoryError;
use crate::memory::replica::ReplicaError;

/// Why the VM can't be made.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// Memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Memory of the shard's own.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// Kernel, initramfs or command line.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The address map.
    #[error("memory and disks do not fit in the guest's address space")]
    Layout,
    /// The ACPI tables.
    #[error(transparent)]
    Acpi(#[from] acpi::TooLarge),
    /// Devices in each other's way; a bug.
    #[error(transparent)]
    Bus(#[from] Overlap),
    /// KVM lacks what is needed.
    #[error("this host's KVM has no {0}")]
    Lacking(&'static str),
    /// More vCPUs than KVM takes.
    #[error("the VM wants {wanted} CPUs, but this host's KVM takes {max}")]
    TooManyCpus {
        /// What the VM wants.
        wanted: u8,
        /// What KVM takes.
        max: usize,
    },
    /// KVM refused.
    #[error("KVM: cannot {what}")]
    Kvm {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// The state to go on from.
    #[error(transparent)]
    State(#[from] StateError),
    /// The host refused.
    #[error("cannot make the VM's devices")]
    Host(#[from] io::Error),
}

/// What KVM refused, while this was being done.
pub(super) fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> MachineError {
    move |source| MachineError::Kvm { what, source }
}
