//! KVM of a lab host: its device, and VMs that keep the host's kernel from patching itself.

use std::fs;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};

/// The enable bit of a local APIC's base register.
const APIC_ENABLED: u64 = 1 << 11;

/// Sets the usual mode of `/dev/kvm` on a host with KVM.
pub fn open() {
    let _ = fs::set_permissions("/dev/kvm", std::os::unix::fs::PermissionsExt::from_mode(0o666));
}

/// VMs that never run. While they are there, KVM's static keys stay as they are.
pub struct Keys {
    _vms: [(VmFd, VcpuFd); 2],
}

/// Turns KVM's static keys on for as long as the result lives.
///
/// Holds VMs that keep static keys unchanged. The kernel patches its code when a static key changes: at the
/// first VM of a host and after its last one the code of each task switch (`preempt_notifier_key`), and at a
/// vCPU's start that of its interrupts. QEMU 7.2 translates code without a lock on its page. A CPU can
/// therefore keep a translation of the patch's breakpoint, which is gone: it takes that breakpoint forever,
/// and the host locks up. Here one VM has a local APIC that is disabled in both ways, and one has none, so
/// that no other VM's start or end changes a key.
pub fn hold_keys() -> Option<Keys> {
    match keys() {
        Ok(keys) => Some(keys),
        Err(error) => {
            println!("mirrorball lab: KVM's static keys stay as they are: {error}");
            None
        }
    }
}

fn keys() -> Result<Keys, kvm_ioctls::Error> {
    let kvm = Kvm::new()?;
    let with = kvm.create_vm()?;
    with.create_irq_chip()?;
    let off = with.create_vcpu(0)?;
    let mut registers = off.get_sregs()?;
    registers.apic_base &= !APIC_ENABLED;
    off.set_sregs(&registers)?;
    let without = kvm.create_vm()?;
    let none = without.create_vcpu(0)?;
    Ok(Keys {
        _vms: [(with, off), (without, none)],
    })
}
