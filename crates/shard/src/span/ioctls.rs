//! KVM requests that the library `kvm-ioctls` lacks.

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_device_attr, kvm_interrupt};
use kvm_ioctls::{Error, VcpuFd};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

ioctl_iow_nr!(KVM_INTERRUPT, KVMIO, 0x86, kvm_interrupt);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_HAS_DEVICE_ATTR, KVMIO, 0xe3, kvm_device_attr);

/// Injects an interrupt into a vCPU that can accept one.
pub fn interrupt(fd: &VcpuFd, vector: u8) -> Result<(), Error> {
    let interrupt = kvm_interrupt {
        irq: u32::from(vector),
    };
    // SAFETY: `fd` is a vCPU's; the structure lives through the call.
    succeeded(unsafe { ioctl_with_ref(fd, KVM_INTERRUPT(), &interrupt) })
}

/// Returns whether KVM has a TSC offset for this vCPU (Linux 5.16 and later).
pub fn has_tsc_offset(fd: &VcpuFd) -> bool {
    let attribute = tsc_offset(&0);
    // SAFETY: `fd` is a vCPU's; the structure lives through the call, which reads nothing else.
    unsafe { ioctl_with_ref(fd, KVM_HAS_DEVICE_ATTR(), &attribute) == 0 }
}

/// Sets the offset that is added to the host's TSC for this vCPU. KVM takes the offset as it is. It would
/// compare a write of the register with other vCPUs', and change it.
pub fn set_tsc_offset(fd: &VcpuFd, offset: u64) -> Result<(), Error> {
    let attribute = tsc_offset(&offset);
    // SAFETY: `fd` is a vCPU's; the structure, and the offset that it points to, live through the call.
    succeeded(unsafe { ioctl_with_ref(fd, KVM_SET_DEVICE_ATTR(), &attribute) })
}

fn tsc_offset(offset: &u64) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: &raw const *offset as u64,
        flags: 0,
    }
}

fn succeeded(result: libc::c_int) -> Result<(), Error> {
    if result == 0 { Ok(()) } else { Err(Error::last()) }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::{Msrs, kvm_msr_entry};
    use kvm_ioctls::Kvm;

    use super::*;
    use crate::arch::x86_64::msr::MSR_TSC;

    /// This needs a KVM that keeps offsets: one that emulates guests gives all of them the host's TSC.
    #[test]
    fn tsc_offset_is_added_to_the_guest_tsc() {
        const FURTHER: u64 = 1 << 50;
        let kvm = match Kvm::new() {
            Ok(kvm) => kvm,
            Err(error) => return eprintln!("left out: /dev/kvm: {error}"),
        };
        let vm = kvm.create_vm().expect("a VM");
        let fd = vm.create_vcpu(0).expect("a vCPU");
        assert!(has_tsc_offset(&fd));
        let read = || {
            let entry = kvm_msr_entry {
                index: MSR_TSC,
                ..Default::default()
            };
            let mut registers = Msrs::from_entries(&[entry]).expect("one");
            assert_eq!(fd.get_msrs(&mut registers).expect("KVM reads it"), 1);
            registers.as_slice()[0].data
        };
        set_tsc_offset(&fd, 0).expect("KVM takes it");
        let mut before = read();
        for steps in 1..=3 {
            set_tsc_offset(&fd, FURTHER * steps).expect("KVM takes it");
            let after = read();
            if after < before + FURTHER / 2 {
                return eprintln!("left out: this machine's KVM adds nothing to the host's counter");
            }
            assert!(after - before - FURTHER < FURTHER / 2);
            before = after;
        }
    }
}
