//! KVM's VM before it has vCPUs.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Cap, Kvm, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::error::{MachineError, kvm};
use crate::arch::x86_64::layout;
use crate::memory::GuestRam;
use crate::span;

/// Checks that this KVM has all required capabilities and supports this many vCPUs.
pub fn check_kvm(kvm_fd: &Kvm, vcpus: u8) -> Result<(), MachineError> {
    for (cap, name) in [
        (Cap::Irqchip, "interrupt controller"),
        (Cap::Irqfd, "irqfd"),
        (Cap::Ioeventfd, "ioeventfd"),
        (Cap::UserMemory, "user memory"),
        (Cap::ExtCpuid, "CPUID"),
        (Cap::TscDeadlineTimer, "TSC deadline timer"),
    ] {
        if !kvm_fd.check_extension(cap) {
            return Err(MachineError::Lacking(name));
        }
    }
    let max = kvm_fd.get_max_vcpus();
    if usize::from(vcpus) > max {
        return Err(MachineError::TooManyCpus { wanted: vcpus, max });
    }
    Ok(())
}

/// Creates a VM with KVM's interrupt controllers.
pub(super) fn create_vm(kvm_fd: &Kvm) -> Result<VmFd, MachineError> {
    let vm = bare_vm(kvm_fd)?;
    vm.create_irq_chip()
        .map_err(kvm("make the interrupt controllers"))?;
    Ok(vm)
}

/// Creates a VM whose interrupt controllers the shard emulates.
pub fn create_shard_vm(kvm_fd: &Kvm) -> Result<VmFd, MachineError> {
    span::machine::check(kvm_fd)?;
    let vm = bare_vm(kvm_fd)?;
    span::machine::prepare(&vm)?;
    Ok(vm)
}

/// Returns whether the host's kernel uses the TSC as its clock source.
pub fn host_relies_on_tsc() -> bool {
    std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource")
        .is_ok_and(|source| source.trim() == "tsc")
}

/// Returns the frequency of the vCPUs' TSC on this host, kHz.
pub fn tsc_khz(kvm_fd: &Kvm) -> Result<u32, MachineError> {
    bare_vm(kvm_fd)?
        .create_vcpu(0)
        .and_then(|fd| fd.get_tsc_khz())
        .map_err(kvm("read the frequency of the TSC"))
}

fn bare_vm(kvm_fd: &Kvm) -> Result<VmFd, MachineError> {
    let vm = loop {
        match kvm_fd.create_vm() {
            Ok(vm) => break vm,
            // KVM returns this error if a signal arrives while it accounts for the memory of other processes.
            Err(error) if error.errno() == libc::EINTR => (),
            Err(error) => return Err(kvm("make a VM")(error)),
        }
    };
    vm.set_identity_map_address(layout::IDENTITY_MAP_START)
        .map_err(kvm("place the identity map"))?;
    vm.set_tss_address(layout::TSS_START as usize)
        .map_err(kvm("place the task-state pages"))?;
    Ok(vm)
}

/// Maps the memory into the guest.
pub fn map_memory(vm: &VmFd, memory: &GuestRam) -> Result<(), MachineError> {
    for (slot, region) in memory.iter().enumerate() {
        let slot = kvm_userspace_memory_region {
            slot: slot as u32,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
            flags: 0,
        };
        // SAFETY: the region is a live mapping of that size; `Machine` and `Running` keep it as long as the
        // VM.
        unsafe { vm.set_user_memory_region(slot) }.map_err(kvm("map guest memory"))?;
    }
    Ok(())
}

/// A thread that adds guest memory to a VM.
///
/// For each slot KVM waits until no vCPU uses the former slots (a grace period of SRCU, 5 to 7 ms on a Linux
/// 6.18 host, measured on 27 November 2026). Meanwhile the shard loads the kernel and enters its sandbox. The
/// thread makes no other system call, and no vCPU exists before it has ended.
pub(super) struct MemoryMapping(JoinHandle<Result<(), MachineError>>);

impl MemoryMapping {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the host gives no thread.
    pub(super) fn begin(vm: &Arc<VmFd>, memory: &GuestRam) -> io::Result<Self> {
        let (vm, memory) = (vm.clone(), memory.clone());
        std::thread::Builder::new()
            .name("memory".into())
            .spawn(move || map_memory(&vm, &memory))
            .map(Self)
    }

    /// Waits until the VM has its memory.
    ///
    /// # Errors
    /// If KVM refused a slot.
    pub(super) fn finish(self) -> Result<(), MachineError> {
        self.0
            .join()
            .map_err(|_| io::Error::other("the thread that maps guest memory panicked"))?
    }
}
