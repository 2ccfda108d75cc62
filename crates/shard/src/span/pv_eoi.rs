//! Ends of interrupts without an exit. The shard sets a bit in guest memory when no other interrupt waits for
//! the end of the one in service, and the guest clears that bit instead of writing the EOI register (Linux,
//! `Documentation/virt/kvm/x86/msr.rst`, `MSR_KVM_PV_EOI_EN`). KVM offers this for local APICs of its own;
//! the guest sees the same interface here.

use apic::LocalApic;
use vm_memory::{Bytes, GuestAddress};

use crate::memory::GuestRam;

/// Register with the address of the bit.
pub const MSR_KVM_PV_EOI_EN: u32 = 0x4B56_4D04;
/// Bit of CPUID 0x4000_0001, EAX: the register exists.
pub const KVM_FEATURE_PV_EOI: u32 = 1 << 6;
const ENABLED: u64 = 1;
const RESERVED: u64 = 2;
/// Value of the pending bit: the guest may end the interrupt by clearing it.
const PENDING: u8 = 1;

/// PV EOI of one vCPU.
pub struct PvEoi {
    memory: GuestRam,
    register: u64,
    /// Whether the shard has set the bit; the guest may have cleared it since.
    is_pending: bool,
}

impl PvEoi {
    /// Returns PV EOI as disabled.
    pub fn new(memory: GuestRam) -> Self {
        Self {
            memory,
            register: 0,
            is_pending: false,
        }
    }

    /// Returns the register that the guest has written.
    pub fn register(&self) -> u64 {
        self.register
    }

    /// Writes the register for the guest; returns false if the write must fault. An end at the old address
    /// takes effect first.
    pub fn set_register(&mut self, value: u64, apic: &mut LocalApic) -> bool {
        self.test_and_clear_pending(apic);
        let is_valid = value & RESERVED == 0;
        if is_valid {
            self.register = value;
        }
        is_valid
    }

    /// Sets the pending bit if the next end of an interrupt may go unseen. Called before the vCPU enters the
    /// guest.
    pub fn set_pending(&mut self, apic: &LocalApic) {
        if self.register & ENABLED != 0 && apic.may_end_unseen() {
            // The guest gets no bit if its address is not in memory.
            self.is_pending = self.memory.write_obj(PENDING, self.address()).is_ok();
        }
    }

    /// Ends the interrupt if the guest has cleared the pending bit, and clears the bit otherwise. Called
    /// after the vCPU has left the guest, before its exit is served.
    pub fn test_and_clear_pending(&mut self, apic: &mut LocalApic) {
        if !std::mem::take(&mut self.is_pending) {
            return;
        }
        let address = self.address();
        match self.memory.read_obj::<u8>(address) {
            Ok(word) if word & PENDING == 0 => {
                // The interrupt was not level-triggered when the bit was set, and none was accepted since.
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
        // The guest exits before it has ended the interrupt.
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
        // Linux disables PV EOI in the handler of an interrupt that it has just ended so.
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
