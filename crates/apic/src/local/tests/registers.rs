//! Tests of the existing registers, their bits, and the writes that they refuse.

use super::*;

/// SDM 11.12.1.2: of 0x800 to 0x8FF these can be read; all others fault.
#[test]
fn only_implemented_registers_are_readable() {
    let apic = enabled(3);
    let mut there: Vec<u32> = vec![0x802, 0x803, 0x808, 0x80A, 0x80D, 0x80F, 0x828, 0x830, 0x83E];
    there.extend(0x810..=0x827);
    there.extend(0x832..=0x839);
    for msr in 0x800..=0x8FF {
        assert_eq!(apic.read(msr, 0).is_ok(), there.contains(&msr), "{msr:#x}");
    }
}

/// SDM 11.12.1.2: of 0x800 to 0x8FF these can be written (with 0, which has no reserved bits); all others
/// fault, and change nothing.
#[test]
fn only_implemented_registers_are_writable() {
    let mut there: Vec<u32> = vec![0x808, 0x80B, 0x80F, 0x828, 0x830, 0x83E, 0x83F];
    there.extend(0x832..=0x838);
    for msr in 0x800..=0x8FF {
        let mut apic = enabled(3);
        let before = apic.clone();
        let outcome = apic.write(msr, 0, 0);
        assert_eq!(outcome.is_ok(), there.contains(&msr), "{msr:#x}");
        assert!(outcome.is_ok() || apic == before, "{msr:#x}");
    }
}

/// SDM 11.12.1.3 and the figures of the registers: each bit alone is taken or faults, and a fault changes
/// nothing.
#[test]
fn reserved_bits_fault() {
    let taken: [(u32, u64); 15] = [
        (0x808, 0xFF),
        (0x80B, 0),
        (0x80F, 0x3FF),
        (0x828, 0),
        // 0x100 to 0x800: delivery modes 001, 010, 100, and logical destinations
        (0x830, 0xFFFF_FFFF_000C_DFFF),
        // Mode 11 takes both bits.
        (0x832, 0x7_10FF),
        (0x833, 0x1_17FF),
        (0x834, 0x1_17FF),
        (0x835, 0x1_F7FF),
        (0x836, 0x1_F7FF),
        (0x837, 0x1_10FF),
        (0x838, 0xFFFF_FFFF),
        (0x83E, 0xB),
        (0x83F, 0xFF),
        (0x6E0, u64::MAX),
    ];
    for (msr, bits) in taken {
        for bit in 0..64 {
            let mut apic = enabled(1);
            let before = apic.clone();
            let outcome = apic.write(msr, 1 << bit, 0);
            assert_eq!(outcome.is_ok(), bits >> bit & 1 == 1, "{msr:#x} bit {bit}");
            assert!(outcome.is_ok() || apic == before, "{msr:#x} bit {bit}");
        }
    }
}

#[test]
fn access_to_absent_registers_faults() {
    let mut apic = enabled(0);
    for msr in [
        0,
        0x10,
        0x1A,
        0x1C,
        0x6DF,
        0x6E1,
        0x7FF,
        0x900,
        0xC000_0080,
        u32::MAX,
    ] {
        assert_eq!(apic.read(msr, 0), Err(GeneralProtection));
        assert_eq!(apic.write(msr, 0, 0), FAULT);
    }
}

/// SDM 11.4.7.1, 11.12.5.1: the state after power-on, here in x2APIC mode.
#[test]
fn reset_apic_is_disabled_and_masked() {
    let apic = LocalApic::new(0x25, 10);
    assert!(!apic.is_enabled());
    assert_eq!(read(&apic, 0x1B), 0xFEE0_0C00);
    assert_eq!(read(&apic, 0x802), 0x25);
    // SDM 11.4.8: integrated, 6 LVT entries, no directed EOI
    assert_eq!(read(&apic, 0x803), 0x0005_0014);
    // SDM 11.12.10.2: cluster 2, member 5
    assert_eq!(read(&apic, 0x80D), 0x0002_0020);
    assert_eq!(read(&apic, 0x80F), 0xFF);
    for entry in 0x832..=0x837 {
        assert_eq!(read(&apic, entry), 0x1_0000, "{entry:#x}");
    }
    let zero = [0x808, 0x80A, 0x828, 0x830, 0x838, 0x839, 0x83E, 0x6E0];
    for msr in zero.into_iter().chain(0x810..=0x827) {
        assert_eq!(read(&apic, msr), 0, "{msr:#x}");
    }
    assert_eq!(
        read(&LocalApic::new(0, 10), 0x1B),
        0xFEE0_0D00,
        "the bootstrap processor"
    );
}

/// SDM 11.5.1: delivery status and remote IRR can only be read; they are not reserved.
#[test]
fn read_only_lvt_bits_are_preserved() {
    let mut apic = enabled(1);
    write(&mut apic, 0x835, 0x1_F7FF);
    assert_eq!(read(&apic, 0x835), 0x1_A7FF);
    write(&mut apic, 0x832, 0x1_10FF);
    assert_eq!(read(&apic, 0x832), 0x1_00FF);
}

/// SDM 11.4.7.2: while it is disabled by software all entries are masked, and can't be unmasked.
#[test]
fn software_disable_masks_every_lvt_entry() {
    let mut apic = enabled(1);
    for entry in 0x832..=0x837 {
        write(&mut apic, entry, 0x40);
        assert_eq!(read(&apic, entry), 0x40);
    }
    assert_eq!(apic.write(0x80F, 0xFF, 0), Ok(Written::Enabled(false)));
    for entry in 0x832..=0x837 {
        assert_eq!(read(&apic, entry), 0x1_0040);
        write(&mut apic, entry, 0x41);
        assert_eq!(read(&apic, entry), 0x1_0041);
    }
    assert_eq!(apic.write(0x80F, 0x1FF, 0), Ok(Written::Enabled(true)));
    assert_eq!(read(&apic, 0x833), 0x1_0041, "enabling unmasks nothing");
    assert_eq!(apic.write(0x80F, 0x120, 0), NOTHING, "still enabled");
    assert_eq!(read(&apic, 0x80F), 0x120);
}

/// SDM 11.12.5: out of x2APIC mode there is one legal way, to disabled; the way back leads through xAPIC
/// mode.
#[test]
fn apic_base_leaves_x2apic_mode_only_to_disabled() {
    const X2APIC: u64 = 0xFEE0_0C00;
    let mut apic = enabled(1);
    write(&mut apic, 0x1B, X2APIC);
    let refused = [
        ("to xAPIC mode", 0xFEE0_0800),
        ("extended without enabled", 0xFEE0_0400),
        ("bootstrap processor", X2APIC | 1 << 8),
        ("moved", 0xFEF0_0C00),
        ("reserved bit 9", X2APIC | 1 << 9),
        ("reserved bit 0", X2APIC | 1),
        ("reserved bit 63", X2APIC | 1 << 63),
    ];
    for (what, value) in refused {
        assert_eq!(apic.write(0x1B, value, 0), FAULT, "{what}");
    }
    apic.accept(0x40, false);
    assert_eq!(apic.write(0x1B, 0xFEE0_0000, 0), Ok(Written::Enabled(false)));
    assert_eq!(read(&apic, 0x1B), 0xFEE0_0000);
    assert_eq!(apic.next(), None, "all is lost");
    assert_eq!(apic.read(0x802, 0), Err(GeneralProtection));
    assert_eq!(apic.write(0x80F, 0x1FF, 0), FAULT);
    assert_eq!(apic.write(0x830, 0x40, 0), FAULT);
    write(&mut apic, 0x1B, 0xFEE0_0000);
    for back in [X2APIC, 0xFEE0_0800] {
        assert_eq!(apic.write(0x1B, back, 0), FAULT);
    }
    apic.accept(0x40, false);
    assert_eq!(apic.next(), None);
    apic.init();
    assert_eq!(read(&apic, 0x1B), 0xFEE0_0000, "INIT keeps the mode");
    assert!(apic.is_sane());
}

/// SDM 11.12.5.1: INIT in x2APIC mode keeps the mode and the id, and resets all else.
#[test]
fn init_resets_all_state_but_id_and_mode() {
    let mut apic = enabled(0x11);
    for vector in [0x30, 0x55, 0x81] {
        apic.accept(vector, true);
        apic.take();
        apic.accept(vector, true);
    }
    apic.accept(3, false);
    for (msr, value) in [
        (0x808, 0x20),
        (0x830, 0x40),
        (0x832, 0x2_0040),
        (0x838, 100),
        (0x83E, 3),
        (0x835, 0x700),
    ] {
        apic.write(msr, value, 0).expect("legal writes");
    }
    apic.init();
    assert_eq!(apic, LocalApic::new(0x11, 10));
}

/// SDM 11.5.3: errors accumulate until the register is written; that shows them and clears the rest.
#[test]
fn error_status_is_latched_on_write() {
    let mut apic = enabled(1);
    apic.accept(15, false);
    write(&mut apic, 0x83F, 0);
    assert_eq!(read(&apic, 0x828), 0);
    write(&mut apic, 0x828, 0);
    assert_eq!(read(&apic, 0x828), 0x60, "one received, one sent");
    assert_eq!(read(&apic, 0x828), 0x60);
    write(&mut apic, 0x828, 0);
    assert_eq!(read(&apic, 0x828), 0);
}

/// SDM 11.5.3: the error interrupt is raised once, until the register is written; SDM 11.5.1: unless it is
/// masked.
#[test]
fn error_interrupt_is_sent_once_until_esr_write() {
    let mut apic = enabled(1);
    apic.accept(1, false);
    assert_eq!(apic.next(), None, "masked");
    write(&mut apic, 0x828, 0);
    write(&mut apic, 0x837, 0xFE);
    apic.accept(1, false);
    assert_eq!(apic.take(), Some(0xFE));
    assert_eq!(apic.end_of_interrupt(), None, "edge-triggered");
    apic.accept(2, false);
    assert_eq!(apic.next(), None);
    write(&mut apic, 0x828, 0);
    write(&mut apic, 0x830, 0x0F);
    assert_eq!(apic.take(), Some(0xFE));
}

/// SDM 11.5.3: "or in an interrupt generated locally from the local vector table".
#[test]
fn error_interrupt_with_an_illegal_vector_sets_an_error_bit() {
    let mut apic = enabled(1);
    write(&mut apic, 0x837, 0x05);
    write(&mut apic, 0x83F, 3);
    assert_eq!(apic.next(), None);
    write(&mut apic, 0x828, 0);
    assert_eq!(read(&apic, 0x828), 0x60);
}
