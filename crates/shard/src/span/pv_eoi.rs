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
const UNSEEN: u8 = 1;

/// One vCPU's.
pub struct PvEoi {
    memory: GuestRam,
    register: u64,
    /// The bit is set, or was cleared by the guest.
    offered: bool,
}

impl PvEoi {
    /// Not enabled.
    pub fn new(memory: GuestRam) -> Self {
        Self {
            memory,
            register: 0,
            offered: false,
        }
    }

    /// What the guest has written.
    pub fn register(&self) -> u64 {
        self.register
    }

    /// The guest writes the register; false if that is to fault. What it has ended at the old place is ended first.
    pub fn set_register(&mut self, value: u64, apic: &mut LocalApic) -> bool {
        self.collect(apic);
        let sane = value & RESERVED == 0;
        if sane {
            self.register = value;
        }
        sane
    }

    /// Before the vCPU enters the guest: sets the bit, if the next end may come unseen.
    pub fn offer(&mut self, apic: &LocalApic) {
        if self.register & ENABLED != 0 && apic.may_end_unseen() {
            // A place that is no memory is the guest's own fault: it gets no bit.
            self.offered = self.memory.write_obj(UNSEEN, self.place()).is_ok();
        }
    }

    /// After the vCPU has left the guest, before anything is done for it: ends what the guest has ended, and takes the bit
    /// back.
    pub fn collect(&mut self, apic: &mut LocalApic) {
        if !std::mem::take(&mut self.offered) {
            return;
        }
        let place = self.place();
        match self.memory.read_obj::<u8>(place) {
            Ok(word) if word & UNSEEN == 0 => {
                // It was no level when it was offered, and nothing has been accepted since.
                apic.end_of_interrupt();
            }
            Ok(word) => {
                let _ = self.memory.write_obj(word & !UNSEEN, place);
            }
            Err(_) => {}
        }
    }

    fn place(&self) -> GuestAddress {
        GuestAddress(self.register & !(ENABLED | RESERVED))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vm_memory::GuestMemoryMmap;

    use super::*;

    const PLACE: u64 = 0x1004;
    const SPURIOUS: u32 = 0x80F;

    fn parts() -> (PvEoi, LocalApic, GuestRam) {
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x2000)]).expect("memory"));
        let mut apic = LocalApic::new(0, 1);
        apic.write(SPURIOUS, 0x1FF, 0).expect("enabled");
        (PvEoi::new(memory.clone()), apic, memory)
    }

    fn word(memory: &GuestRam) -> u8 {
        memory.read_obj(GuestAddress(PLACE)).expect("in memory")
    }

    #[test]
    fn what_the_guest_ended_is_ended_and_what_it_did_not_is_not() {
        let (mut eoi, mut apic, memory) = parts();
        assert!(eoi.set_register(PLACE | ENABLED, &mut apic));
        eoi.offer(&apic);
        assert_eq!(word(&memory), 0, "nothing is in service");
        apic.accept(0x40, false);
        apic.take();
        eoi.offer(&apic);
        assert_eq!(word(&memory), 1);
        // The guest is called out before it has ended it.
        eoi.collect(&mut apic);
        assert_eq!(word(&memory), 0);
        apic.accept(0x40, false);
        assert_eq!(apic.next(), None, "still in service");
        assert!(!apic.may_end_unseen());
        eoi.offer(&apic);
        assert_eq!(word(&memory), 0, "the second waits for the end of the first");
        apic.end_of_interrupt();
        apic.take();
        eoi.offer(&apic);
        memory
            .write_obj(0_u8, GuestAddress(PLACE))
            .expect("the guest ends it");
        eoi.collect(&mut apic);
        eoi.collect(&mut apic);
        apic.accept(0x40, false);
        assert_eq!(apic.next(), Some(0x40), "ended, once");
        // Linux turns it off in the handler of an interrupt that it has just ended so.
        apic.take();
        eoi.offer(&apic);
        memory
            .write_obj(0_u8, GuestAddress(PLACE))
            .expect("the guest ends it");
        assert!(eoi.set_register(0, &mut apic));
        apic.accept(0x40, false);
        assert_eq!(apic.next(), Some(0x40));
    }

    #[test]
    fn no_place_is_no_offer() {
        let (mut eoi, mut apic, _memory) = parts();
        assert!(!eoi.set_register(PLACE | ENABLED | RESERVED, &mut apic));
        assert!(eoi.set_register((1 << 50) | ENABLED, &mut apic));
        apic.accept(0x40, false);
        apic.take();
        eoi.offer(&apic);
        eoi.collect(&mut apic);
        apic.accept(0x40, false);
        assert_eq!(apic.next(), None);
    }
}
