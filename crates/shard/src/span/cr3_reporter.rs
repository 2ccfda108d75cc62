//! Reports the root of a vCPU's page tables (CR3) to the merger of the guest's page tables.

use std::sync::Arc;

use dsm::Causal;
use kvm_ioctls::{SyncReg, VcpuFd};

/// Reporter of one vCPU's CR3.
pub(super) struct Cr3Reporter {
    causal: Arc<Causal>,
    vcpu: u8,
    /// CR3 in the page that KVM shares.
    cr3: *const u64,
}

// SAFETY: the page belongs to the vCPU, which one thread at a time uses; only that thread uses the pointer.
unsafe impl Send for Cr3Reporter {}

impl Cr3Reporter {
    /// Makes KVM store the CR3 of this vCPU at every exit.
    pub(super) fn of(fd: &mut VcpuFd, vcpu: u8, causal: Arc<Causal>) -> Self {
        fd.set_sync_valid_reg(SyncReg::SystemRegister);
        // SAFETY: this member of the union is the one that KVM fills after the call above.
        let cr3 = unsafe { &raw const fd.get_kvm_run().s.regs.sregs.cr3 };
        Self { causal, vcpu, cr3 }
    }

    /// Reports CR3 after the vCPU has left the guest.
    pub(super) fn report(&self) {
        // SAFETY: the page that KVM shares is mapped as long as the vCPU; this is the vCPU's thread, and it
        // is out of the guest.
        let cr3 = unsafe { self.cr3.read_volatile() };
        self.causal.root(usize::from(self.vcpu), Some(cr3));
    }

    /// Withdraws the report, as the vCPU migrates to another shard.
    pub(super) fn withdraw(&self) {
        self.causal.root(usize::from(self.vcpu), None);
    }
}
