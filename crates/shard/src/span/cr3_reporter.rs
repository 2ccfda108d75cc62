//! The root of a vCPU's page tables, of which those who merge page tables must know.

use std::sync::Arc;

use dsm::Causal;
use kvm_ioctls::{SyncReg, VcpuFd};

/// Where a vCPU's CR3 is told.
pub(super) struct Cr3Reporter {
    causal: Arc<Causal>,
    vcpu: u8,
    /// In the page that KVM shares.
    cr3: *const u64,
}

// SAFETY: the page is the vCPU's, which is used by one thread at a time; the pointer is used by that thread
// only.
unsafe impl Send for Cr3Reporter {}

impl Cr3Reporter {
    /// Has KVM show the CR3 of this vCPU at every exit.
    pub(super) fn of(fd: &mut VcpuFd, vcpu: u8, causal: Arc<Causal>) -> Self {
        fd.set_sync_valid_reg(SyncReg::SystemRegister);
        // SAFETY: the member of a union that KVM fills, as it was just told.
        let cr3 = unsafe { &raw const fd.get_kvm_run().s.regs.sregs.cr3 };
        Self { causal, vcpu, cr3 }
    }

    /// The vCPU has left the guest.
    pub(super) fn report(&self) {
        // SAFETY: in the page that KVM shares, mapped as long as the vCPU, whose thread this is; it is out of the
        // guest.
        let cr3 = unsafe { self.cr3.read_volatile() };
        self.causal.root(usize::from(self.vcpu), Some(cr3));
    }

    /// It goes to another shard.
    pub(super) fn withdraw(&self) {
        self.causal.root(usize::from(self.vcpu), None);
    }
}
