//! Ends of interrupts that cost no exit: a bit in guest memory that we set when nobody waits for the end of the interrupt in
//! service, and that the guest clears instead of writing the register (Linux, `Documentation/virt/kvm/x86/msr.rst`,
//! `MSR_KVM_PV_EOI_EN`). KVM does it for controllers of its own; for the guest it is the same.

use apic::LocalApic;
use vm_memory::{Bytes, GuestAddress};

use crate::memory::GuestRam;

/// The register by which the guest says where the bit is.
pub const MSR_KVM_PV_EOI_EN: u32 = 0x4B56_4D04;
/// CPUID 0x4000_0001, EAX: it is there.
pub const KVM_FEATURE_PV_EOI: u32 = 1 << 6;
const ENABLED: u64 = 1;
const RESERVED: u64 = 2;
/// The guest's word: the next end is not waited for.
const PENDING: u8 = 1;

/// One vCPU's.
pub struct PvEoi {
    memory: GuestRam,
    register: u64,
    /// The bit is set, or was cleared by the guest.
    is_pending: bool,
}

impl PvEoi {
    /// Not enabled.
    pub fn new(memory: GuestRam) -> Self {
        Self {
            memory,
            register: 0,
            is_pending: false,
        }
    }

    /// What the guest has written.
    pub fn register(&self) -> u64 {
        self.register
    }

    /// The guest writes the register; false if that is to fault. What it has ended at the old place is ended first.
    pub fn set_register(&mut self, value: u64, apic: &mut LocalApic) -> bool {
        self.test_and_clear_pending(apic);
        let is_valid = value & RESERVED == 0;
        if is_valid {
            self.register = value;
        }
        is_valid
    }

    /// Before the vCPU enters the guest: sets the bit, if the next end may come unseen.
    pub fn set_pending(&mut self, apic: &LocalApic) {
        if self.register & ENABLED != 0 && apic.may_end_unseen() {
            // A place that is no memory is the guest's own fault: it gets no bit.
            self.is_pending = self.memory.write_obj(PENDING, self.address()).is_ok();
        }
    }

    /// After the vCPU has left the guest, before anything is done for it: ends what the guest has ended, and takes the bit
    /// back.
    pub fn test_and_clear_pending(&mut self, apic: &mut LocalApic) {
        if !std::mem::take(&mut self.is_pending) {
            return;
        }
        let address = self.address();
        match self.memory.read_obj::<u8>(address) {
            Ok(word) if word & PENDING == 0 => {
                // It was no level when it was is_pending, and nothing has been accepted since.
                apic.end_of_interrupt();
            }
            Ok(word) => {
                let _ = self.memory.write_obj(word & !PENDING, address);
            }
            Err(_) => {}
        }
    }

    fn address(&self) -> GuestAddress {
        GuestAddress(self.register & !(ENABLED | RESERVED))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vm_memory::GuestMemoryMmap;

    use super::*;

    const ADDRESS: u64 = 0x1004;
    const SPURIOUS: u32 = 0x80F;

    fn parts() -> (PvEoi, LocalApic, GuestRam) {
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x2000)]).expect("memory"));
        let mut apic = LocalApic::new(0, 1);
        apic.write(SPURIOUS, 0x1FF, 0).expect("enabled");
        (PvEoi::new(memory.clone()), apic, memory)
    }

    fn word(memory: &GuestRam) -> u8 {
        memory.read_obj(GuestAddress(ADDRESS)).expect("in memory")
    }

    #[test]
    fn interrupt_ends_only_if_the_guest_cleared_the_pending_bit() {
        let (mut eoi, mut apic, memory) = parts();
        assert!(eoi.set_register(ADDRESS | ENABLED, &mut apic));
        eoi.set_pending(&apic);
        assert_eq!(word(&memory), 0, "nothing is in service");
        apic.accept(0x40, false);
        apic.take();
        eoi.set_pending(&apic);
        assert_eq!(word(&memory), 1);
        // The guest is called out before it has ended it.
        eoi.test_and_clear_pending(&mut apic);
        assert_eq!(word(&memory), 0);
        apic.accept(0x40, false);
        assert_eq!(apic.next(), None, "still in service");
        assert!(!apic.may_end_unseen());
        eoi.set_pending(&apic);
        assert_eq!(word(&memory), 0, "the second waits for the end of the first");
        apic.end_of_interrupt();
        apic.take();
        eoi.set_pending(&apic);
        memory
            .write_obj(0_u8, GuestAddress(ADDRESS))
            .expect("the guest ends it");
        eoi.test_and_clear_pending(&mut apic);
        eoi.test_and_clear_pending(&mut apic);
        apic.accept(0x40, false);
        assert_eq!(apic.next(), Some(0x40), "ended, once");
        // Linux turns it off in the handler of an interrupt that it has just ended so.
        apic.take();
        eoi.set_pending(&apic);
        memory
            .write_obj(0_u8, GuestAddress(ADDRESS))
            .expect("the guest ends it");
        assert!(eoi.set_register(0, &mut apic));
        apic.accept(0x40, false);
        assert_eq!(apic.next(), Some(0x40));
    }

    #[test]
    fn invalid_register_value_shares_no_pending_bit() {
        let (mut eoi, mut apic, _memory) = parts();
        assert!(!eoi.set_register(ADDRESS | ENABLED | RESERVED, &mut apic));
        assert!(eoi.set_register((1 << 50) | ENABLED, &mut apic));
        apic.accept(0x40, false);
        apic.take();
        eoi.set_pending(&apic);
        eoi.test_and_clear_pending(&mut apic);
        apic.accept(0x40, false);
        assert_eq!(apic.next(), None);
    }
}
