//! Requests to KVM that the library has not.

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_device_attr, kvm_interrupt};
use kvm_ioctls::{Error, VcpuFd};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

ioctl_iow_nr!(KVM_INTERRUPT, KVMIO, 0x86, kvm_interrupt);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_HAS_DEVICE_ATTR, KVMIO, 0xe3, kvm_device_attr);

/// Injects an interrupt into a vCPU that is ready for one.
pub fn interrupt(fd: &VcpuFd, vector: u8) -> Result<(), Error> {
    let interrupt = kvm_interrupt {
        irq: u32::from(vector),
    };
    // SAFETY: `fd` is a vCPU's; the structure lives through the call.
    succeeded(unsafe { ioctl_with_ref(fd, KVM_INTERRUPT(), &interrupt) })
}

/// What is added to the host's TSC for this vCPU; false when this KVM can't be told (Linux 5.16 can).
pub fn set_tsc_offset(fd: &VcpuFd, offset: u64) -> Result<bool, Error> {
    let attribute = kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: &raw const offset as u64,
        flags: 0,
    };
    // SAFETY: `fd` is a vCPU's; the structure, and the offset that it points to, live through the call.
    let has = unsafe { ioctl_with_ref(fd, KVM_HAS_DEVICE_ATTR(), &attribute) };
    if has != 0 {
        return Ok(false);
    }
    // SAFETY: as above.
    succeeded(unsafe { ioctl_with_ref(fd, KVM_SET_DEVICE_ATTR(), &attribute) }).map(|()| true)
}

fn succeeded(result: libc::c_int) -> Result<(), Error> {
    if result == 0 { Ok(()) } else { Err(Error::last()) }
}
